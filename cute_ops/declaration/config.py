"""How a kernel is configured: by a heuristic, or by another config that was measured to be faster.

An op declares its heuristic and search space::

    tuning = Tuning(lambda problem: {"threads": 128}, space=vary(threads=(64, 128, 256, 512)))

Only configs of the search space and the heuristic's are ever compiled: a file of winners may choose one of them, but
cannot add another.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from itertools import product
from threading import Lock
from typing import Any, ClassVar, NamedTuple, Self, dataclass_transform

from cute_ops.declaration.shapes import Array

# Buckets for few rows: one for each power of two.
POWERS = tuple(2**k for k in range(11))
# A flat config, as variants, winners and cache keys keep it: numbers by name, and a ``form`` as text.
Config = Mapping[str, Any]
# Subclasses of KernelConfig that are dataclasses already.
_dataclasses: set[type] = set()
_making = Lock()


@dataclass_transform(frozen_default=True)
class KernelConfig:
    """The compile-time configuration of a family's kernels: a frozen dataclass of numbers, flags and a ``form``.

    Subclasses are no decorated ones: each becomes a dataclass when its first config is made. Twenty of them would take
    10 ms of every import, of which a program needs two or three.
    """

    __dataclass_fields__: ClassVar[dict[str, Any]]

    def __new__(cls, *values: Any, **named: Any) -> Self:
        if cls not in _dataclasses:
            with _making:
                for each in reversed(cls.__mro__[:-1]):  # fields of bases come first
                    if each not in _dataclasses:
                        _dataclasses.add(dataclass(frozen=True)(each))
        return super().__new__(cls)

    @classmethod
    def of(cls, config: Config | Iterable[tuple[str, Any]]) -> Self:
        """The config that :meth:`flat` wrote."""
        return cls(**dict(config))

    def flat(self) -> dict[str, Any]:
        """The fields that have no default or differ from it, flags as 0 and 1.

        Equal configs have equal flat forms, and a new field with a default changes none of them.
        """
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        kept = {f.name for f in fields(self) if f.default is MISSING or values[f.name] != f.default}
        return {name: int(v) if isinstance(v, bool) else v for name, v in values.items() if name in kept}


def flat(config: Any, op: str) -> dict[str, Any]:
    """A config of an op as a mapping from names to numbers and to texts: all fields of a dataclass, flags as 0 and 1.

    Raises:
        TypeError: it is neither a dataclass nor a mapping, or a field is neither a number nor a text.
    """
    if isinstance(config, KernelConfig):
        return config.flat()
    if is_dataclass(config) and not isinstance(config, type):
        found = {f.name: getattr(config, f.name) for f in fields(config)}
    elif isinstance(config, Mapping):
        found = dict(config)
    else:
        raise TypeError(f"op {op}: its config must be a dataclass or a mapping, got {config!r}")
    for name, value in found.items():
        if not isinstance(value, int | str):
            one = "one field for each of its numbers" if isinstance(value, tuple | list) else "an int, a bool or a str"
            raise TypeError(f"op {op}: field {name} of its config is {value!r}, expected {one}")
    return {name: int(value) if isinstance(value, bool) else value for name, value in found.items()}


class Problem(NamedTuple):
    """A call's sizes, dtypes and target, from which a heuristic chooses a config.

    Attributes:
        m: rows.
        n: columns; None where they are no compile-time constant.
        dims: all sizes by dim name.
        dtypes, aligns: of each tensor, by name; alignments in bytes.
        attrs: attributes by name.
        arch, sm_count: of the target.
        contiguous: the contiguous dim of each tensor that declares several.
        shared: inputs that are broadcast over rows, since they have fewer than the op.
    """

    m: int
    n: int | None
    dims: Mapping[str, Any]
    dtypes: Mapping[str, str]
    aligns: Mapping[str, int]
    attrs: Mapping[str, Any]
    arch: str
    sm_count: int
    contiguous: Mapping[str, str] = {}
    shared: tuple[str, ...] = ()

    def size(self, name: str) -> int:
        """The size of a dim; of leading dims their product."""
        size = self.dims[name]
        return math.prod(size) if isinstance(size, tuple) else size


class Needs(NamedTuple):
    """The least resources of an SM that one CTA takes: a higher estimate would leave out configs that run.

    Args:
        threads: of the CTA.
        registers: of a thread.
        shared: bytes of shared memory.
        resident: CTAs that are to fit on an SM together.
    """

    threads: int
    registers: int = 1
    shared: int = 0
    resident: int = 1


class Space(NamedTuple):
    """The configs that measuring may choose from.

    Args:
        configs: ``configs(problem, heuristic)``: what to try instead of the heuristic's config; duplicates are dropped.
        needs: ``needs(problem, config)``: what a config takes. By default its ``threads`` and ``resident``.
        buckets: dims besides the static ones on which a winner may depend, with the upper bounds of their buckets:
            ``{"m": (64, 512)}`` distinguishes up to 64, up to 512 and more. With buckets of rows, a row's bits may
            depend on the number of rows, so they are for ops that sum over rows.
    """

    configs: Callable[[Problem, Config], Iterable[Any]]
    needs: Callable[[Problem, Config], Needs] | None = None
    buckets: Mapping[str, tuple[int, ...]] = {}

    def others(self, problem: Problem, heuristic: Config, op: str = "") -> list[dict[str, Any]]:
        """The configs to try, flat, without the heuristic's and without duplicates. ``op``: its name, for messages."""
        found: dict[tuple[tuple[str, Any], ...], dict[str, Any]] = {}
        try:
            every = [flat(each, op) for each in self.configs(problem, heuristic)]
        except KeyError as error:
            raise _looked_up(op, "its search space", error, problem, heuristic) from error
        for config in every:
            if config != dict(heuristic):
                found.setdefault(tuple(sorted(config.items())), config)
        return list(found.values())

    def needed(self, problem: Problem, config: Config, op: str = "") -> Needs | None:
        """The registers, threads and shared memory that a config takes of an SM, if the space says so."""
        try:
            return self.needs(problem, config) if self.needs else None
        except KeyError as error:
            raise _looked_up(op, "the needs of its configs", error, problem, config) from error


