"""Cross entropy, and its fusion with a linear layer: against PyTorch's, special values, memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from array_api_compat import torch as xp

import cute_ops_torch
from cute_ops import testing
from cute_ops.composite import chunks, finished
from cute_ops.ops.gemm.linear import linear as linear_op
from cute_ops.ops.reduction.cross_entropy import cross_entropy as declared
from cute_ops_torch.library import program, row_chunks
from cute_ops_torch.library.class_blocks import ClassBlocks
from cute_ops_torch.library.row_chunks import Chunks, rows_in_saved
from cute_ops_torch.library.row_halves import RowHalves

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
REDUCTIONS = ["mean", "sum", "none"]
UNIT = testing.EPS["float32"]


def gradients(loss: torch.Tensor, *leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(3)
    return torch.autograd.grad(loss, leaves, torch.randn(loss.shape).to(loss))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_as_torch(reduction: str, smoothing: float, device: str) -> None:
    """In float64, since in float32 PyTorch's own depends on the processor."""
    torch.manual_seed(0)
    x = torch.randn(6, 1003, device=device)
    target = torch.randint(1003, (6,), device=device)
    target[2] = -100
    for logits in (x, x * 1e4, x.masked_fill(torch.rand_like(x) < 0.5, -1e4)):
        logits = logits.detach().requires_grad_()
        options = {"label_smoothing": smoothing, "reduction": reduction}
        ours, theirs = (
            cute_ops_torch.cross_entropy(logits, target, **options),
            F.cross_entropy(logits.double(), target, **options),
        )
        torch.testing.assert_close(ours.double(), theirs, rtol=2e-6, atol=2e-5)
        torch.testing.assert_close(*(gradients(loss, logits)[0] for loss in (ours, theirs)), rtol=2e-3, atol=1e-4)


OFFSETS = (0.0, 1e3, -1e4, 6e4, 1e6)


