"""Ops that write their inputs or take run-time scalars, in torch's transforms and compilers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch._inductor.utils import run_and_get_code
from torch.autograd import forward_ad

import cute_ops_torch
from cute_ops import testing
from cute_ops.ops.attention.append_kv import append_kv
from cute_ops_torch.host.launch import Launcher
from cute_ops_torch.tools import runner
from tests.ops import writing

store, follow, axpy = (cute_ops_torch.register(op) for op in (writing.store, writing.follow, writing.axpy))
INDEX = torch.tensor([7, 0, 3], dtype=torch.int32)


def rows(*lead: int) -> torch.Tensor:
    return torch.randn(*lead, 8)


@pytest.mark.parametrize(
    "own", [writing.store, writing.follow, writing.axpy, writing.axpy.grad], ids=lambda own: own.name
)
def test_values_against_float64(own: Any) -> None:
    op, case = own, own.cases[0]
    arrays, attrs = testing.inputs(op, case, "float32"), testing.attributes(op, case)
    testing.check(op, arrays, attrs, runner.run(op, arrays, attrs))
    runner.check(op, arrays, attrs, "compact", list)


def test_schemas_say_what_is_written() -> None:
    assert str(torch.ops.cute.store.default._schema) == (
        "cute::store(Tensor(w0!) cache, Tensor rows, Tensor index) -> ()"
    )
    assert str(torch.ops.cute.axpy.default._schema) == (
        "cute::axpy(Tensor x, Tensor y, float alpha=2., SymInt first=0) -> Tensor"
    )


@pytest.mark.parametrize(
    "call",
    [
        (torch.ops.cute.store.default, lambda: (rows(12), rows(3), INDEX)),
        (torch.ops.cute.follow.default, lambda: (rows(3), rows(3), torch.tensor(2.0), 0.25)),
        (torch.ops.cute.axpy.default, lambda: (rows(3).requires_grad_(), rows(3), 0.25, 2)),
    ],
    ids=lambda call: call[0].name(),
)
def test_torch_checks_the_registration(call: Any) -> None:
    overload, arguments = call
    found = torch.library.opcheck(overload, arguments())
    assert set(found.values()) == {"SUCCESS"}


@pytest.mark.slow
def test_a_compiled_step_does_not_copy_a_cache() -> None:
    def step(k_cache: torch.Tensor, v_cache: torch.Tensor, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        store(k_cache, x.sin(), index)
        store(v_cache, x.cos(), index)
        return (k_cache + v_cache).sum(0)

    def caches() -> list[torch.Tensor]:
        return [torch.zeros(12, 8), torch.zeros(12, 8)]

    x, eager, compiled = rows(3), caches(), caches()
    expected = step(*eager, x, INDEX)
    got, (code,) = run_and_get_code(torch.compile(step, fullgraph=True), *compiled, x, INDEX)
    torch.testing.assert_close((got, *compiled), (expected, *eager))
    assert code.count("torch.ops.cute.store.default(") == 2
    assert "copy_" not in code and "empty_strided_cpu((12, 8)" not in code


class Storing(torch.nn.Module):
    def forward(self, cache: torch.Tensor, x: torch.Tensor) -> None:
        store(cache, x, INDEX)


def test_an_exported_program_without_outputs_keeps_its_calls() -> None:
    """What has no output is not dead code."""
    program = torch.export.export(Storing(), (rows(12), rows(3)))
    cache, x = rows(12), rows(3)
    program.module()(cache, x)
    assert torch.equal(cache[INDEX.long()], x)


def test_a_compiled_graph_serves_all_integers_and_one_float_each() -> None:
    """Torch fixes floats: what changes from step to step in a compiled graph is a tensor of shape ()."""
    x, y, counter = rows(3), rows(3), CompileCounter()
    compiled = torch.compile(lambda alpha, first: axpy(x, y, alpha, first), backend=counter, fullgraph=True)
    for first in (3, 4, 5, 6, 7):
        torch.testing.assert_close(compiled(1.5, first), axpy(x, y, 1.5, first))
    assert counter.frame_count == 2, "the second value makes the integer symbolic"
    for alpha in (2.5, 3.5):
        torch.testing.assert_close(compiled(alpha, 4), axpy(x, y, alpha, 4))
    assert counter.frame_count == 4
    gains = CompileCounter()
    step = torch.compile(lambda state, gain: follow(state, x, gain), backend=gains, fullgraph=True)
    for gain in (1.5, 2.5, 3.5):
        state = y.clone()
        step(state, torch.tensor(gain))
        torch.testing.assert_close(state, 0.5 * y + gain * x)
    assert gains.frame_count == 1


@pytest.mark.slow
def test_a_compiled_integer_reaches_inductors_code() -> None:
    x = rows(3).requires_grad_()
    compiled = torch.compile(lambda first: axpy(x, x.sin(), 1.5, first).cos(), fullgraph=True)
    for first in (3, 4, 5):
        torch.testing.assert_close(compiled(first), axpy(x, x.sin(), 1.5, first).cos())
        got, expected = (torch.autograd.grad(f(first).sum(), x) for f in (compiled, _eager(x)))
        torch.testing.assert_close(got, expected)


def _eager(x: torch.Tensor) -> Any:
    return lambda first: axpy(x, x.sin(), 1.5, first).cos()


@pytest.mark.parametrize("dim", [0, 1])
def test_vmap_over_what_is_written(dim: int) -> None:
    """Where leading dims are batched, in one call; a cache per example in one call for each."""
    state, x, gain = rows(5, 3), rows(5, 3), torch.tensor(2.0)
    for gains, each in ((gain, None), (torch.rand(5), 0)):
        batch, expected = state.clone().movedim(0, dim).contiguous(), state.clone()
        kept = torch.vmap(lambda s, a, g: follow(s, a, g), (dim, 0, each))(batch, x, gains)
        for k in range(5):
            torch.testing.assert_close(kept[k], follow(expected[k], x[k], gains if each is None else gains[k]))
        torch.testing.assert_close(batch.movedim(dim, 0), expected)
    caches, values = torch.zeros(5, 12, 8), rows(5, 3)
    torch.vmap(lambda c, r: store(c, r, INDEX), out_dims=None)(caches, values)
    torch.testing.assert_close(caches[:, INDEX.long()], values)
    scaled = torch.vmap(lambda a, b: axpy(a, b, 1.5, 2), (0, None))(x, x[0])
    torch.testing.assert_close(scaled, axpy(x, x[:1].expand_as(x).contiguous(), 1.5, 2))


def test_vmap_of_what_is_shared_is_refused() -> None:
    problem = r"^cute.store: vmap: `cache` is written but not batched, while `rows` is: .* batch `cache` too"
    with pytest.raises(ValueError, match=problem):
        torch.vmap(lambda r: store(torch.zeros(12, 8), r, INDEX))(rows(5, 3))


def test_gradients_and_memory_are_refused_on_a_cpu_too() -> None:
    with pytest.raises(NotImplementedError, match="`rows` requires grad, but an op that writes its inputs has no"):
        store(rows(12), rows(3).requires_grad_(), INDEX)
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forward-mode AD"):
        store(forward_ad.make_dual(rows(12), rows(12)), rows(3), INDEX)
    cache = rows(12)
    with pytest.raises(ValueError, match="`cache` is written, but shares memory with `rows`"):
        store(cache, cache[1:4], INDEX)
    with pytest.raises(ValueError, match="`cache` is written, but with strides"):
        store(rows(1).expand(12, 8), rows(3), INDEX)


def test_autograd_notices_what_was_written() -> None:
    """A backward would read other numbers than the forward did."""
    cache, x = rows(12), rows(3).requires_grad_()
    loss = (cache[:3] * x).sum()
    store(cache, x.detach(), INDEX)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    with torch.inference_mode():
        store(cache, rows(3), INDEX)
        store(rows(12), rows(3), INDEX)


def test_an_empty_call_changes_nothing() -> None:
    cache = rows(12)
    before = cache.clone()
    store(cache, rows(0), INDEX[:0])
    assert torch.equal(cache, before)


HEADS, SLOTS = (2, 8), torch.tensor([7, 0, -1, 11, 12])


def caches(layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Of three pages of four slots: halves of one array, side by side in each page, or heads before slots."""
    if layout == "halves":
        return torch.randn(2, 3, 4, *HEADS).unbind(0)
    if layout == "side by side":
        return torch.randn(3, 2, 4, *HEADS).unbind(1)
    return torch.randn(2, 3, HEADS[0], 4, HEADS[1]).transpose(2, 3).unbind(0)


