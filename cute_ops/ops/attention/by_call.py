"""The op that a call of ``attention`` or ``decode_attention`` with functions of its own runs: it follows from these and
from what they read.

There is one op for each form, each pair of expressions and the kinds and declared shapes of captured arrays. Its name
follows from these alone, so it is the same in every process.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from functools import partial
from inspect import Parameter
from typing import Any, NamedTuple, NoReturn

from cute_ops.declaration.op import Op
from cute_ops.declaration.shapes import Array
from cute_ops.errors import header_of, meant
from cute_ops.expressions.reads import BOOL, FLOAT, INT, Mod
from cute_ops.ops.attention import attention, attention_cached, decode_attention, mods
from cute_ops.ops.expression import many
from cute_ops.ops.expression.call import digest, names_of_inputs, readable, remembered

Function = Callable[..., Any]
# How many parameters come before the captured arrays: xp, a score, the coordinates.
OPTIONS = {"score_mod": 6, "mask_mod": 5}
# Names of inputs that an op has for something else, and those that it may not have.
_TAKEN = re.compile(
    r"d?(q|k|v|sinks|out|lse|delta)|scale|causal|left|right|softcap|xp|ctx|type|stream|_.*|c\d+d\d+|C_.*"
    r"|[kv]_(cache|scale)|lengths|page_table|cu_seqlens_[qk]|partial(_lse)?|sums|window|batch_invariant"
    r"|deterministic|fused|Ellipsis|TypeError"
)


class Form(NamedTuple):
    """The kind of call that an op is for.

    Attributes:
        declare: ``declare(name, own)``: makes the op.
        called: the function that messages name.
        by_sequence: whether sequences are a dim ``b`` of their own, by which functions read captured arrays; else the
            leading dims of queries are.
    """

    declare: Callable[[str, mods.Own], Op]
    called: str
    by_sequence: bool


# By the name of the op without functions.
FORMS = {
    "attention": Form(attention.declare, "attention", False),
    "attention_packed": Form(partial(attention.declare, packed=True), "attention", True),
    "attention_cached": Form(attention_cached.declare, "attention", True),
    "attention_cached_packed": Form(partial(attention_cached.declare, packed=True), "attention", True),
    "decode_attention": Form(decode_attention.declare, "decode_attention", True),
}
_log = logging.getLogger("cute_ops")
_known: dict[Hashable, Mod] = {}


class Captured(NamedTuple):
    """A captured array of a call.

    Attributes:
        name: that the call gives it; empty for one that is given by position.
        kind: of its elements.
        ndim: how many dims it has.
    """

    name: str
    kind: str
    ndim: int


def kind_of(dtype: str) -> str:
    """The kind of the elements of an array with a dtype of this name."""
    return BOOL if dtype == "bool" else FLOAT if "float" in dtype else INT


def op_of(
    score_mod: Function | None = None, mask_mod: Function | None = None, captured: Mapping[str, Array] | None = None,
    lead: int = 1, form: str = "attention",
) -> Op:  # fmt: skip
    """The op that ``attention`` runs for calls with these functions, which read arrays of these shapes and dtypes:

        documents = op_of(mask_mod=mods.documents, captured={"document": Array((2, 4096), "int32")})

    A module that binds it lets manifests name it: so bundles hold its kernels. Other arguments and errors as of
    :func:`op_of_call`.
    """
    arrays = (captured or {}).items()
    given = tuple(Captured(name, kind_of(a.dtype), len(a.shape)) for name, a in arrays)
    return op_of_call(score_mod, mask_mod, given, lead, form)


def op_of_call(
    score_mod: Function | None, mask_mod: Function | None, captured: tuple[Captured, ...] = (), lead: int = 1,
    form: str = "attention",
) -> Op:  # fmt: skip
    """The op of a call.

    Args:
        score_mod, mask_mod: its functions; None where it has none.
        captured: its captured arrays.
        lead: how many leading dims its queries have.
        form: one of :data:`FORMS`.

    Raises:
        TypeError: a function takes other arguments than these; an array is captured that none reads.
        TraceError: a function does what an expression cannot say.
        ValueError: an array has another number of dims than it is read by.
    """
    functions, (declare, called, by_sequence) = {"score_mod": score_mod, "mask_mod": mask_mod}, FORMS[form]
    given = {option: function for option, function in functions.items() if function is not None}
    arrays = {option: _arrays(called, option, function, captured) for option, function in given.items()}
    _check_read(called, captured, arrays)
    made = {option: _traced(option, function, captured, arrays[option]) for option, function in given.items()}
    names = _names(captured, given, arrays)
    shapes = mods.declared([*made.values()], names, lambda problem: _refuse(called, ValueError, problem))
    for array, name, shape in zip(captured, names, shapes, strict=True):
        _check_dims(called, array, name, shape, 1 if by_sequence else lead)
    score, mask = (made[option].text if option in made else "" for option in OPTIONS)
    own = mods.Own(
        score,
        mask,
        tuple(
            (name, array.kind, " ".join(_of_sequences(shape) if by_sequence else shape))
            for name, array, shape in zip(names, captured, shapes, strict=True)
        ),
    )
    if mask_mod is not None and (unbounded := mods.bounds_of(made["mask_mod"])[1]):
        _log.info("attention: tiles of the mask %s are not skipped where they depend on %s, which has no bounds",
                  _name(mask_mod), ", ".join(unbounded))  # fmt: skip
    ending = digest(own.score, own.mask, *map(str, own.captured))
    return declare("_".join([form, *(readable(_name(f)) for f in given.values()), ending]), own)


def _check_read(called: str, captured: tuple[Captured, ...], arrays: Mapping[str, Collection[int]]) -> None:
    if unread := set(range(len(captured))) - {i for chosen in arrays.values() for i in chosen}:
        _refuse(called, TypeError, f"`captured` has {_named(captured, min(unread))}, which no function reads.")


def _of_sequences(shape: list[str]) -> list[str]:
    """The dims of an array whose batch are sequences."""
    return ["b" if word == "*m" else word for word in shape]


def _check_dims(called: str, array: Captured, name: str, shape: list[str], lead: int) -> None:
    """Refuse an array of another number of dims than it is read by."""
    by_batch = shape[:1] == ["*m"]
    dims = len(shape) - 1 + lead if by_batch else len(shape)
    if array.ndim != dims:
        more = by_batch and lead != 1
        leading = f", the first of them by the batch, of which queries have {lead} dims" if more else ""
        what = f"`{name}` has {array.ndim} dims, but is read by {len(shape)} indices{leading}"
        _refuse(called, ValueError, f"{what}: expected {dims}.")


def _arrays(called: str, option: str, function: Function, captured: Sequence[Captured]) -> list[int]:
    """The captured arrays that a function gets, by number, in the order of its parameters."""
    first, what = OPTIONS[option], f"{option} {_name(function)}"
    parameters = [
        p for p in header_of(function, f"cute.{called}: argument `{option}`").parameters.values()
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.VAR_POSITIONAL)
    ]  # fmt: skip
    every = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    own = [p for p in parameters[first:] if p.kind is not p.VAR_POSITIONAL]
    if len(parameters) < first and not every:
        coordinates = ", ".join(["xp", *mods.SCORE, *mods.COORDINATES][-first if first == 6 else 0 :])
        expected = coordinates if option == "score_mod" else "xp, batch, head, q, k"
        _refuse(called, TypeError, f"{what} must take ({expected}, *captured), takes {len(parameters)} arguments.")
    if captured and captured[0].name:
        return _arrays_by_name(called, what, own, captured)
    _check_count(called, what, own, every, len(captured))
    return [*range(len(captured))]


def _arrays_by_name(called: str, what: str, own: Sequence[Parameter], captured: Sequence[Captured]) -> list[int]:
    """The captured arrays that a function's parameters name."""
    by_name = {array.name: i for i, array in enumerate(captured)}
    lacking = [p.name for p in own if p.name not in by_name and p.default is Parameter.empty]
    if lacking:
        near = meant(lacking[0], by_name)
        _refuse(called, TypeError, f"{what} reads `{lacking[0]}`, which `captured` does not have{near}.")
    return [by_name[p.name] for p in own if p.name in by_name]


