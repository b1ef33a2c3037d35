"""Equations with jaxprs of their own: loops, branches, checkpoints and shard maps run the rewritten bodies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from cute_ops_jax import _compat
from cute_ops_jax._compat import ClosedJaxpr, JaxprEqn

# Makes the program of a jaxpr, a function with an attribute ``changed``. It is told which of the jaxpr's inputs are
# inputs of the equation, the same at each run, by their numbers.
Make = Callable[[ClosedJaxpr, Mapping[int, int]], Any]


class Bodies:
    """An equation with its bodies rewritten.

    Attributes:
        equation: the equation.
        programs: its bodies' programs.
    """

    def __init__(self, equation: JaxprEqn, programs: Sequence[Any], run: Callable[..., Any]) -> None:
        self.equation, self.programs, self._run = equation, tuple(programs), run

    @property
    def changed(self) -> bool:
        return any(program.changed for program in self.programs)

    def bind(self, inputs: Sequence[Any]) -> list[Any]:
        """The equation's outputs, computed with the new bodies."""
        return list(self._run(self.equation, self.programs, inputs))


def bodies_of(equation: JaxprEqn, make: Make) -> Bodies | None:
    """The bodies of an equation that may be rewritten; None if it has none."""
    kind = _KINDS.get(equation.primitive.name)
    if kind is None:
        return None
    names, run = kind
    found = [equation.params[name] for name in names]
    jaxprs = [each for one in found for each in (one if isinstance(one, tuple) else (one,))]
    closed = [each if isinstance(each, ClosedJaxpr) else _compat.closed(each) for each in jaxprs if each is not None]
    if len(closed) < len(jaxprs):
        return None
    return Bodies(equation, [make(each, _given(equation, each)) for each in closed], run)


def _given(equation: JaxprEqn, body: ClosedJaxpr) -> Mapping[int, int]:
    """Of the inputs of a body those of its equation that it gets as they are."""
    name, count = equation.primitive.name, len(body.jaxpr.invars)
    if name == "scan":
        count = _compat.constants_of_scan(equation.params)
    elif name in ("while", "shard_map"):
        count = 0
    return {i: i + (name == "cond") for i in range(count)}


def _typed(program: Any) -> Callable[..., list[Any]]:
    """The program, whose outputs have the types that its jaxpr says."""
    avals = [v.aval for v in program.closed.jaxpr.outvars]
    return lambda *args: [_as(out, aval) for out, aval in zip(program(*args), avals, strict=True)]


def _as(out: Any, aval: Any) -> Any:
    return out if getattr(out, "dtype", None) == aval.dtype else jax.lax.convert_element_type(out, aval.dtype)


def _retraced(program: Any) -> tuple[Any, list[Any]]:
    return _compat.retraced(_typed(program), [v.aval for v in program.closed.jaxpr.invars])


def _checkpoint(equation: JaxprEqn, programs: Sequence[Any], inputs: Sequence[Any]) -> Any:
    policy = equation.params["policy"]
    changed = {} if policy is None else {"policy": programs[0].policy(policy)}
    jaxpr, constants = _retraced(programs[0])
    return _compat.bind(equation, [*constants, *inputs], jaxpr=jaxpr, **changed)


def _jit(equation: JaxprEqn, programs: Sequence[Any], inputs: Sequence[Any]) -> Any:
    jaxpr, constants = _retraced(programs[0])
    if constants:  # each input has a sharding in the equation
        return _compat.bind(equation, inputs)
    return _compat.bind(equation, inputs, jaxpr=_compat.closed(jaxpr))


def _scan(equation: JaxprEqn, programs: Sequence[Any], inputs: Sequence[Any]) -> Any:
    jaxpr, constants = _retraced(programs[0])
    params = equation.params
    if "num_consts" not in params:  # since JAX 0.12, whose trees of operands say it, and take no more
        return _compat.bind(equation, inputs, **({} if constants else {"jaxpr": _compat.closed(jaxpr)}))
    changed = {"jaxpr": _compat.closed(jaxpr), "num_consts": params["num_consts"] + len(constants)}
    if "linear" in params:
        changed["linear"] = (*(False,) * len(constants), *params["linear"])
    return _compat.bind(equation, [*constants, *inputs], **changed)


def _cond(equation: JaxprEqn, programs: Sequence[Any], inputs: Sequence[Any]) -> Any:
    index, *operands = inputs
    return jax.lax.switch(index, [_typed(program) for program in programs], *operands)


def _while(equation: JaxprEqn, programs: Sequence[Any], inputs: Sequence[Any]) -> Any:
    # Bound as it is: the condition of a loop under `vmap` has one value for each example, which `while_loop` refuses.
    (condition, of_condition), (body, of_body) = map(_retraced, programs)
    params = equation.params
    changed = {"cond_jaxpr": _compat.closed(condition), "cond_nconsts": params["cond_nconsts"] + len(of_condition)}
    changed |= {"body_jaxpr": _compat.closed(body), "body_nconsts": params["body_nconsts"] + len(of_body)}
    first = params["cond_nconsts"]
    return _compat.bind(equation, [*of_condition, *inputs[:first], *of_body, *inputs[first:]], **changed)


def _shard_map(equation: JaxprEqn, programs: Sequence[Any], inputs: Sequence[Any]) -> Any:
    params = equation.params
    axes = params["newly_manual_axes"] if "newly_manual_axes" in params else params["manual_axes"]
    program = _typed(programs[0])
    mapped: Any = jax.shard_map(
        lambda *args: tuple(program(*args)),
        mesh=params["mesh"],
        in_specs=tuple(params["in_specs"]),
        out_specs=tuple(params["out_specs"]),
        axis_names=frozenset(axes),
        check_vma=params["check_vma"],
    )
    return mapped(*inputs)


_Run = Callable[[JaxprEqn, Sequence[Any], Sequence[Any]], Any]
# By primitive: the parameters that hold its jaxprs, and how it runs with others.
_KINDS: dict[str, tuple[tuple[str, ...], _Run]] = {
    "remat2": (("jaxpr",), _checkpoint), "checkpoint": (("jaxpr",), _checkpoint), "remat": (("jaxpr",), _checkpoint),
    "jit": (("jaxpr",), _jit), "pjit": (("jaxpr",), _jit), "scan": (("jaxpr",), _scan),
    "cond": (("branches",), _cond), "while": (("cond_jaxpr", "body_jaxpr"), _while),
    "shard_map": (("jaxpr",), _shard_map),
}  # fmt: skip
