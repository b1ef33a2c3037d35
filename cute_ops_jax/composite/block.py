"""Parts of a transformer's block: :mod:`cute_ops.composite.block`."""

from cute_ops.composite.block import Block
from cute_ops.composite.public import published
from cute_ops_jax.composite.products import products
from cute_ops_jax.primitive.arrays import checked

_block = Block(products)
linear_add_rmsnorm = published(_block.linear_add_rmsnorm, __name__, "Array", checked)
rmsnorm_linear = published(_block.rmsnorm_linear, __name__, "Array", checked)
qkv_rope = published(_block.qkv_rope, __name__, "Array", checked)
gated_mlp = published(_block.gated_mlp, __name__, "Array", checked)
mlp = published(_block.mlp, __name__, "Array", checked)
