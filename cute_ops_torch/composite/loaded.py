"""Defines the ops that functions with names define in their first call: a program that loads an exported graph or a
package calls none of these functions.

Importing what torch reads such files with imports this, once ``cute_ops_torch`` is imported. A C++ program imports it.
"""

from itertools import product

from cute_ops.composite.gated_mlp import gated_mlp
from cute_ops_torch.composite.projections import MADE_BY
from cute_ops_torch.registry import define

for _save, _transposed in product(("pre", "none"), (False, True)):
    define(gated_mlp(_save, _transposed))
for _make in MADE_BY.values():
    define(_make())
