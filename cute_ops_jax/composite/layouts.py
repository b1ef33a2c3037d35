"""Functions for arrays of several layouts: :mod:`cute_ops.composite.layouts`."""

import jax
import numpy as np

from cute_ops.composite.layouts import Layouts
from cute_ops.composite.public import published
from cute_ops_jax.primitive.arrays import as_array, checked
from cute_ops_jax.primitive.function import register

_layouts = Layouts(
    jax.numpy,
    register,
    frequencies=lambda base, r, x: jax.numpy.asarray((base ** (np.arange(r) / -r)).astype(np.float32)),
    places=lambda r, x: jax.numpy.arange(r, dtype=jax.numpy.int32),
    float32=lambda x: jax.numpy.asarray(x, jax.numpy.float32),
    kept=lambda key, make, x: make(),
    constant=jax.lax.stop_gradient,
    turned=lambda x: jax.numpy.moveaxis(x, 0, -1),
    array=as_array,
    channels_last=lambda x: False,
)
group_norm = published(_layouts.group_norm, __name__, "Array", checked)
rope_from_positions = published(_layouts.rope_from_positions, __name__, "Array", checked)
