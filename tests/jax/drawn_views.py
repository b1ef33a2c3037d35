"""Random JAX programs for ``fuse`` that change rows and columns between the operations that it recognises.

A program is a few parts of models, such as an MLP, a norm before a product, a head's loss or attention, with views
drawn between their operations: slices, splits, pads, reshapes, transposes, gathers, sorts, sums along an axis. Sizes
are powers of two, so a part that reads other rows or columns often has as many of them: what is wrong then is a
number, not a shape. More of them than the suite runs: ``python -m tests.jax.drawn_views --count 500 --first 1000``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.drawing import check_seeds
from tests.jax.drawn_graphs import MODES, compare_with_fused

MOST = 1024  # elements of a value
STARTS = ((4, 8), (8, 8), (2, 4, 8), (4, 4, 4), (4, 2, 8), (2, 2, 4, 8), (16, 4), (2, 16, 16), (4, 4, 16))
HEADS = 2


class Drawn:
    """One evaluation of a program: it draws each choice anew from the same seed, so that it is always the same one.

    Attributes:
        shapes: of the parameters that it has asked for.
        text: what was drawn.
    """

    def __init__(self, seed: int, arrays: list[Any] | None) -> None:
        self.rng, self.arrays = np.random.default_rng([seed, 23]), arrays
        self.shapes: list[tuple[int, ...]] = []
        self.text: list[str] = []
        self.heat = 1.0  # few views leave parts as they are recognised, many none of them

    def parameter(self, *shape: int) -> Any:
        self.shapes.append(shape)
        return jnp.ones(shape) if self.arrays is None else self.arrays[len(self.shapes) - 1]

    def index(self, most: int, exclusive: bool = True) -> int:
        return int(self.rng.integers(0, most + (not exclusive)))

    def often(self, part: float) -> bool:
        return bool(self.rng.random() < part)

    def one(self, table: dict[str, Callable[..., Any]], *args: Any) -> Any:
        """Draw a function of a table and call it."""
        name = str(self.rng.choice(list(table)))
        self.text.append(name)
        return table[name](self, *args)

    def views(self, x: Any, part: float = 0.4) -> Any:
        """So many views, one after the other, of a value."""
        while x.ndim and self.often(part * self.heat):
            seen = self.one(VIEWS, x)
            if seen.ndim and prod(seen.shape) <= MOST and min(seen.shape, default=0):
                x = seen
                self.text.append(str(seen.shape).replace(" ", ""))
        return x

    def product(self, x: Any, n: int | None = None) -> Any:
        """A product of rows and a matrix, in several forms."""
        n = n or int(self.rng.choice([4, 8, 8, 16]))
        k, form = x.shape[-1], self.index(4)
        if form == 0:
            return x @ (self.parameter(n, k).T * k**-0.5)
        if form == 1:
            return jnp.einsum("...k,kn->...n", x, self.parameter(k, n) * k**-0.5)
        if form == 2 and x.ndim > 2:
            return (x.reshape(-1, k) @ (self.parameter(k, n) * k**-0.5)).reshape(*x.shape[:-1], n)
        return x @ (self.parameter(k, n) * k**-0.5)


# Views ----------------------------------------------------------------------------------------------------------------


def _axis(d: Drawn, x: Any) -> int:
    return d.index(x.ndim)


def _sliced(d: Drawn, x: Any) -> Any:
    axis = _axis(d, x)
    n = x.shape[axis]
    of = [slice(n // 2), slice(n // 2, None), slice(1, None), slice(-1), slice(None, None, 2), slice(1, None, 2)]
    return x[(slice(None),) * axis + (of[d.index(len(of))],)]


def _split(d: Drawn, x: Any) -> Any:
    axis, form = _axis(d, x), d.index(4)
    if x.shape[axis] % 2:
        return x
    a, b = jnp.split(x, 2, axis)
    made = (jnp.concatenate([b, a], axis), a * b, jnp.stack([a, b], d.index(x.ndim)), jnp.concatenate([-b, a], axis))
    return made[form]


def _joined(d: Drawn, x: Any) -> Any:
    axis, other = _axis(d, x), [x, jnp.tanh(x), x * 0.5, jnp.flip(x, _axis(d, x))][d.index(4)]
    return jnp.concatenate([x, other] if d.often(0.5) else [other, x], axis)


def _padded(d: Drawn, x: Any) -> Any:
    axis = _axis(d, x)
    least = -1 if x.shape[axis] > 2 else 0
    low, high = (max(d.index(3) - 1, least) for _ in range(2))
    sizes = [(low, high, d.index(2)) if i == axis else (0, 0, 0) for i in range(x.ndim)]
    return jax.lax.pad(x, jnp.asarray(0.25, x.dtype), sizes)


def _reshaped(d: Drawn, x: Any) -> Any:
    form = d.index(6)
    if form == 0 and x.ndim > 1:
        at = d.index(x.ndim - 1)
        return x.reshape(*x.shape[:at], -1, *x.shape[at + 2 :])
    if form == 1:
        at = _axis(d, x)
        return x if x.shape[at] % 2 else x.reshape(*x.shape[:at], *((2, -1), (-1, 2))[d.index(2)], *x.shape[at + 1 :])
    if form == 2:
        return x.reshape(-1, x.shape[-1])
    if form == 3:
        return x.reshape([x.shape[i] for i in d.rng.permutation(x.ndim)])
    if form == 4:
        return x.reshape(x.shape[::-1])
    return x.reshape(-1, int(d.rng.choice([2, 4]))) if prod(x.shape) % 4 == 0 else x


def _transposed(d: Drawn, x: Any) -> Any:
    return x.transpose(d.rng.permutation(x.ndim)) if d.often(0.6) else jnp.swapaxes(x, -1, -min(2, x.ndim))


def _taken(d: Drawn, x: Any) -> Any:
    axis, form = _axis(d, x), d.index(5)
    n = x.shape[axis]
    at = d.rng.integers(0, n, n)
    if form == 0:
        return jnp.take(x, jnp.asarray(at), axis)
    if form == 1:
        return x[(slice(None),) * axis + (int(at[0]),)]
    if form == 2:
        return jnp.take_along_axis(x, jnp.asarray(d.rng.integers(0, n, x.shape)), axis)
    if form == 3:
        return jnp.take(x, jnp.asarray(at), axis, mode="clip")
    return x[(slice(None),) * axis + (jnp.asarray(d.rng.permutation(n)),)]


def _dynamic(d: Drawn, x: Any) -> Any:
    axis = _axis(d, x)
    n = x.shape[axis]
    size, start = max(n // 2, 1), jnp.int32(d.index(n))
    part = jax.lax.dynamic_slice_in_dim(x, start, size, axis)
    if d.often(0.4):
        return jax.lax.dynamic_update_slice_in_dim(x, jnp.tanh(part), 0, axis)
    return part


def _ones(d: Drawn, x: Any) -> Any:
    form = d.index(4)
    if form == 0 or x.ndim < 2:
        return jnp.expand_dims(x, d.index(x.ndim + 1))
    if form == 1:
        return jnp.squeeze(x)
    axis = _axis(d, x)
    part = jax.lax.index_in_dim(x, d.index(x.shape[axis]), axis, keepdims=form == 2)
    return part


def _repeated(d: Drawn, x: Any) -> Any:
    form, axis = d.index(4), _axis(d, x)
    if form == 0:
        return jnp.broadcast_to(x, (2, *x.shape))
    if form == 1:
        return jnp.repeat(x, 2, axis)
    if form == 2:
        return jnp.tile(x, [2 if i == axis else 1 for i in range(x.ndim)])
    return jnp.broadcast_to(jnp.expand_dims(x, axis), (*x.shape[:axis], 2, *x.shape[axis:]))


def _masked(d: Drawn, x: Any) -> Any:
    form = d.index(4)
    if form == 0:
        keep = jnp.arange(x.shape[-1]) < x.shape[-1] // 2
    elif form == 1:
        keep = jax.lax.broadcasted_iota(jnp.int32, x.shape, _axis(d, x)) % 2 == 0
    elif form == 2:
        keep = jnp.asarray(d.rng.random(x.shape[-1 - d.index(x.ndim) :]) < 0.6)
    else:
        keep = jnp.flip(x, _axis(d, x)) > 0
    return jnp.where(keep, x, (0, x * 0.5, jnp.flip(x, _axis(d, x)))[d.index(3)])


def _along(d: Drawn, x: Any) -> Any:
    functions = [jnp.cumsum, jnp.sort, jax.lax.cummax, jnp.cumsum]
    return functions[d.index(4)](x, axis=_axis(d, x)) * 0.5


def _moved(d: Drawn, x: Any) -> Any:
    axis, form = _axis(d, x), d.index(3)
    if form == 0:
        return jnp.flip(x, axis)
    if form == 1:
        return jnp.roll(x, 1 + d.index(2), axis)
    return jnp.moveaxis(x, axis, _axis(d, x))


def _reduced(d: Drawn, x: Any) -> Any:
    kind, axis, keeps = ("mean", "sum", "max", "min")[d.index(4)], _axis(d, x), d.often(0.5)
    row = getattr(jnp, kind)(x, axis=axis, keepdims=True)
    if d.often(0.5):
        return x * jnp.tanh(row)
    return row if keeps else jnp.squeeze(row, axis)


def _elementwise(d: Drawn, x: Any) -> Any:
    form = d.index(7)
    if form == 0:
        return x + self_bias(d, x)
    if form == 1:
        return x * self_bias(d, x)
    if form == 2:
        return jax.lax.optimization_barrier(x)
    if form == 3:
        return jax.ad_checkpoint.checkpoint_name(x, "x")
    return (jnp.sin(x), x * 0.5, jax.checkpoint(jnp.tanh)(x))[form - 4]


def self_bias(d: Drawn, x: Any) -> Any:
    """Numbers that broadcast to a value: of some of its dims, or of one element."""
    return d.parameter(*[1 if d.often(0.3) else size for size in x.shape[d.index(x.ndim) :]])


VIEWS: dict[str, Callable[..., Any]] = {
    "slice": _sliced, "split": _split, "concatenate": _joined, "pad": _padded, "reshape": _reshaped,
    "reshape ": _reshaped, "transpose": _transposed, "take": _taken, "dynamic": _dynamic, "ones": _ones,
    "repeat": _repeated, "where": _masked, "along": _along, "move": _moved, "reduce": _reduced,
    "elementwise": _elementwise,
}  # fmt: skip


# Parts ----------------------------------------------------------------------------------------------------------------

_ACTIVATIONS: tuple[Callable[[Any], Any], ...] = (
    jax.nn.silu, jax.nn.gelu, lambda x: jax.nn.gelu(x, approximate=False), jnp.tanh, jax.nn.sigmoid,
    lambda x: jnp.square(jax.nn.relu(x)), lambda x: x,
)  # fmt: skip


def _mlp(d: Drawn, x: Any) -> Any:
    up = d.views(d.product(x))
    if d.often(0.5):
        up = d.views(up + d.parameter(up.shape[-1]), 0.2)
    down = d.views(d.product(d.views(_ACTIVATIONS[d.index(7)](up))), 0.2)
    return down + d.parameter(down.shape[-1]) if d.often(0.5) else down


def _gated(d: Drawn, x: Any) -> Any:
    act, n = _ACTIVATIONS[d.index(7)], int(d.rng.choice([4, 8, 16]))
    if d.often(0.4):
        both = d.views(d.product(x, n))
        axis = both.ndim - 1 if d.often(0.7) else d.index(both.ndim)
        if both.shape[axis] % 2:
            return both
        gate, up = jnp.split(both, 2, axis)
    else:
        gate, up = d.product(x, n), d.product(x, n)
        if d.often(0.5):
            view = d.rng.integers(0, 2**31)
            gate, up = (_same_view(d, int(view), each) for each in (gate, up))
        elif d.often(0.5):
            seen = d.views(gate)
            gate = seen if seen.shape == up.shape else gate
    hidden = d.views(act(gate) * d.views_of_shape(up))
    return d.product(hidden)


def _same_view(d: Drawn, seed: int, x: Any) -> Any:
    inner = _inner(d, seed)
    return inner.views(x, 0.5)


def _inner(outer: Drawn, seed: int, parameter: Callable[..., Any] | None = None) -> Drawn:
    """What draws the same choices wherever it is made anew."""
    inner = Drawn(seed, None)
    inner.parameter = parameter or outer.parameter  # type: ignore[method-assign]
    inner.text, inner.heat = outer.text, outer.heat
    return inner


def _normed(d: Drawn, x: Any) -> Any:
    x = d.views(_norm(d, d.views(x)))
    return d.views(d.product(x)) if d.often(0.7) else x


def _norm(d: Drawn, x: Any) -> Any:
    axis = -1 if d.often(0.8) else d.index(x.ndim)
    if d.often(0.4):
        x = x - x.mean(axis, keepdims=True)
    y = x * jax.lax.rsqrt(jnp.mean(x * x, axis, keepdims=True) + 1e-2)
    y = d.views(y, 0.15)
    y = y * (1.0 + d.parameter(y.shape[-1])) if d.often(0.3) else y
    return y * d.parameter(y.shape[-1]) if d.often(0.7) else y


def _residual(d: Drawn, x: Any) -> Any:
    total = d.views_of_shape(d.product(x, x.shape[-1])) + d.views_of_shape(x)
    y = _norm(d, d.views(total, 0.3))
    return y + d.views_of_shape(total) if y.shape == total.shape and d.often(0.6) else d.views(y)


def _rotated(d: Drawn, x: Any) -> Any:
    size = int(d.rng.choice([8, 64, 64]))
    x = x.reshape(x.shape[0], -1, x.shape[-1]) if x.ndim > 1 else x[None, None]
    turns, seed = d.index(4), int(d.rng.integers(0, 2**31))

    def heads(n: int) -> Any:
        made = d.product(x, n * size).reshape(*x.shape[:-1], n, size)
        if turns == 1:
            made = made.swapaxes(1, 2)
        elif turns == 2:
            made = made.transpose([*np.random.default_rng(seed).permutation(3), 3])
        elif turns == 3:
            made = _same_view(d, seed, made)
        return _turned(d, made, seed)

    made = [heads(n) for n in ((HEADS, HEADS) if d.often(0.5) else (4, 1))]
    outputs = [jnp.tanh(each).sum(-1).reshape(-1) for each in made]
    if d.often(0.5):
        outputs.append((d.product(x, made[1].size // max(made[1].size // size, 1))).mean(-1).reshape(-1))
    return jnp.concatenate(outputs) if d.often(0.5) else d.views(made[0].mean(-1))


def _turned(outer: Drawn, x: Any, seed: int) -> Any:
    """A rotation of the last dim, in the form that a seed draws, by angles of one of the other dims."""
    d = _inner(outer, seed)
    n, form = x.shape[-1], d.index(4)
    if n % 2:
        return x
    axis = d.index(x.ndim - 1)
    angles = jnp.arange(x.shape[axis])[:, None] * 0.7 ** jnp.arange(n // 2)
    angles = angles.reshape([s if i in (axis, x.ndim - 1) else 1 for i, s in enumerate((*x.shape[:-1], n // 2))])
    angles = d.views_of_shape(angles.astype(x.dtype), 0.2)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    if form == 0:
        a, b = x[..., ::2], x[..., 1::2]
        return jnp.stack([a * cos - b * sin, b * cos + a * sin], -1).reshape(x.shape)
    a, b = (x[..., : n // 2], x[..., n // 2 :]) if d.often(0.9) else (x[..., n // 2 :], x[..., : n // 2])
    if form == 1:
        cos, sin = (jnp.concatenate([t, t], -1) for t in (cos, sin))
        return x * cos + jnp.concatenate([-b, a], -1) * sin
    made = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)
    return made


def _loss(d: Drawn, x: Any) -> Any:
    logits = d.views(d.product(x), 0.5)
    if d.often(0.3):
        logits = d.views(logits + d.parameter(logits.shape[-1]), 0.3)
    if d.often(0.2):
        logits = d.views(jnp.tanh(logits / 3) * 3, 0.2)
    if d.often(0.2):
        logits = d.views(logits * 0.5, 0.2)
    logits = logits.astype(jnp.promote_types(x.dtype, jnp.float32)) if d.often(0.5) else logits
    form, n = d.index(7), logits.shape[-1]
    target = jnp.asarray(d.rng.integers(0, n, logits.shape[:-1]), jnp.int32)
    if form < 3:
        logp = d.views(jax.nn.log_softmax(logits, -1), 0.15)
        if logp.shape[:-1] != target.shape or logp.shape[-1] < n:
            target = jnp.asarray(d.rng.integers(0, logp.shape[-1], logp.shape[:-1]), jnp.int32)
        n = logp.shape[-1]
        one_hot = jax.nn.one_hot(target, n, dtype=logp.dtype)
        if form == 0:
            loss = -(one_hot * logp).sum(-1 if d.often(0.8) else d.index(logp.ndim))
        elif form == 1:
            loss = -((one_hot * 0.9 + 0.1 / n) * logp).sum(-1)
        else:
            loss = -jnp.take_along_axis(logp, target[..., None], -1)[..., 0]
    elif form == 3:
        loss = jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, target[..., None], -1)[..., 0]
    elif form == 4:
        seen = d.views_of_shape(logits, 0.5)
        loss = jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(seen, target[..., None], -1)[..., 0]
    elif form == 5:
        # Sums along another axis, or numbers of another row, where rows and columns are as many.
        axis = d.index(logits.ndim)
        sums = jnp.log(jnp.exp(logits - logits.max()).sum(axis)) + logits.max()
        at = jnp.take_along_axis(logits, target[..., None], -1)[..., 0]
        loss = sums - at if sums.shape == at.shape else at
        places = jax.lax.broadcasted_iota(jnp.int32, logits.shape, axis)
        loss += ((target[..., None] == places) * jax.nn.log_softmax(logits, -1)).sum(-1)
    else:
        of = jax.nn.log_softmax(logits, d.index(logits.ndim))
        loss = -jnp.take_along_axis(of, target[..., None], -1)[..., 0]
    loss = d.views(loss, 0.3) if loss.ndim else loss
    if d.often(0.5) and loss.ndim:
        weights = jnp.asarray(d.rng.random(loss.shape) < 0.7)
        kept = (loss * weights, jnp.where(weights, loss, 0), loss * d.parameter(*loss.shape))[d.index(3)]
        return kept.sum(None if d.often(0.7) else d.index(loss.ndim)) / 4
    return loss.mean() if d.often(0.5) else loss


def _attention(d: Drawn, x: Any) -> Any:
    if x.ndim < 2:
        return x
    x = x.reshape(x.shape[0], -1, x.shape[-1])
    apart = d.often(0.6)
    if apart:
        q, k, v = (d.product(x, HEADS * 16) for _ in range(3))
    else:
        q, k, v = jnp.split(d.product(x, 3 * HEADS * 16), 3, -1)
    seed, views = int(d.rng.integers(0, 2**31)), d.index(4)
    if views == 1:
        q, k, v = (_same_view(d, seed, each) for each in (q, k, v))
    elif views == 2:
        q, k, v = d.views_of_shape(q), d.views_of_shape(k), d.views_of_shape(v)
    if prod(q.shape[1:]) % (HEADS * 16) or prod(q.shape) > 2048:
        return q
    q, k, v = (each.reshape(q.shape[0], -1, HEADS, 16) for each in (q, k, v))
    if d.often(0.4):
        q, k = _turned(d, q, seed), _turned(d, k, seed)
    if d.often(0.4):
        q, k, v = (d.views_of_shape(each, 0.3) for each in (q, k, v))
    t = q.shape[1]
    wide = jnp.promote_types(x.dtype, jnp.float32)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q * 0.25, k).astype(wide)
    if d.often(0.5):
        scores = d.views_of_shape(scores, 0.3)
    mask = d.index(4)
    if mask == 1:
        scores = jnp.where(d.views_of_shape(jnp.tril(jnp.ones((t, t), bool)), 0.3), scores, -1e9)
    elif mask == 2:
        scores = scores + d.parameter(*[1 if d.often(0.4) else size for size in scores.shape])
    p = jax.nn.softmax(scores, -1 if d.often(0.85) else d.index(4)).astype(x.dtype)
    if d.often(0.3):
        p = d.views_of_shape(p, 0.3)
    out = d.views(jnp.einsum("bhqk,bkhd->bqhd", p, v), 0.3)
    return d.product(out.reshape(out.shape[0], -1)) if d.often(0.3) else d.product(out)


def _softmaxed(d: Drawn, x: Any) -> Any:
    axis = -1 if d.often(0.7) else d.index(x.ndim)
    return d.views(d.product(d.views(jax.nn.softmax(x, axis) * 3)))


def _stopped(d: Drawn, x: Any) -> Any:
    """Numbers of rows without a gradient that are subtracted, and perhaps added again, here or at other rows."""
    rows = jax.lax.stop_gradient(jnp.tanh(x).max(d.index(x.ndim) if d.often(0.4) else -1, keepdims=True))
    y = x - rows
    if d.often(0.5):
        y = jnp.exp(y * 0.5)
        seen = jnp.exp(d.views(rows) * 0.5)
        fits = seen.ndim <= y.ndim and all(a in (1, b) for a, b in zip(seen.shape[::-1], y.shape[::-1], strict=False))
        y = y * seen if fits else y
    elif x.ndim > 1 and x.shape[-1] == x.shape[-2]:
        y = (y.swapaxes(-1, -2) + (rows if d.often(0.5) else rows.swapaxes(-1, -2))) * 0.5
    return d.views(y)


def _looked_up(d: Drawn, x: Any) -> Any:
    table, count = d.views(d.parameter(8, 8)), int(d.rng.choice([2, 4]))
    at = jnp.asarray(d.rng.integers(0, table.shape[0], (count, 4)))
    rows = d.views(table[at] if d.often(0.6) else jnp.take(table, at, 0, mode="clip"))
    return d.product(rows) + jnp.tanh(x.mean())


def _body(d: Drawn, x: Any) -> Any:
    """A part in the body of a loop, of a branch, of a derivative of its own or of a shard map, or mapped over rows."""
    if x.ndim < 3:
        return x
    weights, seed, form, heat = d.parameter(8, 8), int(d.rng.integers(0, 2**31)), d.index(8), d.heat

    def each(row: Any, weights: Any) -> Any:
        inner = _inner(d, seed, lambda *shape: jnp.resize(weights, shape))
        inner.heat = heat  # a backward runs this later
        return inner.one({name: PARTS[name] for name in _IN_BODIES}, row)

    if form == 0:

        def body(carry: Any, row: Any) -> Any:
            out = each(row, weights)
            return carry + jnp.tanh(out.mean()), out

        step = jax.checkpoint(body) if d.often(0.3) else body
        total, out = jax.lax.scan(step, jnp.zeros((), x.dtype), x, reverse=d.often(0.3))
        return out * total
    if form == 1:
        return jax.vmap(partial(each, weights=weights), d.index(2), d.index(1))(x)
    if form == 2:
        return jax.vmap(each, (d.index(2), None))(x, weights)
    if form == 3:
        return jax.checkpoint(each)(x, weights)
    if form == 4:
        scale = jax.eval_shape(each, x, weights)
        return jax.lax.cond(
            x.mean() > 0, each, lambda x, w: jnp.full(scale.shape, 0.5, scale.dtype) * x.mean(), x, weights
        )
    if form == 5:
        one = jax.custom_vjp(each)
        one.defvjp(
            lambda x, w: (each(x, w), (x, w)), lambda saved, dout: jax.vjp(lambda x, w: 2 * each(x, w), *saved)[1](dout)
        )
        return one(x, weights)
    if form == 6:
        return jax.lax.map(partial(each, weights=weights), x)
    every = max(c for c in (1, 2, 4, 8) if c <= len(jax.devices()))
    count = max(c for c in (1, 2, 4, 8) if c <= every and x.shape[0] % c == 0)
    kinds = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((count, every // count), ("k", "others"), axis_types=kinds, devices=jax.devices()[:every])
    spec = jax.sharding.PartitionSpec
    rows = lambda x, w: jnp.atleast_1d(each(x, w))  # noqa: E731
    return jax.shard_map(rows, mesh=mesh, in_specs=(spec("k"), spec()), out_specs=spec("k"), check_vma=d.often(0.5))(
        x, weights
    )


def _views_of_shape(self: Drawn, x: Any, part: float = 0.3) -> Any:
    """Views after which a value has the shape that it had."""
    seen = self.views(x, part)
    if seen.shape == x.shape:
        return seen
    return seen.reshape(x.shape) if prod(seen.shape) == prod(x.shape) else x


Drawn.views_of_shape = _views_of_shape  # type: ignore[attr-defined]
PARTS: dict[str, Callable[..., Any]] = {
    "mlp": _mlp, "gated": _gated, "normed": _normed, "residual": _residual, "rotated": _rotated, "loss": _loss,
    "loss ": _loss, "attention": _attention, "softmaxed": _softmaxed, "looked_up": _looked_up, "body": _body,
    "stopped": _stopped,
}  # fmt: skip
_IN_BODIES = ("mlp", "gated", "normed", "residual", "rotated", "loss", "attention", "softmaxed")


def run(seed: int, arrays: list[Any] | None) -> tuple[list[Any], Drawn]:
    """The outputs of the program of a seed, and what was drawn."""
    d = Drawn(seed, arrays)
    x = d.parameter(*STARTS[d.index(len(STARTS))])
    outputs = [x]
    for _ in range(1 + d.index(3)):
        x = outputs[-1] if outputs[-1].ndim and prod(outputs[-1].shape) < MOST else outputs[0]
        d.heat = (0.1, 0.25, 0.5, 1.0)[d.index(4)]
        x = d.views(d.one(PARTS, d.views(x, 0.3)), 0.3)
        outputs.append(x)
    if d.often(0.3):
        outputs.append(jnp.tanh(outputs[1 + d.index(len(outputs) - 1)]))
    return outputs[1:], d


def check(seed: int, mode: str) -> str:
    """Compare the program of a seed with what ``fuse`` makes of it, and the gradients; returns its text."""
    drawn: list[Any] = []

    def traced() -> list[Any]:
        outputs, made = run(seed, None)
        drawn.append(made)
        return outputs

    outputs = jax.eval_shape(traced)
    shapes, rng = drawn[0].shapes, np.random.default_rng([seed, 5])

    def draw() -> dict[str, np.ndarray]:
        return {str(i): rng.standard_normal(shape).astype(np.float32) for i, shape in enumerate(shapes)}

    def function(arrays: Any, dtype: Any) -> list[Any]:
        return [each.astype(dtype) for each in run(seed, [arrays[str(i)] for i in range(len(shapes))])[0]]

    text = "; ".join(drawn[0].text)
    arrays, cotangents = draw(), [rng.standard_normal(each.shape).astype(np.float32) for each in outputs]
    compare_with_fused(f"seed {seed}, {mode}: {text}", function, arrays, cotangents, "float32", mode, True, draw)
    return text


def run_seed(seed: int) -> str:
    """Check the program of a seed in its mode."""
    return check(seed, (*MODES, "sharded")[seed % 5])


if __name__ == "__main__":
    check_seeds(run_seed, "programs")
