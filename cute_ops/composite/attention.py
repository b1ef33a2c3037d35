"""Attention as functions, written once for the arrays of any framework."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from cute_ops.composite.public import MAKING, continued
from cute_ops.constants import make_room
from cute_ops.declaration.op import Op
from cute_ops.errors import is_array
from cute_ops.ops.attention.attention import DOC as OP_DOC
from cute_ops.ops.attention.attention import attention as plain
from cute_ops.ops.attention.attention import attention_packed
from cute_ops.ops.attention.attention_cached import attention_cached, attention_cached_packed
from cute_ops.ops.attention.by_call import Captured, kind_of, op_of_call
from cute_ops.ops.attention.decode_attention import DOC as DECODE_OP_DOC
from cute_ops.ops.attention.decode_attention import decode_attention
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
        cu_seqlens_k: where sequences of keys begin and the last one ends; None where keys lie as queries do.
        lengths: keys of each sequence, int32 or int64 ``[b]``, on the device: then ``k`` and ``v`` are caches that
            :func:`append_kv` writes, (batch, capacity, kv heads, headdim), and nothing is read beyond a length. The
            last query stands beside the last key, as in a prompt's last chunk; queries may be packed. No gradient:
            :func:`attention_cached`. For 1 to 16 queries :func:`decode_attention` is faster.
        page_table: int32 or int64 ``[b t]``: caches are (pages, page size, kv heads, headdim), and key i of a sequence
            is in page ``page_table[i // page size]``.
        k_scale, v_scale: float32 ``[kv heads]``, what caches in float8_e4m3fn are multiplied by."""
_DECODE_OPTIONS = """\
score_mod: ``score_mod(xp, score, batch, head, q, k, *captured)`` in array-API style: what takes the place of a score,
            after ``softcap``, as :func:`attention` has it. A score of -inf hides a key.
        captured: arrays that it reads by index, without gradients: a tuple or a dict, as :func:`attention` has them."""
DOC = OP_DOC.partition("\n\n")[2].replace("\n\n    Returns:", f"\n        {_OPTIONS}\n\n    Returns:", 1)
DECODE_DOC = DECODE_OP_DOC.partition("\n\n")[2].replace(
    "\n\n    Returns:", f"\n        {_DECODE_OPTIONS}\n\n    Returns:", 1
)


class Where(NamedTuple):
    """The arrays of a call that say where queries and keys of sequences lie: see :meth:`Attention.attention`."""

    cu_seqlens_q: Any = None
    cu_seqlens_k: Any = None
    lengths: Any = None
    page_table: Any = None
    k_scale: Any = None
    v_scale: Any = None

    @property
    def form(self) -> str:
        """The op's name without functions."""
        return f"attention{'_cached' * (self.lengths is not None)}{'_packed' * (self.cu_seqlens_q is not None)}"

    def check(self, queries: Any) -> None:
        """Raise TypeError or ValueError where arrays do not fit together."""
        if self.cu_seqlens_k is not None and (self.cu_seqlens_q is None or self.lengths is not None):
            said = "without `cu_seqlens_q`" if self.lengths is None else "beside `lengths`, which keys in caches have"
            raise TypeError(f"cute.attention: `cu_seqlens_k` was given {said}.")
        if self.lengths is None:
            for name in ("page_table", "k_scale", "v_scale"):
                if getattr(self, name) is not None:
                    raise TypeError(f"cute.attention: `{name}` was given without `lengths`.")
        if self.cu_seqlens_q is not None and queries.ndim != 3:
            shape = tuple(queries.shape)
            what = f"with `cu_seqlens_q`, argument `q` must be (tokens, heads, headdim), has shape {shape}"
            raise ValueError(f"cute.attention: {what}.")

    @property
    def before(self) -> list[Any]:
        """The arrays that an op has before captured ones."""
        if self.cu_seqlens_q is None:
            return [] if self.lengths is None else [self.lengths]
        if self.lengths is not None:
            return [self.cu_seqlens_q, self.lengths]
        return [self.cu_seqlens_q, self.cu_seqlens_q if self.cu_seqlens_k is None else self.cu_seqlens_k]

    @property
    def behind(self) -> list[Any]:
        """The arrays that an op has behind captured ones, before sinks."""
        return [] if self.lengths is None else [self.page_table]