class Tuning(NamedTuple):
    """How a kernel is configured.

    Args:
        config: ``config(problem)``: the heuristic, which returns the kernel's compile-time configuration: a frozen
            dataclass of numbers, flags and texts, or a mapping.
        space: other configs that may be faster, which ``python -m cute_ops tune`` measures.
        workspace: ``workspace(problem, config) -> {name: Array or None}``, scratch arrays that the kernel gets. One
            whose size does not grow with the rows must also serve fewer rows: programs exported for any number of rows
            share it.
    """

    config: Callable[[Problem], Any] = lambda problem: {}
    space: Space | None = None
    workspace: Callable[[Problem, Config], Mapping[str, Array | None]] | None = None

    def heuristic(self, op: str, problem: Problem) -> dict[str, Any]:
        """The heuristic's config, flat. ``op``: its name, for messages."""
        try:
            config = self.config(problem)
        except KeyError as error:
            raise _looked_up(op, "its heuristic", error, problem) from error
        return flat(config, op)


def _looked_up(op: str, who: str, error: KeyError, problem: Problem, config: Config | None = None) -> KeyError:
    """The error of a function of a problem, and of a config, that looks up what they do not have."""
    names = {"dims": problem.dims, "attributes": problem.attrs, "tensors": problem.dtypes, "the config": config or {}}
    known = "; ".join(f"{what} {', '.join(each)}" for what, each in names.items() if each)
    return KeyError(f"op {op}: {who} looked up {error}, and there are {known}")


DEFAULT = Tuning()


def vary(
    *,
    needs: Callable[[Problem, Config], Needs] | None = None,
    buckets: Mapping[str, tuple[int, ...]] | None = None,
    **choices: Iterable[int],
) -> Space:
    """Every combination of some values, the heuristic's among them: ``vary(threads=(64, 128), unroll=(1, 2))``.

    The other arguments are those of :class:`Space`.
    """
    values = {name: tuple(v) for name, v in choices.items()}

    def configs(problem: Problem, heuristic: Config) -> Iterable[Config]:
        options = [dict.fromkeys((*([heuristic[n]] if n in heuristic else []), *v)) for n, v in values.items()]
        return ({**heuristic, **dict(zip(values, chosen, strict=True))} for chosen in product(*options))

    return Space(configs, needs, buckets or {})
