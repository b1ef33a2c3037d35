"""Linear layers: :mod:`cute_ops.composite.products`."""

from cute_ops.composite.public import published
from cute_ops_torch.composite.products import products
from cute_ops_torch.library.tensors import checked

linear = published(products.linear, __name__, "Tensor", checked)
gated_linear = published(products.gated_linear, __name__, "Tensor", checked)
