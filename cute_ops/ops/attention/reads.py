"""The gradient of what a change of scores reads, summed over the scores that read the same element: declaration,
reference maths, config.

Which scores these are follows from the index: a bias ``bias[head, q, k]`` has an element for each score of a head,
``table[head, q - k + n]`` for each distance, ``slopes[head]`` for all scores of a head. What is read of an array is
given to its elements by :mod:`cute_ops.ops.attention.captured`, from far fewer numbers than there are scores.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any, NamedTuple

from cute_ops.declaration.array_api import widen
from cute_ops.declaration.config import Config, Problem, Tuning
from cute_ops.declaration.kernel import Kernel
from cute_ops.declaration.op import Op
from cute_ops.declaration.shapes import Array
from cute_ops.declaration.tensor import Tensor
from cute_ops.expressions.graph import Expression, Node, operands_of
from cute_ops.expressions.reads import FLOAT, Mod
from cute_ops.expressions.reference import evaluate
from cute_ops.expressions.text import text_of
from cute_ops.hardware import ARCHES
from cute_ops.kernels.attention.reads_config import ReadsConfig, Share
from cute_ops.ops.attention import config, mods
from cute_ops.ops.attention.weights import dscores_of, grouped, weights_of

# By the most elements of a head, keys of a tile and its stages where warpgroups multiply.
TILES = {64: (64, 3), 128: (64, 2), 256: (64, 1)}
# Warps with 16 queries each, keys of a tile and its stages; the first that fits.
TILES_BY_WARPS = {
    64: ((8, 64, 2), (8, 64, 1)), 128: ((8, 64, 2), (4, 64, 1)), 192: ((8, 64, 1), (4, 32, 1)),
    256: ((8, 64, 1), (4, 32, 1)),
}  # fmt: skip
# CTAs of each SM that sets of tiles are divided among where they are few: parts of scores are as large as their sums.
CTAS, CTAS_OF_SCORES = 4, 2
DIMS = {"score": "s t", "distance": "x", "query": "s", "key": "t", "all": ""}
SAME = ("equal", "less", "less_equal")
WHOLE = ("add", "subtract", "negative", "multiply")  # primitives that make whole numbers of whole numbers


class Sharing(NamedTuple):
    """Which scores read the same element.

    Attributes:
        share: of one head.
        by_batch, by_head: whether examples, and heads, read different ones.
    """

    share: Share
    by_batch: bool
    by_head: bool

    @property
    def dims(self) -> str:
        """The dims of sums."""
        return " ".join(["*m"] * self.by_batch + ["g*r"] * self.by_head + [DIMS[self.share]]).strip() or "1"


@cache
def sharing_of(mod: Mod, read: int) -> Sharing:
    """Which scores read the same element by a read of a function."""
    base = mods.first_coordinate(mod)
    rows, columns = mod.depends(read)
    share: Share = "score" if rows and columns else "query" if rows else "key" if columns else "all"
    if share == "score" and _steps(mod, base)[mod.given + read] == 0.0:
        share = "distance"
    uses = _uses(mod, read)
    return Sharing(share, base + mods.BATCH in uses, base + mods.HEAD in uses)


def _uses(mod: Mod, read: int) -> set[int]:
    """The operands that the index of a read follows from."""
    place = mod.reads[read].place
    found = {x for i in place.outputs for x in operands_of(place, i)} if place else set()
    return found.union(*(_uses(mod, x - mod.given) for x in found if x >= mod.given))


def _steps(mod: Mod, base: int) -> list[float | None]:
    """By how much each operand of a function grows with both the query and the key; None where that differs."""
    found: list[float | None] = [0.0] * mod.given
    found[0:base] = [None] * base
    found[base + mods.Q] = found[base + mods.K] = 1.0
    floats = {i for i, read in enumerate(mod.reads, mod.given) if read.kind == FLOAT}
    for read in mod.reads:
        steps = _steps_of(read.place, found, floats) if read.place else [0.0]
        found.append(0.0 if all(step == 0.0 for step in steps) else None)
    return found


def _steps_of(expression: Expression, operands: list[float | None], floats: set[int]) -> list[float | None]:
    """What :func:`_steps` finds of the outputs of an expression. Only whole numbers, which are not rounded, grow by as
    much everywhere: ``q * 0.1 - k * 0.1`` does not. ``floats``: operands that may be others.
    """
    found: list[float | None] = []
    whole: list[bool] = []
    for node in expression.nodes:
        steps = [found[i] for i in node.args]
        numbers = [expression.nodes[i].number for i in node.args]
        step: float | None = 0.0 if all(each == 0.0 for each in steps) else None
        if node.primitive == "operand":
            step = operands[node.operand]
        elif step is None and None not in steps and all(whole[i] for i in node.args):
            step = _step(node.primitive, [each or 0.0 for each in steps], numbers)
        whole.append(_is_whole(node, [whole[i] for i in node.args], floats))
        found.append(step)
    return [found[i] for i in expression.outputs]


def _is_whole(node: Node, args: list[bool], floats: set[int]) -> bool:
    """Whether a node is a whole number, whose arguments are or are not."""
    if node.primitive == "operand":
        return node.operand not in floats
    if node.number is not None:
        return node.number % 1 == 0
    return node.primitive == "floor" or (node.primitive in WHOLE and all(args))


def _step(primitive: str, steps: list[float], numbers: list[float | bool | None]) -> float | None:
    """By how much the value of a primitive grows whose arguments grow by so much; None where that is not known."""
    if primitive in ("add", "subtract"):
        return steps[0] + (steps[1] if primitive == "add" else -steps[1])
    if primitive == "negative":
        return -steps[0]
    if primitive == "multiply" and any(number is not None for number in numbers):
        constant = 0 if numbers[0] is not None else 1
        return steps[1 - constant] * float(numbers[constant] or 0.0)
    return 0.0 if primitive in SAME and steps[0] == steps[1] else None


def sums_of_read(
    name: str, own: mods.Own, read: int, inputs: Mapping[str, Tensor], common: Mapping[str, Any],
    fallback: Callable[..., Any],
) -> Op:  # fmt: skip
    """The op of these sums; ``common`` is what it has of the declaration of attention, ``fallback`` makes a program of
    its reference.
    """
    sharing = sharing_of(Mod.parse(own.score), read)
    run = partial(reference, own=own, read=read)
    return Op(
        f"{name}_{read}", inputs=inputs,
        outputs={"sums": Tensor(sharing.dims, "float32", merged=sharing.by_batch)},
        **{key: value for key, value in common.items() if key in ("dtypes", "attrs", "static", "check", "called")},
        derived={"x": _distances} if sharing.share == "distance" else {},
        reference=run,
        fallback=fallback(run, [*inputs], ("sums",)),
        kernel=Kernel("cute_ops.kernels.attention.bwd_reads:ReadsBackward"),
        tuning=Tuning(partial(heuristic, own, read), workspace=partial(workspace, own, read)),
        doc="Sums of the gradient of what a change of scores reads.",
    )  # fmt: skip


def _distances(dims: Mapping[str, Any], attrs: Mapping[str, Any]) -> Any:
    return dims["s"] + dims["t"] - 1


def reference(xp: Any, *given: Any, own: mods.Own, read: int, **attrs: Any) -> Any:
    """``given`` are q, k, v, results, the cotangent of ``out``, the captured arrays, and that of ``lse`` or None."""
    (q, k, v, out, lse, dout), more, count = given[:6], given[6:], len(own.captured)
    captured, dlse = more[:count], (*more[count:], None)[0]
    sharing, change = sharing_of(Mod.parse(own.score), read), mods.score_of(attrs["softcap"], own.score)
    assert change is not None
    weights, row_lse, operands = weights_of(xp, (q, k, None), attrs, own, captured, None)
    g = k.shape[-2]
    # A sink is part of the log-sum-exp, which tells the weights that it leaves.
    wide_lse = xp.reshape(*widen(xp, lse), row_lse.shape)
    zeros = xp.zeros_like(row_lse)
    known = (wide_lse > -math.inf) & (row_lse > -math.inf)
    share = xp.exp(xp.where(known, row_lse, zeros) - xp.where(known, wide_lse, zeros))
    weights = xp.where(known, weights * share, xp.zeros_like(weights))
    wide_o, wide_do = (grouped(xp, x, g) for x in widen(xp, out, dout))
    wide_v = grouped(xp, *widen(xp, v))
    dscores, _ = dscores_of(xp, weights, (wide_v, wide_o, wide_do), dlse)
    (terms,) = evaluate(mods.gradient_of(change, (change.given + read,)), xp, [*operands, dscores])
    terms = xp.where(dscores == 0, dscores, terms)  # what is hidden may have no derivative
    return _summed(xp, xp.reshape(terms, (terms.shape[0], -1, *terms.shape[-2:])), sharing, q.shape[:-3])


def _summed(xp: Any, terms: Any, sharing: Sharing, lead: tuple[Any, ...]) -> Any:
    """Sums of terms (batch, heads, s, t)."""
    axes = (*(() if sharing.by_batch else (0,)), *(() if sharing.by_head else (1,)))
    terms = xp.sum(terms, axis=axes) if axes else terms
    if sharing.share == "distance":  # each row one place further right than the one above it
        *heads, s, t = terms.shape
        zeros = xp.broadcast_to(xp.zeros_like(terms[..., :1]), (*heads, s, s))
        flat = xp.reshape(xp.concat([xp.flip(terms, axis=-1), zeros], axis=-1), (*heads, s * (s + t)))
        terms = xp.sum(xp.reshape(flat[..., : s * (s + t - 1)], (*heads, s, s + t - 1)), axis=-2)
    elif sharing.share != "score":
        terms = xp.sum(terms, axis={"query": (-1,), "key": (-2,), "all": (-2, -1)}[sharing.share])
    terms = xp.astype(terms, xp.float32)
    if sharing.by_batch:
        return xp.reshape(terms, (*lead, *terms.shape[1:]))
    return terms if terms.ndim else xp.reshape(terms, (1,))


def heuristic(own: mods.Own, read: int, problem: Problem) -> ReadsConfig:
    """The first of :data:`TILES` that shared memory holds."""
    dims, change = problem.dims, mods.score_of(problem.attrs["softcap"], own.score)
    if change is None:
        raise RuntimeError("what is read changes no score")
    wanted = text_of(mods.gradient_of(change, (change.given + read,)))
    most, size = ARCHES[problem.arch].shared_per_cta, max(dims["d"], dims["e"])
    tiles: Any = {longest: [(0, *each)] for longest, each in TILES.items()}
    tiles = tiles if config.by_warpgroups(problem.arch) else TILES_BY_WARPS
    found = (
        ReadsConfig(
            keys, stages, keys, stages, "", warps, *config.mask_of(own, problem), change.text, wanted,
            **sharing_of(Mod.parse(own.score), read)._asdict(),
        )
        for warps, keys, stages in next(each for longest, each in tiles.items() if size <= longest)
    )  # fmt: skip
    return next(each for each in found if each.shared(dims["d"], dims["e"]) <= most)


def workspace(own: mods.Own, read: int, problem: Problem, chosen: Config) -> dict[str, Array | None]:
    """The deltas of rows; the parts that CTAs write, one for each of several CTAs with tiles that read the same
    elements; tables of what the mask reads.
    """
    dims, sizes = problem.dims, ReadsConfig.of(chosen)
    queries, keys, heads = -(-dims["s"] // sizes.block), -(-dims["t"] // sizes.tile_k), dims["g"] * dims["r"]
    different = (problem.m if sizes.by_batch else 1) * (heads if sizes.by_head else 1)
    ratio = sizes.block // sizes.tile_k
    units, numbers, tiles = {
        "score": (queries * keys, 0, 1),
        "distance": (ratio * (queries - 1) + keys, sizes.block + sizes.tile_k, min(queries, -(-keys // ratio))),
        "query": (queries, sizes.block, keys),
        "key": (keys, sizes.tile_k, queries),
        "all": (1, sizes.tile_k, queries * keys),
    }[sizes.share]
    steps = tiles * problem.m * heads // max(different, 1)
    ctas = problem.sm_count * (CTAS_OF_SCORES if sizes.share == "score" else CTAS)
    parts = max(min(steps, ctas // max(different * units, 1)), 1)
    size = different * units * numbers
    if sizes.share == "score":
        size = different * dims["s"] * dims["t"] if parts > 1 else 4
    return {
        "delta": Array((problem.m, heads, dims["s"]), "float32"),
        "parts": Array((parts, max(size, 4)), "float32"),
        **config.tables(own, problem, {"queries": sizes.block, "keys": sizes.tile_k}),
    }
