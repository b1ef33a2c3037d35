"""Functions for arrays of several layouts: :mod:`cute_ops.composite.layouts`."""

from cute_ops.composite.layouts import Layouts
from cute_ops.composite.public import published
from cute_ops_jax.primitive.arrays import checked
from cute_ops_jax.primitive.function import register

_layouts = Layouts(register, lambda x: False)
group_norm = published(_layouts.group_norm, __name__, "Array", checked)
