"""``fuse(function)``: run untouched JAX functions and models on our ops.

``front`` translates a jaxpr into the neutral graph of :mod:`cute_ops.fusion`; ``program`` replaces what is found there
by ``calls`` and runs all else as it stands, with ``bodies`` of loops, branches and checkpoints rewritten, too;
``transform`` is the function that users call.
"""

from cute_ops.fusion.own import Own as Own
from cute_ops_jax.fusion.transform import fuse as fuse
