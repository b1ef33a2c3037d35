"""Parts of a transformer's block: :mod:`cute_ops.composite.block`."""

from cute_ops.composite.block import Block
from cute_ops.composite.public import published
from cute_ops_torch.composite.products import products
from cute_ops_torch.library.tensors import checked

_block = Block(products)
linear_add_rmsnorm = published(_block.linear_add_rmsnorm, __name__, "Tensor", checked)
rmsnorm_linear = published(_block.rmsnorm_linear, __name__, "Tensor", checked)
qkv_rope = published(_block.qkv_rope, __name__, "Tensor", checked)
gated_mlp = published(_block.gated_mlp, __name__, "Tensor", checked)
mlp = published(_block.mlp, __name__, "Tensor", checked)
