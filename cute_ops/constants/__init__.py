"""Keys of tables made from the constants of a call: its attributes, and the values that a traced function reads.

``exact`` (keys of values), ``reads`` (what a function reads, by its code), ``state`` (whether that is what it was). A
table of kernels must not confuse ``1``, ``True`` and ``1.0``, nor ``0.0`` and ``-0.0``, which are equal to Python, and
must not return what was traced while a global had another value.
"""

from cute_ops.constants.exact import Exact, Unknown, exact, of_attributes
from cute_ops.constants.reads import steps
from cute_ops.constants.state import constant, make_room, state, values

__all__ = ["Exact", "Unknown", "constant", "exact", "make_room", "of_attributes", "state", "steps", "values"]
