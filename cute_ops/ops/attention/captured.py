"""The gradient of arrays that a change of scores reads: a program that computes scores again, some rows at a time.

Each element of an array is read by many scores, and its gradient is the sum of theirs. Terms are sorted by the element
that they belong to and added up in a fixed order, so that results are deterministic. It costs more than the kernels of
:mod:`cute_ops.kernels.attention`, and runs only where such a gradient is wanted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from cute_ops.declaration.array_api import beside, widen
from cute_ops.declaration.op import Op
from cute_ops.declaration.program import Program
from cute_ops.declaration.tensor import Tensor
from cute_ops.expressions.captured import operands_on, places_of
from cute_ops.expressions.reads import Read
from cute_ops.expressions.reference import evaluate
from cute_ops.ops.attention import mods
from cute_ops.ops.attention.sequences import Sequences
from cute_ops.ops.embedding.sorted_embedding_bwd import sorted_embedding_bwd

SCORES = 1 << 24  # that exist at a time


def captured_bwd(name: str, own: mods.Own, inputs: Mapping[str, Tensor], common: Mapping[str, Any]) -> Op:
    """The op of this gradient; ``common`` is what it has of the declaration of attention."""
    wanted = [own.captured[i][0] for i in mods.differentiable(own)]
    return Op(
        name, inputs=inputs, outputs={f"d{array}": inputs[array] for array in wanted}, **common,
        kernel=Program(partial(_run, own), (sorted_embedding_bwd,)),
        doc="Gradients of the arrays that a change of scores reads.",
    )  # fmt: skip


def _run(
    own: mods.Own, xp: Any, call: Callable[..., Any], inputs: Mapping[str, Any], attrs: Mapping[str, Any]
) -> dict[str, Any]:
    import array_api_compat  # start-up time

    chunks = _Chunks(array_api_compat.array_namespace(inputs["q"]), xp, call, (own, inputs, attrs))
    totals = {i: chunks.zeros(i) for i in mods.differentiable(own)}
    totals = xp.repeat(chunks.count, chunks.add, totals) if chunks.count else totals
    return {f"d{own.captured[i][0]}": chunks.finished(i, total) for i, total in totals.items()}


class _Chunks:
    """Some rows of scores of one head at a time."""

    def __init__(self, np: Any, xp: Any, call: Callable[..., Any], of: tuple[mods.Own, Any, Mapping[str, Any]]) -> None:
        self.np, self.xp, self.call = np, xp, call
        self.own, inputs, attrs = of
        q, k, v = (inputs[name] for name in "qkv")
        self.lead, (s, h, d), (t, g) = q.shape[:-3], q.shape[-3:], k.shape[-3:-1]
        self.batch, self.sizes = math.prod(self.lead), (math.prod(self.lead), h, s, t)
        self.q, self.k, self.v = (np.reshape(x, (self.batch, *x.shape[-3:])) for x in (q, k, v))
        self.out, self.dout = (np.reshape(inputs[x], (self.batch, s, h, v.shape[-1])) for x in ("out", "dout"))
        self.lse = np.reshape(inputs["lse"], (self.batch, h, s))
        self.dlse = None if inputs["dlse"] is None else np.reshape(inputs["dlse"], self.lse.shape)
        self.heads_per_kv, self.scale = h // max(g, 1), attrs["scale"] or d**-0.5
        change = mods.score_of(attrs["softcap"], self.own.score)
        assert change is not None
        self.change = change
        self.mask = mods.mask_of_call(attrs, self.own.mask)
        self.given = [inputs[name] for name, _, _ in self.own.captured]
        self.arrays = [
            np.reshape(x, (self.batch, *x.shape[len(self.lead) :])) if shape.split()[:1] == ["*m"] else x
            for x, (_, _, shape) in zip(self.given, self.own.captured, strict=True)
        ]  # fmt: skip
        offsets = [inputs[name] for name in ("cu_seqlens_q", "cu_seqlens_k") if name in inputs]
        self.sequences = Sequences(np, (offsets[0], offsets[1]), (s, t)) if offsets else None
        self.rows = max(1, min(s, SCORES // max(t, 1)))
        self.blocks = -(-s // self.rows) if t else 0
        self.count = self.batch * h * self.blocks

    def zeros(self, i: int) -> Any:
        """The gradient of an array, before anything is added."""
        (array,) = widen(self.np, self.np.zeros_like(self.arrays[i]))
        return array

    def finished(self, i: int, total: Any) -> Any:
        return self.np.astype(self.np.reshape(total, self.given[i].shape), self.given[i].dtype)

    def add(self, number: Any, totals: Mapping[int, Any]) -> dict[int, Any]:
        """Add what the rows with a number give."""
        np, (_, heads, s, t) = self.np, self.sizes
        which, block = number // self.blocks, number % self.blocks
        batch, head = which // heads, which % heads
        place = beside(np, self.q)
        # The last rows may be some of the rows before, which count there.
        first = block * self.rows
        rows = np.arange(self.rows, **place) + np.minimum(
            np.asarray(first, **place), np.asarray(s - self.rows, **place)
        )
        lse, delta = self._of_rows(batch, head, rows)
        kv = head // self.heads_per_kv
        raw = self._product(self.q[batch, rows, head], self.k[batch, :, kv]) * self.scale
        dtype = raw.dtype
        sizes = [np.asarray(size, dtype=dtype, **place) for size in self.sizes]
        numbers = [np.astype(np.asarray(x, **place), dtype) for x in (batch, head)]
        queries = np.reshape(np.astype(rows, dtype), (-1, 1)) + (sizes[3] - sizes[2])
        at = [*numbers, queries, np.astype(np.arange(t, **place), dtype), *sizes]
        own = None if self.sequences is None else self.sequences.of_rows(rows)
        if own is not None:
            at = own.coordinates(at[mods.HEAD], at[len(mods.COORDINATES) + mods.HEAD])
        operands = operands_on(self.change, np, [raw, *at], self.arrays)
        (scores,) = evaluate(self.change.expression, np, operands)
        seen = np.reshape((rows >= first) & (lse > -math.inf), (-1, 1))
        if self.mask is not None:
            seen = seen & evaluate(self.mask.expression, np, operands_on(self.mask, np, at, self.arrays))[0]
        if own is not None:
            seen = seen & own.seen()
        finite = np.where(lse > -math.inf, lse, np.zeros_like(lse))
        weights = np.where(seen, np.exp(scores - finite[:, None]), np.zeros_like(raw))
        dscores = weights * (self._product(self.dout[batch, rows, head], self.v[batch, :, kv]) - delta[:, None])
        dscores = np.where(seen, dscores, np.zeros_like(dscores))  # 0 times NaN of another sequence
        found = dict(totals)
        for i, read in enumerate(self.change.reads, self.change.given):
            if read.array in found and read.kind == "f":
                (terms,) = evaluate(mods.gradient_of(self.change, (i,)), np, [*operands, dscores])
                terms = np.where(dscores == 0, dscores, terms)
                found[read.array] = self._scattered(found[read.array], read, operands, (terms, batch, head))
        return found

    def _of_rows(self, batch: Any, head: Any, rows: Any) -> tuple[Any, Any]:
        """The log-sum-exp and the delta of rows."""
        out, dout = widen(self.np, self.out[batch, rows, head], self.dout[batch, rows, head])
        delta = self.np.sum(out * dout, axis=-1)
        if self.dlse is not None:
            delta = delta - self.dlse[batch, head, rows]
        return self.lse[batch, head, rows], delta

    def _product(self, a: Any, b: Any) -> Any:
        return self.xp.product(a, self.np.matrix_transpose(b), "float32")

    def _scattered(self, total: Any, read: Read, operands: Sequence[Any], given: tuple[Any, Any, Any]) -> Any:
        """Add terms of scores to the elements of an array that these read."""
        np, (terms, batch, head) = self.np, given
        if read.place is None:
            return total + np.sum(terms)
        kinds = [read.place.kinds[i] for i in read.place.outputs]
        if not any(kind.columns for kind in kinds):
            terms = np.sum(terms, axis=1, keepdims=True)
        if not any(kind.rows for kind in kinds) and self.sequences is None:
            terms = np.sum(terms, axis=0, keepdims=True)
        places = places_of(np, total, evaluate(read.place, np, operands))
        # First dims by batch and head are one number for these rows.
        words = self.own.captured[read.array][2].split()
        fixed = 0
        while fixed < len(words) and words[fixed] in ("*m", "g*r"):
            fixed += 1
        one = tuple({"*m": batch, "g*r": head}[word] for word in words[:fixed])
        sizes = total.shape[fixed:]
        if not sizes:
            return self.xp.added(total, one, np.sum(terms))
        flat = np.zeros_like(places[-1])
        for place, size in zip(places[fixed:], sizes, strict=True):
            flat = flat * size + place
        flat = np.astype(np.reshape(np.broadcast_to(flat, terms.shape), (-1,)), np.int32)
        keys, order = self.xp.sort(flat)
        count = math.prod(sizes)
        ends, rows = self.xp.ends(keys, count), np.reshape(terms, (-1, 1))
        inputs = {"ends": ends, "classes": keys, "order": order, "dout": rows}
        sums = self.call(sorted_embedding_bwd, inputs, {})["dweight"]
        return self.xp.added(total, one, np.reshape(sums, sizes))
