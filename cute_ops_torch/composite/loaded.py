"""Defines the ops that functions define in their first call, as far as they have names: a program that loads an
exported graph or a package calls none of these functions.

Importing what torch reads such files with imports this, once ``cute_ops_torch`` is imported. A C++ program imports it.
"""

from itertools import product

from cute_ops.composite.gated_mlp import gated_mlp, gated_mlp_apart
from cute_ops.composite.linear_add_rmsnorm import linear_add_rmsnorm
from cute_ops.composite.mlp import mlp
from cute_ops.composite.qkv_rope import SIZES, qkv_rope
from cute_ops.composite.rmsnorm_linear import NAMED, rmsnorm_linear
from cute_ops.ops.gemm.by_call import op_of_call
from cute_ops.ops.gemm.named import EPILOGUES
from cute_ops.ops.routing.balance import expert_balance
from cute_ops_torch.composite import layouts as layouts  # these three define ops: those of group norms,
from cute_ops_torch.composite import recipes as recipes  # `by_recipe`
from cute_ops_torch.composite import training as training  # and those of losses of two models
from cute_ops_torch.registry import define

define(expert_balance)
for _save, _transposed in product(("pre", "none"), (False, True)):
    define(gated_mlp(_save, _transposed))
    define(mlp(_save, _transposed))
for _transposed in (False, True):
    define(gated_mlp_apart(_transposed))
    define(linear_add_rmsnorm(_transposed))
    for _size in SIZES:
        define(qkv_rope(_size, _transposed))
for _name, _bias in product(NAMED, ("n", None)):
    define(rmsnorm_linear(_name, (_bias,)))
# What modules such as LinearGELU call, with a bias and without.
for _name, _bias in product(EPILOGUES, ("n", None)):
    define(op_of_call(_name, (_bias, "*m n") if _name == "add" else (_bias,)))