class Attention(ABC, Generic[Array]):
    """The attention of a framework."""

    def __init__(self) -> None:
        ops = plain, attention_packed, attention_cached, attention_cached_packed
        self.plain = self.function(plain)
        self._by_form = {op.name: self.function(op) for op in ops[1:]}
        self._decode = self.function(decode_attention)
        self._known: dict[Hashable, Function] = {}

    @abstractmethod
    def function(self, op: Op) -> Function:
        """The function of an op."""

    @abstractmethod
    def array(self, array: Any) -> Any:
        """A value as an array, if it may be one."""

    def chosen(
        self, score_mod: Function | None, mask_mod: Function | None, captured: tuple[Captured, ...], lead: int,
        form: str = "attention",
    ) -> Function:  # fmt: skip
        """The function of the op of a call: see :func:`op_of_call`. A call like an earlier one is found by what its
        functions refer to.
        """
        functions = [function for function in (score_mod, mask_mod) if function is not None]
        keys = [key_of(function, ()) for function in functions]
        # A function without a key refers to something that may change unseen, so it is traced each time.
        key = None if None in keys else (*keys, score_mod is None, captured, lead, form)
        found = self._known.get(key) if key else None
        if found is None:
            with MAKING:
                op = op_of_call(score_mod, mask_mod, captured, lead, form)
            found = self.function(op)
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
        lengths: Array | None = None, page_table: Array | None = None, k_scale: Array | None = None,
        v_scale: Array | None = None,
    ) -> tuple[Array, Array]:  # fmt: skip
        """Attention of queries to keys and values, with grouped heads."""
        where = cu_seqlens_q, cu_seqlens_k, lengths, page_table, k_scale, v_scale
        run, arrays = self.call(q, score_mod, mask_mod, captured, where)
        attrs = scale, causal, left, right, softcap
        if lengths is None:
            return run(q, k, v, *arrays, sinks, *attrs, deterministic, fused)  # type: ignore[no-any-return]
        # The gradient alone is summed in another order where that is wanted, and caches have none.
        return run(q, k, v, *arrays, sinks, k_scale, v_scale, *attrs, fused)  # type: ignore[no-any-return]

    @continued(DECODE_DOC)
    def decode_attention(
        self, q: Array, k_cache: Array, v_cache: Array, lengths: Array, page_table: Array | None = None,
        sinks: Array | None = None, k_scale: Array | None = None, v_scale: Array | None = None, scale: float = 0.0,
        window: int = 0, softcap: float = 0.0, batch_invariant: bool = False, *, score_mod: Function | None = None,
        captured: Given = (),
    ) -> tuple[Array, Array]:  # fmt: skip
        """Attention of a few new queries of each sequence to its cached keys and values."""
        run, arrays = self.decoding(score_mod, captured)
        attrs = scale, window, softcap, batch_invariant
        return run(q, k_cache, v_cache, lengths, *arrays, page_table, sinks, k_scale, v_scale, *attrs)  # type: ignore[no-any-return]

    def decoding(self, score_mod: Function | None, captured: Given) -> tuple[Function, Sequence[Array]]:
        """The function of a decoding call's op, and the arrays that it captures."""
        if score_mod is None:
            self._refuse_captured(captured, "decode_attention", "score_mod")
            return self._decode, ()
        read, arrays = self._read(captured)
        return self.chosen(score_mod, None, read, 1, "decode_attention"), arrays

    def call(
        self, queries: Any, score_mod: Function | None, mask_mod: Function | None, captured: Given,
        given: tuple[Array | None, ...],
    ) -> tuple[Function, Sequence[Array]]:  # fmt: skip
        """The function of a call's op, and what it reads between values and sinks: where sequences lie, and the arrays
        that it captures. ``given`` are the fields of :class:`Where`.
        """
        where = None
        if not (given[0] is given[1] is given[2] is given[3] is given[4] is given[5] is None):
            where = Where(*given)
            where.check(queries)
        if score_mod is None and mask_mod is None:
            self._refuse_captured(captured, "attention", "score_mod or mask_mod")
            return (self.plain, ()) if where is None else (self._by_form[where.form], where.before + where.behind)
        read, arrays = self._read(captured)
        if where is None:
            return self.chosen(score_mod, mask_mod, read, queries.ndim - 3), arrays
        run = self.chosen(score_mod, mask_mod, read, queries.ndim - 3, where.form)
        return run, [*where.before, *arrays, *where.behind]

    def _refuse_captured(self, captured: Given, called: str, functions: str) -> None:
        if is_array(captured) or captured:
            raise TypeError(f"cute.{called}: `captured` was given, but no {functions} that reads it.")

    def _read(self, captured: Given) -> tuple[tuple[Captured, ...], list[Array]]:
        """The facts about captured arrays, and the arrays."""
        if is_array(captured):
            raise TypeError("cute.attention: argument `captured` must be a tuple or a dict of arrays, got one array.")
        names = [*captured] if isinstance(captured, Mapping) else [""] * len(captured)
        arrays = [self.array(a) for a in (captured.values() if isinstance(captured, Mapping) else captured)]
        return tuple(Captured(n, kind_of(dtype_of(a)), a.ndim) for n, a in zip(names, arrays, strict=True)), arrays
