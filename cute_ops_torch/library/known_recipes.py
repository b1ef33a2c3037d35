"""Recipes of ops that were found in graphs: the Python calls that make them in another process.

They are made and run by :mod:`cute_ops_torch.composite.recipes`. This table needs nothing but names, so that Inductor's
lowerings, which write recipes into code, import no registry.
"""

from __future__ import annotations

from cute_ops.declaration.op import Op

MAKERS = "cute_ops_torch.composite.recipes"  # the module of the functions that recipes call
_recipes: dict[str, str] = {}


def note(op: Op, recipe: str) -> bool:
    """Note an op's recipe, and return whether it had none."""
    is_new = op.name not in _recipes
    _recipes.setdefault(op.name, recipe)
    return is_new


def recipe_of(op: Op) -> str:
    """The call that makes an op; empty for one that is registered anyway."""
    return _recipes.get(op.name, "")


def registering(op: Op) -> str:
    """The Python statement that registers an op in another process; empty for one that is registered there anyway."""
    recipe = recipe_of(op)
    return f"import {MAKERS} as recipes; recipes.register(recipes.{recipe})" if recipe else ""
