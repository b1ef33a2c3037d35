"""Attention as a function, written once for the arrays of any framework."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from cute_ops.composite.public import continued
from cute_ops.constants import make_room
from cute_ops.declaration.op import Op
from cute_ops.ops.attention.attention import DOC as OP_DOC
from cute_ops.ops.attention.attention import attention as plain
from cute_ops.ops.attention.attention import attention_packed
from cute_ops.ops.attention.by_call import Captured, kind_of, op_of_call
from cute_ops.ops.expression.by_call import dtype_of
from cute_ops.ops.expression.call import key_of

Array = TypeVar("Array")
Function = Callable[..., Any]
Given = Sequence[Any] | Mapping[str, Any]  # arrays
_OPTIONS = """score_mod: ``score_mod(xp, score, batch, head, q, k, *captured)`` in array-API style: what takes the place
            of a score, after ``softcap``. :mod:`cute_ops.mods` says what it may do, and has such functions.
        mask_mod: ``mask_mod(xp, batch, head, q, k, *captured)``: whether a query attends to a key. One that ``causal``,
            ``left`` and ``right`` leave out stays so.
        captured: arrays that these functions read by index, such as ``slopes[head]`` or ``document[batch, q]``: as a
            tuple both get all of them, as a dict each function gets those that its parameters name. Floats that a
            score is computed from have a gradient; whole numbers reach up to 2^24.
        cu_seqlens_q: of sequences that are packed one after another, ``q`` (tokens, heads, headdim): int32 ``[b+1]``,
            where each begins and the last one ends. Then places, ``batch`` and masks are those within a sequence:
            :func:`attention_packed`.
        cu_seqlens_k: where sequences of keys begin and the last one ends; None where keys lie as queries do."""
DOC = OP_DOC.partition("\n\n")[2].replace("\n\n    Returns:", f"\n        {_OPTIONS}\n\n    Returns:", 1)


class Attention(ABC, Generic[Array]):
    """The attention of a framework."""

    def __init__(self) -> None:
        self.plain, self._packed = self.function(plain), self.function(attention_packed)
        self._known: dict[Hashable, Function] = {}

    @abstractmethod
    def function(self, op: Op) -> Function:
        """The function of an op."""

    @abstractmethod
    def array(self, array: Any) -> Any:
        """What may be an array as one."""

    def chosen(
        self, score_mod: Function | None, mask_mod: Function | None, captured: tuple[Captured, ...], lead: int,
        packed: bool,
    ) -> Function:  # fmt: skip
        """The function of the op of a call: see :func:`op_of_call`. A call like an earlier one is found by what its
        functions refer to.
        """
        functions = [function for function in (score_mod, mask_mod) if function is not None]
        keys = [key_of(function, ()) for function in functions]
        # A function without a key refers to something that may change unseen, so it is traced each time.
        key = None if None in keys else (*keys, score_mod is None, captured, lead, packed)
        found = self._known.get(key) if key else None
        if found is None:
            found = self.function(op_of_call(score_mod, mask_mod, captured, lead, packed))
            if key and keys == [key_of(function, ()) for function in functions]:  # nothing has changed meanwhile
                make_room(self._known)
                self._known[key] = found
        return found

    @continued(DOC)
    def attention(
        self, q: Array, k: Array, v: Array, sinks: Array | None = None, scale: float = 0.0, causal: bool = False,
        left: int = -1, right: int = -1, softcap: float = 0.0, deterministic: bool = False, *,
        fused: str = "auto", score_mod: Function | None = None, mask_mod: Function | None = None,
        captured: Given = (), cu_seqlens_q: Array | None = None, cu_seqlens_k: Array | None = None,
    ) -> tuple[Array, Array]:  # fmt: skip
        """Attention of queries to keys and values, with grouped heads."""
        run, arrays = self.call(q, score_mod, mask_mod, captured, (cu_seqlens_q, cu_seqlens_k))
        attrs = scale, causal, left, right, softcap, deterministic, fused
        return run(q, k, v, *arrays, sinks, *attrs)  # type: ignore[no-any-return]

    def call(
        self, queries: Any, score_mod: Function | None, mask_mod: Function | None, captured: Given,
        offsets: tuple[Array | None, Array | None],
    ) -> tuple[Function, Sequence[Array]]:  # fmt: skip
        """The function of a call's op, and what it reads besides queries, keys and values: where packed sequences
        begin, and the arrays that it captures.
        """
        given, packed = self._offsets(queries, *offsets), offsets[0] is not None
        if score_mod is None and mask_mod is None:
            if captured:
                raise TypeError("cute.attention: `captured` was given, but no score_mod or mask_mod that reads it.")
            return (self._packed if packed else self.plain), given
        names = [*captured] if isinstance(captured, Mapping) else [""] * len(captured)
        arrays = [self.array(a) for a in (captured.values() if isinstance(captured, Mapping) else captured)]
        read = [Captured(name, kind_of(dtype_of(a)), a.ndim) for name, a in zip(names, arrays, strict=True)]
        return self.chosen(score_mod, mask_mod, tuple(read), queries.ndim - 3, packed), [*given, *arrays]

    def _offsets(self, queries: Any, of_q: Array | None, of_k: Array | None) -> Sequence[Array]:
        if of_q is None:
            if of_k is not None:
                raise TypeError("cute.attention: `cu_seqlens_k` was given without `cu_seqlens_q`.")
            return ()
        if queries.ndim != 3:
            shape = tuple(queries.shape)
            what = f"with `cu_seqlens_q`, argument `q` must be (tokens, heads, headdim), has shape {shape}"
            raise ValueError(f"cute.attention: {what}.")
        return of_q, of_q if of_k is None else of_k