def appended(cache: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """What index_put gives, in an array of its own."""
    kept = SLOTS.ge(0) & SLOTS.lt(12)
    return cache.clone().index_put((SLOTS[kept] // 4, SLOTS[kept] % 4), new[kept])


@pytest.mark.parametrize("layout", ["halves", "side by side", "heads first"])
@pytest.mark.parametrize("how", ["eager", "launched", "compiled"])
def test_a_decode_step_writes_caches_where_they_lie(layout: str, how: str, compiled: Any) -> None:
    """From slices of a fused projection, without a copy of either."""
    step: Any = {"eager": cute_ops_torch.append_kv, "launched": Launcher(append_kv).launch}.get(how)
    step = step or torch.compile(cute_ops_torch.append_kv, fullgraph=True)
    given, (_, k, v) = caches(layout), torch.randn(5, 3, *HEADS).unbind(1)
    expected = [appended(cache, new) for cache, new in zip(given, (k, v), strict=True)]
    for _ in range(2):
        assert not step(*given, k, v, SLOTS)
    torch.testing.assert_close(given, tuple(expected), rtol=0, atol=0)
    if how == "launched":
        keys = {key.name: key.layout for key in compiled.variants[-1].args if key}
        assert keys == {
            "k_cache": "flat" if layout == "halves" else "strided", "v_cache": keys["k_cache"],
            "k": "strided", "v": "strided", "slots": "flat",
        }  # fmt: skip


@pytest.mark.slow
def test_a_compiled_decode_step_copies_no_cache() -> None:
    def step(k_cache: torch.Tensor, v_cache: torch.Tensor, qkv: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, HEADS) for part in (qkv * 2).chunk(3, -1))
        cute_ops_torch.append_kv(k_cache, v_cache, k, v, slots)
        return (q[:, None, None] * (k_cache + v_cache)).sum((1, 2))

    qkv, eager = torch.randn(5, 3 * 16), caches("halves")
    compiled = tuple(cache.clone() for cache in eager)
    expected = step(*eager, qkv, SLOTS)
    got, (code,) = run_and_get_code(torch.compile(step, fullgraph=True), *compiled, qkv, SLOTS)
    torch.testing.assert_close((got, compiled), (expected, eager))
    assert code.count("torch.ops.cute.append_kv.default(") == 1
    assert "copy_" not in code and "empty_strided_cpu((3, 4, 2, 8)" not in code


def test_caches_that_share_memory_and_gradients_are_refused() -> None:
    cache, new = torch.zeros(3, 4, *HEADS), torch.zeros(5, *HEADS)
    with pytest.raises(ValueError, match="`k_cache` is written, but shares memory with `v_cache`"):
        cute_ops_torch.append_kv(cache, cache, new, new, SLOTS)
    with pytest.raises(NotImplementedError, match="`k` requires grad, but an op that writes its inputs has no"):
        cute_ops_torch.append_kv(cache, cache.clone(), new.requires_grad_(), new, SLOTS)


def test_vmap_over_caches() -> None:
    given, new = [torch.stack(caches("halves")) for _ in range(2)], torch.randn(2, 5, *HEADS)
    expected = [[appended(cache, new[i]) for i, cache in enumerate(both)] for both in given]
    torch.vmap(lambda k_cache, v_cache, x: cute_ops_torch.append_kv(k_cache, v_cache, x, x, SLOTS), out_dims=None)(
        *given, new
    )
    for got, both in zip(given, expected, strict=True):
        assert torch.equal(got, torch.stack(both))


@pytest.mark.slow
@pytest.mark.parametrize("interleaved", [False, True])
def test_keys_are_rotated_on_their_way(interleaved: bool) -> None:
    """As the two ops one after another, bit by bit."""
    given, (k, v) = caches("halves"), torch.randn(2, 5, *HEADS)
    cos, sin = torch.randn(2, 5, 3)
    expected = [cache.clone() for cache in given]
    turned = cute_ops_torch.rope(k, cos, sin, interleaved=interleaved)
    cute_ops_torch.append_kv(*expected, turned, v, SLOTS)
    torch.compile(cute_ops_torch.append_kv, fullgraph=True)(*given, k, v, SLOTS, cos, sin, interleaved=interleaved)
    assert all(map(torch.equal, given, expected))


@pytest.mark.parametrize(
    "change",
    [
        {"slots": SLOTS.float()}, {"v": torch.zeros(5, 3, 8)}, {"k": torch.zeros(4, 2, 8)},
        {"cos": torch.zeros(5, 2)}, {"cos": torch.zeros(5, 5), "sin": torch.zeros(5, 5)},
    ],
)  # fmt: skip
def test_what_does_not_fit_writes_nothing(change: dict[str, torch.Tensor]) -> None:
    given, new = caches("halves"), torch.zeros(5, *HEADS)
    before = [cache.clone() for cache in given]
    arguments = {"k_cache": given[0], "v_cache": given[1], "k": new, "v": new, "slots": SLOTS, **change}
    with pytest.raises((TypeError, ValueError), match=r"^cute\.append_kv: (argument |heads have d=8)"):
        cute_ops_torch.append_kv(**arguments)
    assert all(map(torch.equal, given, before))
