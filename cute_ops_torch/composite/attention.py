"""Attention: :mod:`cute_ops.composite.attention`."""

from cute_ops.composite.public import published
from cute_ops_torch.composite.attending import attend
from cute_ops_torch.library.tensors import checked

attention = published(attend.attention, __name__, "Tensor", checked)
decode_attention = published(attend.decode_attention, __name__, "Tensor", checked)