def shifted(dtype: torch.dtype, n: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits with an offset common to all classes of a row, and targets."""
    torch.manual_seed(2)
    offsets = [o for o in OFFSETS if abs(o) < torch.finfo(dtype).max]
    x = 3 * torch.randn(len(offsets), n, device=device) + torch.tensor(offsets, device=device)[:, None]
    return x.to(dtype), torch.randint(n, (len(offsets),), device=device)


def loss_off_without_offset(x: torch.Tensor, target: torch.Tensor, smoothing: float) -> torch.Tensor:
    """How far each loss may be off by the tolerance rule if the offset, which the rule would count among the largest
    numbers, is subtracted before.
    """
    wide = x.detach().double()
    arrays = {"logits": (wide - wide.amax(-1, keepdim=True)).float(), "target": target}
    return testing.tolerances(declared, arrays, {**declared.attrs, "label_smoothing": smoothing})[0]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("n", [7, 1003, 50257])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_a_common_offset_costs_a_step_no_digits(dtype: torch.dtype, smoothing: float, n: int, device: str) -> None:
    x, target = shifted(dtype, n, device)
    wide = x.double().requires_grad_()
    exact = F.cross_entropy(wide, target, label_smoothing=smoothing, reduction="none")
    (slope,) = torch.autograd.grad(exact.sum(), wide)
    gradient, loss = torch.ops.cute.cross_entropy_step(
        x, target, torch.ones(len(x), device=device), label_smoothing=smoothing
    )
    loss_off = loss_off_without_offset(x, target, smoothing)
    assert loss_off.max() < 2e-5  # an offset of a thousand rounds off more
    # What the log of a sum is off by, every probability is off by relative to itself.
    slope_off = loss_off[:, None] * wide.softmax(-1) + 2 * (torch.finfo(dtype).eps * slope.abs() + UNIT)
    assert ((loss.double() - exact).abs() <= loss_off).all()
    assert ((gradient.double() - slope).abs() <= slope_off).all()
    if dtype == torch.float32:
        # Its sum is the relative error of a sum of exponentials, of which the loss has the log.
        assert (gradient.double().sum(-1).abs() <= loss_off).all()


@pytest.mark.parametrize("device", DEVICES)
def test_special_values(device: str) -> None:
    inf, nan = torch.inf, torch.nan
    x = torch.randn(9, 640, device=device)
    x[0, 5:], x[1], x[2, 7], x[3, 7], x[4], x[5, 3] = -inf, -inf, inf, nan, nan, -inf
    target = torch.tensor([1, 1, 1, 1, -100, 3, -100, 640, -1], device=device)
    x.requires_grad_()
    loss = cute_ops_torch.cross_entropy(x, target, reduction="none")
    theirs = F.cross_entropy(x[:7].double(), target[:7], reduction="none")
    torch.testing.assert_close(loss[:7].double(), theirs, equal_nan=True, rtol=2e-6, atol=1e-5)
    assert loss[7:].isnan().all()  # neither a class nor ignored
    (dx,) = torch.autograd.grad(loss, x, torch.ones_like(loss))
    (expected,) = torch.autograd.grad(theirs, x, torch.ones_like(theirs))
    torch.testing.assert_close(dx[[0, 2, 3, 5, 6]], expected[[0, 2, 3, 5, 6]], equal_nan=True)
    assert not dx[4].any()  # ignored: zero, where torch passes the NaN on
    assert dx[[1, 7, 8]].isnan().all()
    assert cute_ops_torch.cross_entropy(x[4:5], target[4:5]).isnan()  # a mean over nothing, as torch


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "options", [{}, {"label_smoothing": 0.1, "z_loss": 1e-2, "ignore_index": 3}, {"softcap": 5.0, "logit_scale": 0.5}],
    ids=str,
)  # fmt: skip
def test_slices_of_the_classes(options: dict[str, Any], device: str) -> None:
    """Ranks that share the classes run their slices and combine the results: here one after another."""
    n, sizes = 1003, (501, 501, 1)
    x, target = 3 * torch.randn(9, n, device=device), torch.randint(n, (9,), device=device)
    x += torch.linspace(-1e4, 1e4, 9, device=device)[:, None]
    target[:4] = torch.tensor([3, -100, 1002, n], device=device)
    x[4, :501] = x[5, 501:1002] = -torch.inf
    dloss = torch.randn(9, device=device)
    forward, backward = torch.ops.cute.cross_entropy, torch.ops.cute.cross_entropy_bwd
    attrs = {**declared.attrs, **options}
    loss, *lse = forward(x, target, **attrs)
    dx = backward(x, target, *lse, dloss, **attrs)
    parts, gradients, start = [], [], 0
    for mine in x.split(sizes, dim=1):
        place = (start, mine.shape[1], n)
        given, chosen = declared.split.of_slice(xp, {"logits": mine, "target": target}, attrs, *place)
        parts.append(forward(*given.values(), **chosen))
        given = {
            "logits": mine,
            "target": target,
            **dict(zip(("row_max", "log_sum"), lse, strict=True)),
            "dloss": dloss,
        }
        given, chosen = declared.grad.split.of_slice(xp, given, attrs, *place)
        gradients.append(backward(*given.values(), **chosen))
        start += mine.shape[1]
    stacked = {name: torch.stack(each) for name, each in zip(declared.outputs, zip(*parts, strict=True), strict=True)}
    merged = declared.split.merge(xp, stacked, {"logits": x, "target": target}, attrs, sizes, n)
    torch.testing.assert_close(
        [merged[name] for name in declared.outputs], [loss, *lse], equal_nan=True, rtol=2e-6, atol=2e-5
    )
    torch.testing.assert_close(torch.cat(gradients, dim=1), dx, equal_nan=True)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("n", [640, 641])
def test_the_gradient_may_take_the_logits_memory(device: str, n: int) -> None:
    x = torch.randn(8, n, device=device, requires_grad=True)
    target = torch.randint(n, (8,), device=device)
    (expected,) = torch.autograd.grad(cute_ops_torch.cross_entropy(x, target), x)
    logits = x * 1
    kept = logits.sin()  # has saved the logits for its own gradient
    cute_ops_torch.cross_entropy(logits, target, inplace_backward=True).backward()
    torch.testing.assert_close(x.grad, expected, rtol=0, atol=0)
    torch.testing.assert_close(logits.detach(), expected, rtol=0, atol=0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        kept.sum().backward()


@pytest.mark.gpu
def test_in_place_needs_no_second_buffer() -> None:
    x = torch.randn(1024, 50304, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    target = torch.randint(50304, (1024,), device="cuda")
    for inplace, least, most in ((False, 2.0, 2.1), (True, 1.0, 1.1)):
        logits = x * 1
        loss = cute_ops_torch.cross_entropy(logits, target, inplace_backward=inplace)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() - x.nbytes
        (dlogits,) = torch.autograd.grad(loss, logits)
        assert least <= (torch.cuda.max_memory_allocated() - x.nbytes - before) / x.nbytes + 1 <= most
        assert (dlogits.data_ptr() == logits.data_ptr()) == inplace
        del logits, loss, dlogits


@pytest.mark.parametrize("device", DEVICES)
def test_a_mean_is_two_kernels_forward_and_two_backward(device: str) -> None:
    """Where one device has all rows and nothing observes the call; elsewhere the framework's functions follow ours."""
    generator = torch.Generator().manual_seed(4)
    for shape, ignored, dtype, attrs in (
        ((6, 33), -100, torch.int64, {}), ((2, 3, 5), 3, torch.int32, {"label_smoothing": 0.1, "z_loss": 0.01}),
        ((4, 7), 0, torch.int64, {"softcap": 2.0, "logit_scale": 0.5}), ((0, 9), -100, torch.int64, {}),
    ):  # fmt: skip
        target = torch.randint(shape[-1], shape[:-1], generator=generator).to(device, dtype)
        target.flatten()[1:3] = ignored
        for kept in (target, torch.full_like(target, ignored)):
            logits = torch.randn(shape, generator=generator).to(device).requires_grad_()
            call = partial(cute_ops_torch.cross_entropy, logits, kept, ignored, **attrs)
            mean, rows = call(), call(reduction="none")
            assert type(mean.grad_fn).__name__ == "cute_cross_entropy_meanBackward"
            assert mean.dtype == torch.float32 and not mean.shape
            expected = rows.double().sum() / (kept != ignored).sum()
            torch.testing.assert_close(mean.double(), expected, rtol=4 * UNIT, atol=0, equal_nan=True)
            found, wanted = (torch.autograd.grad(3 * loss, logits)[0] for loss in (mean, expected))
            torch.testing.assert_close(found, wanted, rtol=8 * UNIT, atol=1e-12, equal_nan=True)
            plain = partial(cute_ops_torch.cross_entropy, target=kept, ignore_index=ignored, **attrs)
            observed = torch.func.grad(plain)(logits.detach())
            torch.testing.assert_close(3 * observed, wanted, rtol=8 * UNIT, atol=1e-12, equal_nan=True)
    ours = finished.cross_entropy_mean
    ran = [op.name for program in (ours.program, ours.grad.program) for op in program.ops]
    assert ran == ["cross_entropy", "kept_mean", "kept_mean", "cross_entropy_bwd"]


def test_unknown_reduction() -> None:
    with pytest.raises(ValueError, match="option `reduction` is 'max', expected 'mean', 'sum' or 'none'"):
        cute_ops_torch.cross_entropy(torch.randn(2, 3), torch.tensor([0, 1]), reduction="max")


# --- with a linear layer -------------------------------------------------------------------------------------------


@pytest.fixture(params=[1000, 4], ids=["one-chunk", "chunks"])
def chunked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    size = request.param

    def plan_shared(rows: int, hidden: int, vocab: int, itemsize: int, least: bool = False) -> tuple[int, list[slice]]:
        slices = [slice(start, min(start + size, rows)) for start in range(0, rows, size)]
        return rows * hidden + size * vocab + chunks.TILE, slices

    monkeypatch.setattr(chunks, "rows_per_chunk", lambda *sizes: size)
    monkeypatch.setattr(chunks, "plan_shared", plan_shared)


def linear(device: str) -> tuple[list[torch.Tensor], torch.Tensor]:
    torch.manual_seed(1)
    leaves = [torch.randn(s, device=device, requires_grad=True) for s in ((3, 5, 16), (67, 16), (67,))]
    target = torch.randint(67, (3, 5), device=device)
    target[0, 1] = -100
    return leaves, target


def by_hand(hidden: Any, weight: Any, target: Any, bias: Any = None, **options: Any) -> torch.Tensor:
    logits = F.linear(hidden, weight, bias)
    return cute_ops_torch.cross_entropy(logits, target, **options)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_linear(chunked: None, reduction: str, device: str, compiled: bool) -> None:
    (hidden, weight, bias), target = linear(device)
    options: dict[str, Any] = {"reduction": reduction, "label_smoothing": 0.1, "z_loss": 1e-2}
    function: Callable[..., Any] = cute_ops_torch.linear_cross_entropy
    if compiled:
        torch._dynamo.reset()
        function = torch.compile(function, fullgraph=True, backend="aot_eager")
    ours, theirs = (f(hidden, weight, target, bias, **options) for f in (function, by_hand))
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
    both = [gradients(loss, hidden, weight, bias) for loss in (ours, theirs)]
    torch.testing.assert_close(*both, rtol=1e-2, atol=1e-3) if device == "cuda" else torch.testing.assert_close(*both)
    with torch.no_grad():
        torch.testing.assert_close(function(hidden, weight, target, bias, **options), theirs, rtol=1e-3, atol=1e-4)


def test_linear_gives_only_the_gradients_that_are_wanted(chunked: None) -> None:
    (hidden, weight, bias), target = linear("cpu")
    expected = gradients(by_hand(hidden, weight, target, bias), hidden, weight, bias)
    for k in range(3):
        some = [t.detach().requires_grad_(i == k) for i, t in enumerate((hidden, weight, bias))]
        loss = cute_ops_torch.linear_cross_entropy(some[0], some[1], target, some[2])
        torch.testing.assert_close(gradients(loss, some[k])[0], expected[k])


def many_chunks(
    rows: int, hidden: int, classes: int, device: str
) -> tuple[list[torch.Tensor], torch.Tensor, list[Any]]:
    """A bfloat16 problem, and its gradients in float64."""
    torch.manual_seed(5)
    scales = ((rows, hidden), 1.0), ((classes, hidden), hidden**-0.5)
    leaves = [(scale * torch.randn(s, device=device)).bfloat16().requires_grad_() for s, scale in scales]
    target = torch.randint(classes, (rows,), device=device)
    wide = [t.detach().double().requires_grad_() for t in leaves]
    return leaves, target, list(torch.autograd.grad(F.cross_entropy(wide[0] @ wide[1].t(), target), wide))


def relative(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


@pytest.mark.slow
@pytest.mark.fault(
    "`linear_cross_entropy` takes its rows in 128 chunks, in bfloat16",
    "the weight's gradient is as accurate as with one chunk: it is summed in float32", "nothing",
)  # fmt: skip
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_chunks_cost_the_weights_gradient_no_digits(
    reduction: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (hidden, weight), target, exact = many_chunks(512, 32, 128, device)
    rows = hidden.shape[0]

    def error(count: int, **options: Any) -> tuple[float, torch.Tensor]:
        size = rows // count
        monkeypatch.setattr(chunks, "rows_per_chunk", lambda *sizes: size)
        each = None if reduction == "none" else size  # their backward chooses its own chunks
        monkeypatch.setattr(chunks, "rows_in_weight", lambda *sizes: 0)
        loss = cute_ops_torch.linear_cross_entropy(
            hidden, weight, target, reduction=reduction, chunk_rows=each, **options
        )
        (dweight,) = torch.autograd.grad(loss.mean(), weight)
        return relative(dweight, exact[1]), dweight

    one, whole = error(1)
    assert one < 4e-3
    for count in (4, 128):
        off, dweight = error(count)
        assert off < 1.1 * one
        # The tolerance: the error of one chunk, and one unit of the element.
        beyond = (whole.double() - exact[1]).abs().max()
        assert ((dweight.double() - exact[1]).abs() <= 2 * (2**-7 * exact[1].abs() + beyond)).all()
        assert error(count, accum_dtype=torch.float32)[0] == off
    assert error(128, accum_dtype=torch.bfloat16)[0] > 3 * one
    with pytest.raises(ValueError, match="`accum_dtype` is float64, expected float32 or the dtype of "):
        error(4, accum_dtype=torch.float64)


@pytest.mark.parametrize("classes", [67, 64])
def test_the_logits_of_two_heads_lie_where_the_weights_gradient_goes(
    classes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "rows_per_chunk", lambda *sizes: 100)
    (hidden, weight), target, _ = many_chunks(340, 320, classes, "cpu")
    teacher = [t.detach().flip(0) for t in (hidden, weight)]
    inputs = {"hidden": hidden, "weight": weight, "bias": None, "teacher_hidden": teacher[0]}
    made = Chunks(inputs, {"accum_dtype": "float32", "chunk_rows": 0}, ("dhidden", "dweight"))
    made.sums()
    assert [each.stop - each.start for each in made.slices] == [128, 128, 84]
    assert made.spare is not None and made.spare.data_ptr() == made.dweight.data_ptr()
    loss = cute_ops_torch.linear_distillation_loss(hidden, weight, *teacher, target, hard=0.5, beta=0.2)
    wide = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    q, p = ((a.double() @ b.double().t()).log_softmax(-1) for a, b in (wide, teacher))
    m = (0.2 * p.exp() + 0.8 * q.exp()).log()
    exact = (0.2 * p.exp() * (p - m) + 0.8 * q.exp() * (q - m)).sum(-1).mean() + 0.5 * F.nll_loss(q, target)
    torch.testing.assert_close(loss.double(), exact, rtol=2e-3, atol=0.0)
    wanted = gradients(exact, *wide)
    assert max(map(relative, gradients(loss, hidden, weight), wanted)) < 8e-3
    loss = cute_ops_torch.linear_distillation_loss(
        hidden, weight, *teacher, target, hard=0.5, beta=0.2, accum_dtype=torch.bfloat16
    )
    assert max(map(relative, gradients(loss, hidden, weight), wanted)) < 1.6e-2


@pytest.mark.parametrize(("rows", "hidden", "classes"), [(340, 128, 1000), (340, 100, 1003), (200, 128, 515)])
def test_halves_of_two_heads_rows_round_the_weights_gradient_twice(
    rows: int, hidden: int, classes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("TILE", 8), ("LEAST_ROWS", 16), ("MIN_BYTES", 0)):
        monkeypatch.setattr(chunks, name, value)
    used, sums = list[set[str]](), RowHalves.sums

    def spy(self: RowHalves) -> dict[str, torch.Tensor]:
        used.append({*self.wanted})
        return sums(self)

    monkeypatch.setattr(RowHalves, "sums", spy)
    leaves, target, _ = many_chunks(rows, hidden, classes, "cpu")
    bias, target[3] = torch.randn(classes).bfloat16().requires_grad_(), -100
    teacher = [t.detach().flip(0) for t in leaves]
    wide = [t.detach().double().requires_grad_() for t in (*leaves, bias)]
    q = (wide[0] @ wide[1].t() + wide[2]).log_softmax(-1)
    p = (teacher[0].double() @ teacher[1].double().t()).log_softmax(-1)
    m = (0.2 * p.exp() + 0.8 * q.exp()).log()
    apart = (0.2 * p.exp() * (p - m) + 0.8 * q.exp() * (q - m)).sum(-1)[target >= 0].mean()
    wanted = gradients(apart + 0.5 * F.nll_loss(q, target), *wide)
    for learns in (slice(None), slice(1, 2)):  # the hidden states' gradient is a place of logits, too
        options: dict[str, Any] = {"beta": 0.2, "hard": 0.5}
        given = [t if i in range(3)[learns] else t.detach() for i, t in enumerate((*leaves, bias))]
        loss = cute_ops_torch.linear_distillation_loss(*given[:2], *teacher, target, given[2], **options)
        found = gradients(loss, *given[learns])
        assert max(map(relative, found, wanted[learns])) < 6e-3
        options["accum_dtype"] = torch.float32
        loss = cute_ops_torch.linear_distillation_loss(*given[:2], *teacher, target, given[2], **options)
        once = gradients(loss, *given[learns])
        assert max(relative(a, e) / relative(b, e) for a, b, e in zip(found, once, wanted[learns], strict=True)) < 1.3
    assert used == [{"dhidden", "dweight", "dbias"}, {"dweight"}][: len(used)] and used


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("classes", [1000, 1003, 1281])
def test_blocks_of_classes_sum_nothing_of_the_weights_gradient(
    classes: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In place of chunks of rows, where that takes less memory; ignored and impossible targets among them."""
    for name, value in (("TILE", 8), ("MIN_BYTES", 0)):
        monkeypatch.setattr(chunks, name, value)
    widths, logits = list[int](), ClassBlocks.logits

    def spy(self: ClassBlocks, at: slice, head: str = "") -> torch.Tensor:
        widths.append(at.stop - at.start)
        return logits(self, at, head)

    monkeypatch.setattr(ClassBlocks, "logits", spy)
    leaves, target, _ = many_chunks(40, 16, classes, "cpu")
    leaves = [t.detach().to(dtype).requires_grad_() for t in (*leaves, torch.randn(classes))]
    target[3] = -100
    options: dict[str, Any] = {"reduction": "none", "label_smoothing": 0.1, "softcap": 3.0, "logit_scale": 0.5}
    wide = [t.detach().double().requires_grad_() for t in leaves]
    y = 3.0 * torch.tanh((wide[0] @ wide[1].t() + wide[2]) * (0.5 / 3.0))
    exact = F.cross_entropy(y, target, reduction="none", label_smoothing=0.1)
    exact = exact + 1e-2 * torch.where(target < 0, 0.0, y.logsumexp(-1) ** 2)
    loss = cute_ops_torch.linear_cross_entropy(leaves[0], leaves[1], target, leaves[2], z_loss=1e-2, **options)
    found, wanted = gradients(loss, *leaves), gradients(exact, *wide)
    assert sum(widths) == classes and len(widths) > 4
    assert max(map(relative, found, wanted)) < (4e-3 if dtype == torch.bfloat16 else 5e-4)
    target[5] = classes
    loss = cute_ops_torch.linear_cross_entropy(leaves[0], leaves[1], target, leaves[2], **options)
    dhidden = gradients(loss, leaves[0])[0]
    assert dhidden[5].isnan().all() and not dhidden[:5].isnan().any() and dhidden[3].eq(0).all()


def test_losses_name_what_is_on_another_device() -> None:
    hidden, weight, target = torch.randn(2, 3, 8), torch.randn(9, 8), torch.randint(9, (2, 3))
    with pytest.raises(ValueError, match="argument `target` is on meta, but `hidden` is on cpu"):
        cute_ops_torch.linear_distillation_loss(hidden, weight, hidden, weight, target.to("meta"))
    with pytest.raises(ValueError, match="argument `advantages` is on meta, but `hidden` is on cpu"):
        cute_ops_torch.linear_policy_loss(hidden, weight, target, torch.empty(2, device="meta"))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_one_row_without_dims_is_weighed_without_reading_it(smoothing: float) -> None:
    """An index without dims is one that PyTorch reads on the host, which fake tensors refuse and a GPU waits for."""
    arguments = torch.randn(8), torch.randn(9, 8), torch.tensor(5), torch.rand(9)

    def losses(
        hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, by_class: torch.Tensor
    ) -> torch.Tensor:
        found = cute_ops_torch.linear_cross_entropy_metrics(
            hidden, weight, target, class_weight=by_class, label_smoothing=smoothing, reduction="mean"
        )
        return torch.stack([found[0], *(each.reshape(()).float() for each in found[1:])])

    row = losses(arguments[0][None], arguments[1], arguments[2][None], arguments[3])
    assert torch.equal(losses(*arguments), row)
    assert losses(*(each.to("meta") for each in arguments)).shape == row.shape


def test_logits_lie_where_the_weights_gradient_goes() -> None:
    """While it is summed in float32: chunks of at most as many rows as the weight has columns fit there."""
    sizes = (1024, 128), (2100, 2048), (64, 2048), (1000, 64), (0, 128)
    assert [chunks.rows_in_weight(*each) for each in sizes] == [128, 1152, 64, 0, 0]
    hidden, weight = (torch.empty(n, 2048, dtype=torch.bfloat16, device="meta") for n in (16384, 128256))

    def made(rows: int, accum_dtype: str) -> Chunks:
        inputs = {"hidden": hidden[:rows], "weight": weight, "bias": None}
        attrs = {"accum_dtype": accum_dtype, "chunk_rows": 0}
        found = Chunks(inputs, attrs, ("dhidden", "dweight"), share=True)
        found.sums()
        return found

    found = made(16384, "float32")
    assert (len(found.slices), found.sums_apart) == (8, True)
    assert found.spare is not None and found.spare.numel() == weight.numel()
    found = made(16384, "bfloat16")
    assert 16 < len(found.slices) <= chunks.MAX_CHUNKS and not found.sums_apart
    assert found.spare is not None and hidden.numel() < found.spare.numel() < 3 * hidden.numel()
    for rows in (2048, 4096):  # one chunk needs no sum, in whose memory its logits would fit
        found = made(rows, "float32")
        assert len(found.slices) == 1 and not found.sums_apart
    # Memory that layers leave is of use only where it holds more rows than the gradient's does.
    for saved, rows, held in ((4096, 1500, None), (4096, 6000, None), (16384, 4096, None), (16384, 6000, 2944)):
        assert rows_in_saved(rows * len(weight), hidden[:saved], weight.requires_grad_()) == held


@pytest.mark.parametrize("width", [16, 15])
def test_chunks_of_logits_by_our_kernel(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the memory of all chunks, also in calls that repeat what the first noted. Torch takes rows off a vector."""

    def fill(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
        shapes.append(out.shape)
        out.copy_(x @ weight.t())

    def found(chunk_rows: int | None = 8) -> list[torch.Tensor]:
        loss = cute_ops_torch.linear_cross_entropy(hidden, weight, target, chunk_rows=chunk_rows)
        return [loss.detach(), *torch.autograd.grad(loss, (hidden, weight))]

    torch.manual_seed(0)
    shapes: list[torch.Size] = []
    hidden, weight = (torch.randn(n, width, dtype=torch.bfloat16, requires_grad=True) for n in (20, 64))
    target = torch.randint(64, (20,))
    expected = found(None)
    monkeypatch.setattr(row_chunks, "_of_kernels", lambda call, like: call)
    monkeypatch.setitem(program.planned, linear_op, lambda tensors, attrs: SimpleNamespace(fill=lambda names: fill))
    for _ in range(3):
        torch.testing.assert_close(found(), expected, rtol=2e-2, atol=1e-3)
    assert shapes == 3 * ([(8, 64), (8, 64), (4, 64)] if width == 16 else [])


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_linear_is_differentiated_once_and_as_often_as_one_likes(reduction: str) -> None:
    (hidden, weight, bias), target = linear("cpu")
    for function in (cute_ops_torch.linear_cross_entropy, torch.ops.cute.linear_cross_entropy):
        loss = function(hidden, weight, target, bias, reduction=reduction).sum()
        first, again = (torch.autograd.grad(3 * loss, hidden, retain_graph=True)[0] for _ in range(2))
        torch.testing.assert_close(first, again, rtol=0, atol=0)
        (dhidden,) = torch.autograd.grad(3 * loss, hidden, create_graph=True)
        torch.testing.assert_close(dhidden, first, rtol=0, atol=0)
        raises = partial(pytest.raises, NotImplementedError, match=r"cute\.linear_cross_entropy: .* no double backward")
        for unused in (False, True):  # not None, as of what does not depend on it
            with raises():
                torch.autograd.grad(dhidden.square().sum(), weight, allow_unused=unused, retain_graph=True)
        with raises():
            dhidden.square().sum().backward()
        inner = hidden.mT.contiguous().mT * 2  # not a leaf, and what it is computed from is not differentiated
        loss = function(inner, weight, target, bias, reduction=reduction).sum()
        (dinner,) = torch.autograd.grad(loss, inner, create_graph=True)
        with raises():
            torch.autograd.grad((dinner * inner).sum(), inner)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_linear_pulls_back_after_its_transform_has_ended(reduction: str) -> None:
    """What ``torch.func.vjp`` returns is called with tensors that have no memory of their own."""
    (hidden, weight, bias), target = linear("cpu")
    loss = partial(cute_ops_torch.linear_cross_entropy, target=target, reduction=reduction)
    plain = [t.detach() for t in (hidden, weight, bias)]
    value, pull = torch.func.vjp(lambda h, w, b: loss(h, w, bias=b), *plain)
    cotangent = torch.full_like(value, 2.0)
    expected = torch.autograd.grad(loss(hidden, weight, bias=bias), (hidden, weight, bias), cotangent)
    for _ in range(2):
        torch.testing.assert_close(pull(cotangent), expected)


@pytest.mark.slow
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_linear_with_the_weight_of_a_transposed_layer(reduction: str) -> None:
    """The gradient has the strides of the weight, also compiled."""
    hidden, kernel = torch.randn(8, 16, requires_grad=True), torch.randn(16, 32, requires_grad=True)
    target = torch.randint(32, (8,))

    def model(hidden: torch.Tensor, kernel: torch.Tensor) -> torch.Tensor:
        return cute_ops_torch.linear_cross_entropy(hidden, kernel.t(), target, reduction=reduction)

    torch._dynamo.reset()
    expected = gradients(model(hidden, kernel), hidden, kernel)
    torch.testing.assert_close(gradients(torch.compile(model)(hidden, kernel), hidden, kernel), expected)
    weight = kernel.detach().t().contiguous().requires_grad_()
    by_rows = gradients(cute_ops_torch.linear_cross_entropy(hidden, weight, target, reduction=reduction), weight)
    torch.testing.assert_close(by_rows[0].t(), expected[1])


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_linear_makes_no_zeros_of_the_gradients_size(reduction: str) -> None:
    (hidden, weight, bias), target = linear("cpu")
    loss = torch.ops.cute.linear_cross_entropy(hidden, weight, target, bias, reduction=reduction)
    with torch.profiler.profile(record_shapes=True) as profile:
        gradients(loss, hidden, weight, bias)
    zeros = [event.input_shapes for event in profile.events() if event.name == "aten::zero_"]
    assert not [shapes for shapes in zeros if shapes[0] in ([3, 5, 16], [67, 16])]


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.slow
def test_linear_in_transforms(reduction: str) -> None:
    (hidden, weight, bias), target = linear("cpu")
    hidden, weight, bias = (t.detach() for t in (hidden, weight, bias))

    def loss(function: Callable[..., Any], *inputs: torch.Tensor) -> torch.Tensor:
        found = function(inputs[0], inputs[1], target, *inputs[2:], label_smoothing=0.1, reduction=reduction)
        return (found * torch.arange(1, 1 + found.numel()).view(found.shape)).sum().square()

    ours, theirs = (partial(loss, f) for f in (cute_ops_torch.linear_cross_entropy, by_hand))
    for inputs in ((hidden, weight, bias), (hidden, weight)):
        for argnums in (0, 1, (0, 1), tuple(range(len(inputs)))):
            for transform in (torch.func.grad, torch.func.jacrev):
                got, expected = (transform(f, argnums=argnums)(*inputs) for f in (ours, theirs))
                torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    several = torch.stack([hidden, -hidden, 2 * hidden]), torch.stack([weight, weight + 1, -weight])
    for in_dims in ((0, None), (None, 0), (0, 0)):
        examples = tuple(s if d == 0 else s[0] for s, d in zip(several, in_dims, strict=True))
        got, expected = (torch.vmap(torch.func.grad(f, (0, 1)), in_dims)(*examples) for f in (ours, theirs))
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(*(torch.vmap(f, in_dims)(*examples) for f in (ours, theirs)), rtol=1e-4, atol=1e-4)
    outside = weight.clone().requires_grad_()  # autograd around a transform
    value = torch.func.vjp(lambda h: ours(h, outside), hidden)[0]
    expected = torch.autograd.grad(theirs(hidden, outside), outside)[0]
    torch.testing.assert_close(torch.autograd.grad(value, outside)[0], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_linear_says_what_transforms_it_does_not_take(reduction: str) -> None:
    hidden, weight, target = torch.randn(5, 4), torch.randn(7, 4), torch.randint(7, (5,))

    def loss(hidden: torch.Tensor, weight: torch.Tensor = weight) -> torch.Tensor:
        return cute_ops_torch.linear_cross_entropy(hidden, weight, target, reduction=reduction).sum()

    with pytest.raises(NotImplementedError, match=r"^cute\.linear_cross_entropy: forward-mode AD \(jvp\) is not supp"):
        torch.func.jvp(loss, (hidden,), (hidden,))
    for of in (0, 1):  # the second derivative of either
        with pytest.raises(NotImplementedError, match=r"^cute\.linear_cross_entropy: .* no double backward"):
            torch.func.grad(lambda h, w: torch.func.grad(loss)(h, w).sum(), of)(hidden, weight)


def test_linear_errors() -> None:
    hidden, weight, target = torch.randn(2, 3, 16), torch.randn(5, 16), torch.zeros(2, 3, dtype=torch.long)
    call = cute_ops_torch.linear_cross_entropy
    with pytest.raises(
        TypeError, match=r"^cute\.linear_cross_entropy: argument `weight` has dtype bfloat16, but T=float32 from `hi"
    ):
        call(hidden, weight.bfloat16(), target)
    with pytest.raises(ValueError, match=r"argument `weight` has h=8, but h=16"):
        call(hidden, weight[:, :8], target)
    with pytest.raises(ValueError, match=r"argument `target` has leading dims \(2,\), but \*m=\(2, 3\)"):
        call(hidden, weight, target[:, 0])
    with pytest.raises(ValueError, match="option `reduction` is 'max'"):
        call(hidden, weight, target, reduction="max")


@pytest.mark.gpu
@pytest.mark.parametrize("accum_dtype", [None, torch.bfloat16], ids=str)
def test_linear_never_holds_all_logits(accum_dtype: torch.dtype | None) -> None:
    """Beyond the gradients there are logits of a few rows, or the weight's gradient in float32."""
    hidden = torch.randn(8192, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = (torch.randn(64000, 512, device="cuda") / 23).bfloat16().requires_grad_()
    target = torch.randint(64000, (8192,), device="cuda")
    assert hidden[:1] @ weight[:1].T is not None  # cuBLAS takes its workspace
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    cute_ops_torch.linear_cross_entropy(hidden, weight, target, accum_dtype=accum_dtype).backward()
    logits = 8192 * 64000 * 2
    beyond = 2 * weight.nbytes + (8 << 20) if accum_dtype is None else logits / 16 + (64 << 20)
    assert torch.cuda.max_memory_allocated() - before < weight.nbytes + hidden.nbytes + beyond


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("n", "dtype"), [(1003, torch.bfloat16), (1001, torch.float32), (1000, torch.float16)])
def test_rows_of_logits_are_aligned(n: int, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the number of classes; loss and gradients are those of rows without a gap."""
    rows = 300
    leaves = [torch.randn(*size, device=device, dtype=dtype).mul_(0.1) for size in ((rows, 64), (n, 64), (n,))]
    target, seen, found = torch.randint(n, (rows,), device=device), set[tuple[int, int]](), []
    logits = Chunks.logits

    def noted(self: Any, at: slice) -> torch.Tensor:
        made = logits(self, at)
        seen.add((made.stride(0) * made.itemsize % 16, made.data_ptr() % 16, self.whole * made.itemsize % 16))
        return made

    monkeypatch.setattr(Chunks, "logits", noted)
    for aligned in (True, False):
        if not aligned:
            assert seen == {(0, 0, 0)}
            monkeypatch.setattr(row_chunks, "_ALIGNMENT", 1)
        given = [t.clone().requires_grad_() for t in leaves]
        # Without a guard of the call before, whose program is written down.
        loss = cute_ops_torch.linear_cross_entropy(*given[:2], target, given[2], chunk_rows=110 + aligned)
        loss.backward()
        found.append([loss, *(t.grad for t in given)])
    for got, want in zip(*found, strict=True):
        scale = float(want.detach().abs().max())
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2 * scale)


@pytest.mark.slow
def test_chunks_are_whole_tiles_and_few() -> None:
    assert chunks.rows_per_chunk(16384, 2048, 128256, 2) % 128 == 0
    for rows, hidden, vocab in ((16384, 2048, 128256), (1 << 20, 64, 262144), (4096, 4096, 32000), (1, 8, 3)):
        larger = chunks.rows_per_chunk(rows, hidden, vocab, 2, chunks.ENOUGH)
        size = chunks.rows_per_chunk(rows, hidden, vocab, 2)
        assert size <= larger <= max(size, min(chunks.ENOUGH, 4 * hidden))
        assert 1 <= size <= rows
        assert -(-rows // size) <= chunks.MAX_CHUNKS
        room, slices = chunks.plan_shared(rows, hidden, vocab, 2, least=rows == 4096)
        assert [s.start for s in slices] + [rows] == [0] + [s.stop for s in slices]
        assert len(slices) <= chunks.MAX_CHUNKS
        for s in slices:  # the logits lie behind the gradients that their chunk completes
            start = (room - (s.stop - s.start) * vocab) // chunks.TILE * chunks.TILE
            assert s.stop * hidden <= start and start + (s.stop - s.start) * vocab <= room


@pytest.mark.gpu
@pytest.mark.parametrize("n", [32000, 50257, 262144])
def test_a_row_has_the_same_bits_in_any_company(n: int) -> None:
    """Clusters read few long rows, single CTAs many."""
    x = torch.randn(600, n, device="cuda", dtype=torch.bfloat16)
    target = torch.randint(n, (600,), device="cuda")
    for attrs in ((-100, 0.0, 0.0), (-100, 0.1, 1e-3)):
        many = torch.ops.cute.cross_entropy(x, target, *attrs)
        few = torch.ops.cute.cross_entropy(x[:5], target[:5], *attrs)
        assert all(torch.equal(a[:5], b) for a, b in zip(many, few, strict=True))
    assert torch.equal(torch.ops.cute.sum(x)[:5], torch.ops.cute.sum(x[:5]))
