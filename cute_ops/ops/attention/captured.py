"""The gradient of arrays that a change of scores reads.

A kernel sums it over the scores that read the same element (:mod:`cute_ops.ops.attention.reads`). Where each index is a
coordinate, as in ``bias[head, q, k]``, these sums are the gradient. Else, as where a table has an element for several
distances, they are sorted by the element that they belong to and added up in a fixed order. Where they would be too
many, and for packed sequences, a program computes scores again, some rows at a time, and sorts what each gives: it
takes many times as long.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

from cute_ops.declaration.array_api import beside, widen
from cute_ops.declaration.op import Op
from cute_ops.declaration.program import Program
from cute_ops.declaration.tensor import Tensor
from cute_ops.expressions.captured import operands_on, places_of
from cute_ops.expressions.graph import operands_of
from cute_ops.expressions.reads import FLOAT, SIZE, Mod, Read
from cute_ops.expressions.reference import evaluate
from cute_ops.ops.attention import mods
from cute_ops.ops.attention.reads import Sharing, sharing_of
from cute_ops.ops.attention.sequences import Sequences
from cute_ops.ops.embedding.sorted_embedding_bwd import sorted_embedding_bwd

SCORES = 1 << 24  # that exist at a time
MOST_SORTED = 1 << 26  # sums that are sorted


def captured_bwd(
    own: mods.Own, array: int, name: str, inputs: Mapping[str, Tensor], common: Mapping[str, Any],
    sums: Callable[[int], Op] | None,
) -> Op:  # fmt: skip
    """The op of the gradient of an array; ``common`` is what it has of the declaration of attention, ``sums`` makes the
    op of the sums of a read, None for packed sequences.
    """
    mod, wanted = Mod.parse(own.score), own.captured[array][0]
    reads = [i for i, read in enumerate(mod.reads) if read.array == array and read.kind == FLOAT]
    parts = {i: sums(i) for i in reads if mod.given + i in _computed_with(mod)} if sums else {}
    return Op(
        name, inputs=inputs, outputs={f"d{wanted}": inputs[wanted]}, **common,
        kernel=Program(partial(_run, _Wanted(own, array, parts)), (*parts.values(), sorted_embedding_bwd)),
        doc="The gradient of an array that a change of scores reads.",
    )  # fmt: skip


def _computed_with(mod: Mod) -> set[int]:
    """The operands that a function's value follows from."""
    return {i for output in mod.expression.outputs for i in operands_of(mod.expression, output)}


class _Wanted(NamedTuple):
    """The functions of a call, the number of an array, and the ops of the sums of its reads; none where these are not
    to be summed.
    """

    own: mods.Own
    array: int
    parts: Mapping[int, Op]


def _run(
    wanted: _Wanted, xp: Any, call: Callable[..., Any], inputs: Mapping[str, Any], attrs: Mapping[str, Any]
) -> dict[str, Any]:
    import array_api_compat  # start-up time

    own, array, parts = wanted
    np, name = array_api_compat.array_namespace(inputs["q"]), f"d{own.captured[array][0]}"
    reads = _Reads(np, xp, call, own, inputs)
    if parts and not reads.is_empty and all(reads.can_sum(i) for i in parts):
        found = [reads.given_out(i, call(op, inputs, attrs)["sums"]) for i, op in parts.items()]
        total = sum(found[1:], start=found[0])
        total, like = np.reshape(total, inputs[name[1:]].shape), inputs[name[1:]]
        return {name: total if total.dtype == like.dtype else np.astype(total, like.dtype)}
    chunks = _Chunks(np, xp, call, (own, inputs, attrs))
    totals = {array: chunks.zeros(array)}
    totals = xp.repeat(chunks.count, chunks.add, totals) if chunks.count else totals
    return {name: chunks.finished(array, totals[array])}


