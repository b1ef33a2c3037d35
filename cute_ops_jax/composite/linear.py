"""Linear layers: :mod:`cute_ops.composite.products`."""

from cute_ops.composite.public import published
from cute_ops_jax.composite.products import products
from cute_ops_jax.primitive.arrays import checked

linear = published(products.linear, __name__, "Array", checked)
gated_linear = published(products.gated_linear, __name__, "Array", checked)
