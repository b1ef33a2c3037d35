"""Attention: :mod:`cute_ops.composite.attention`."""

from cute_ops.composite.public import published
from cute_ops_jax.composite.attending import attend
from cute_ops_jax.primitive.arrays import checked

attention = published(attend.attention, __name__, "Array", checked)
decode_attention = published(attend.decode_attention, __name__, "Array", checked)