class _Reads:
    """Gives sums of terms to the elements of an array that they belong to."""

    def __init__(self, np: Any, xp: Any, call: Callable[..., Any], own: mods.Own, inputs: Mapping[str, Any]) -> None:
        self.np, self.xp, self.call, self.mod = np, xp, call, Mod.parse(own.score)
        q, k = inputs["q"], inputs["k"]
        self.batch, self.like = math.prod(q.shape[:-3]), q
        self.sizes = self.batch, q.shape[-2], q.shape[-3], k.shape[-3]
        self.arrays = mods.by_batch(np, own, [inputs[name] for name, _, _ in own.captured], self.batch)

    @property
    def is_empty(self) -> bool:
        return 0 in self.sizes

    def can_sum(self, i: int) -> bool:
        """Whether the sums of a read are its gradient, or few enough to be sorted."""
        return self._places(i) is not None or math.prod(self._shape(i)) <= MOST_SORTED

    def _shape(self, i: int) -> tuple[int, ...]:
        """Of the sums of a read, with one dim for the batch."""
        return tuple(len(x) for x in _axes(sharing_of(self.mod, i), self.sizes))

    def _places(self, i: int) -> tuple[range, ...] | None:
        return places_along(self.mod, i, self.sizes, tuple([tuple(map(int, x.shape)) for x in self.arrays]))

    def given_out(self, i: int, sums: Any) -> Any:
        """The gradient of an array by a read of it."""
        np, places = self.np, self._places(i)
        sums = np.reshape(sums, self._shape(i))
        if places is None:
            return self._sorted(i, sums)
        for axis, (place, size) in enumerate(zip(places, self.arrays[self.mod.reads[i].array].shape, strict=True)):
            sums = np.flip(sums, axis=axis) if place.step < 0 else sums
            first, last = min(place), max(place)
            if (first, last) != (0, size - 1):
                before, behind = ([*sums.shape[:axis], n, *sums.shape[axis + 1 :]] for n in (first, size - 1 - last))
                sums = np.concat([self._zeros(before), sums, self._zeros(behind)], axis=axis)
        return sums

    @property
    def _place(self) -> dict[str, Any]:
        return {"dtype": self.np.float32, **beside(self.np, self.like)}

    def _zeros(self, shape: Sequence[int]) -> Any:
        return self.np.zeros(tuple(shape), **self._place)

    def _sorted(self, i: int, sums: Any) -> Any:
        """Sums that belong to the same element are added up, one after another."""
        np, read = self.np, self.mod.reads[i]
        index = read.place
        assert index is not None  # :func:`mods.declared` refuses arrays without dims
        array, sharing = self.arrays[read.array], sharing_of(self.mod, i)
        base = mods.first_coordinate(self.mod)
        at = [np.zeros((), **self._place)] * (base + len(mods.COORDINATES))
        at += [np.asarray(size, **self._place) for size in self.sizes]
        for axis, (x, own) in enumerate(zip(_axes(sharing, self.sizes), _operands(sharing, base), strict=True)):
            coordinate = np.arange(x.start, x.stop, **self._place)
            at[min(own)] = np.reshape(coordinate, (-1, *[1] * (sums.ndim - 1 - axis)))
        operands = operands_on(self.mod, np, at, self.arrays)
        flat = np.zeros(sums.shape, **beside(np, self.like), dtype=np.int32)
        for place, size in zip(places_of(np, array, evaluate(index, np, operands)), array.shape, strict=True):
            flat = flat * size + np.astype(place, np.int32)
        keys, order = self.xp.sort(np.reshape(flat, (-1,)))
        ends = self.xp.ends(keys, math.prod(array.shape))
        given = {"ends": ends, "classes": keys, "order": order, "dout": np.reshape(sums, (-1, 1))}
        return np.reshape(self.call(sorted_embedding_bwd, given, {})["dweight"], array.shape)


@lru_cache(256)
def places_along(
    mod: Mod, i: int, sizes: tuple[int, ...], shapes: tuple[tuple[int, ...], ...]
) -> tuple[range, ...] | None:  # fmt: skip
    """The elements of each dim of an array that the sums of a read belong to, where each dim of sums is one of the
    array; else None.
    """
    read, sharing = mod.reads[i], sharing_of(mod, i)
    axes, base = _axes(sharing, sizes), mods.first_coordinate(mod)
    if read.place is None or len(axes) != len(read.place.outputs):
        return None
    import numpy as np  # start-up time

    each_size = [float(shapes[x.array][int(x.kind[1:])]) if x.kind.startswith(SIZE) else 0.0 for x in mod.reads]
    at = [np.asarray(x) for x in (*[0.0] * (base + len(mods.COORDINATES)), *map(float, sizes), *each_size)]
    known = {*range(base + len(mods.COORDINATES), mod.given)}
    known |= {mod.given + j for j, each in enumerate(mod.reads) if each.kind.startswith(SIZE)}
    found = []
    for axis, (output, own) in enumerate(zip(read.place.outputs, _operands(sharing, base), strict=True)):
        if not operands_of(read.place, output) <= known | own:
            return None
        coordinate = np.arange(axes[axis].start, axes[axis].stop, dtype=np.float64)
        operands = [coordinate if j == min(own) else x for j, x in enumerate(at)]
        along = _as_range(np.broadcast_to(evaluate(read.place, np, operands)[axis], coordinate.shape).tolist())
        if along is None or min(along) < 0 or max(along) >= shapes[read.array][axis]:
            return None
        found.append(along)
    return tuple(found)


def _as_range(numbers: list[float]) -> range | None:
    """Whole numbers one after another, up or down, as a range; None where they are not."""
    first, step = numbers[0], -1 if len(numbers) > 1 and numbers[1] < numbers[0] else 1
    if first % 1 or numbers != [first + step * i for i in range(len(numbers))]:
        return None
    return range(int(first), int(first) + step * len(numbers), step)


def _axes(sharing: Sharing, sizes: tuple[int, ...]) -> list[range]:
    """The coordinates that count the elements of sums: of a distance the query's less the key's."""
    batch, heads, s, t = sizes
    share = {
        "score": [range(t - s, t), range(t)], "distance": [range(1 - s, t)], "query": [range(t - s, t)],
        "key": [range(t)], "all": [],
    }[sharing.share]  # fmt: skip
    return [*([range(batch)] if sharing.by_batch else []), *([range(heads)] if sharing.by_head else []), *share]


def _operands(sharing: Sharing, base: int) -> list[set[int]]:
    """The operands of a function that each dim of sums goes with, the first of which counts it."""
    q, k = base + mods.Q, base + mods.K
    share = {"score": [{q}, {k}], "distance": [{q, k}], "query": [{q}], "key": [{k}], "all": []}[sharing.share]
    batch, head = [{base + mods.BATCH}] * sharing.by_batch, [{base + mods.HEAD}] * sharing.by_head
    return [*batch, *head, *share]


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
        self.arrays = mods.by_batch(np, self.own, self.given, self.batch)
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