def _check_count(called: str, what: str, own: Sequence[Parameter], every: bool, count: int) -> None:
    """Refuse another number of arrays than a function has parameters for; ``every``: it takes any number."""
    least = sum(p.default is Parameter.empty for p in own)
    if not least <= count <= (count if every else len(own)):
        names = ", ".join(f"`{p.name}`" for p in own) or "no arrays"
        more = "; a dict gives each function those that its parameters name" if count > len(own) else ""
        _refuse(called, TypeError, f"{what} reads {names}, but `captured` has {count}{more}.")


def _traced(option: str, function: Function, captured: Sequence[Captured], chosen: Sequence[int]) -> Mod:
    """A function's expression: the same one every time while what it refers to stays what it is."""
    trace = mods.score_mod if option == "score_mod" else mods.mask_mod
    arrays = {i: captured[i].kind for i in chosen}

    def make() -> Mod:
        found = trace(function, arrays)
        many.note(function, f"the {option} {_name(function)} of attention", found.text)
        return found

    return remembered(_known, function, (), (option, *arrays.items()), make)


def _names(
    captured: Sequence[Captured], given: Mapping[str, Function], arrays: Mapping[str, Sequence[int]]
) -> list[str]:
    """The op's names of captured arrays: those in the call, or those of parameters, if an input may have them."""
    found = [array.name for array in captured]
    for option, function in given.items():
        parameters = [*header_of(function, option).parameters.values()][OPTIONS[option] :]
        for i, p in zip(arrays[option], parameters, strict=False):
            found[i] = found[i] or (p.name if p.kind is not p.VAR_POSITIONAL else "")
    return names_of_inputs(found, _TAKEN, "captured")


def _named(captured: Sequence[Captured], i: int) -> str:
    return f"`{captured[i].name}`" if captured[i].name else f"array {i}"


def _name(function: Function) -> str:
    return str(getattr(function, "__name__", type(function).__name__)).rpartition(".")[2]


def _refuse(called: str, error: type[Exception], problem: str) -> NoReturn:
    raise error(f"cute.{called}: {problem}")
