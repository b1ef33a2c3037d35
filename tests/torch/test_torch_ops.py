"""The registered ops on the CPU: values, fakes, opcheck, layouts, empty problems."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

import cute_ops_torch
from cute_ops import FLOATS, Case, Op, Tensor, testing
from cute_ops.calls import lookup
from cute_ops.ops import OPS
from cute_ops_torch.library import schema
from cute_ops_torch.tools import runner, stubs


@pytest.mark.feature("eager, against float64")
def test_values_against_float64(problem: Any) -> None:
    problem.check(problem.raw(*problem.tensors(), **problem.attrs))


def test_values_of_narrowed_ops(narrowed: Any) -> None:
    narrowed.check(narrowed.raw(*narrowed.tensors(), **narrowed.attrs))


_checked: set[Any] = set()


@pytest.mark.drawn(0.3)
@pytest.mark.feature("opcheck")
def test_opcheck(turn: Any) -> None:
    """All of it for every set of present inputs; schema and fake for every other rank, size and attribute."""
    tensors = turn.tensors()
    if turn.op.grad:
        tensors = [t if t is None else t.requires_grad_(t.is_floating_point()) for t in tensors]
    look = (turn.op.name, *(t is not None for t in tensors))
    # AOTAutograd, which takes most of the time, sees symbols for sizes.
    some = {"test_utils": ("test_schema", "test_faketensor")} if look in _checked else {}
    torch.library.opcheck(turn.overload, tuple(tensors), turn.attrs, **some)
    _checked.add(look)


@pytest.mark.drawn(0.4)
@pytest.mark.feature("FakeTensorMode")
def test_fake_tells_shape_dtype_and_strides(turn: Any) -> None:
    from torch._subclasses import FakeTensorMode

    real = turn.raw(*turn.tensors(), **turn.attrs)
    with FakeTensorMode() as mode:
        fakes = [t if t is None else mode.from_tensor(t) for t in turn.tensors()]
        fake = turn.raw(*fakes, **turn.attrs)
    as_tuple = lambda v: v if isinstance(v, tuple) else (v,)  # noqa: E731
    for r, f in zip(as_tuple(real), as_tuple(fake), strict=True):
        assert (r.shape, r.dtype, r.stride()) == (f.shape, f.dtype, f.stride())


def test_function_is_the_raw_op(op: Op, make_inputs: Callable[..., Any]) -> None:
    tensors, function = make_inputs(op), testing.plain(op, getattr(cute_ops_torch, op.name))
    out, raw = function(*tensors), getattr(torch.ops.cute, op.name)(*tensors)
    torch.testing.assert_close(out if isinstance(out, tuple) else (out,), testing.shown(op, raw), rtol=0, atol=0)
    assert getattr(cute_ops_torch, op.name).__doc__ == op.doc
    signature = inspect.signature(getattr(cute_ops_torch, op.name))
    assert list(signature.parameters) == [*op.inputs, *op.attrs, *op.options, *(["out"] if not op.finish else [])]
    by_name = dict(zip(op.inputs, tensors, strict=True))
    torch.testing.assert_close(function(**by_name, **op.attrs), function(*tensors), rtol=0, atol=0)


@pytest.mark.parametrize("name", ["embedding", "linear_cross_entropy"])
def test_compositions_are_documented(name: str) -> None:
    function = getattr(cute_ops_torch, name)
    headline, *parts = function.__doc__.split("\n\n")
    assert headline.endswith(".") and {part.split("\n")[0] for part in parts} >= {"Args:", "Returns:", "Raises:"}
    for parameter in inspect.signature(function).parameters:
        assert f"\n    {parameter}: " in function.__doc__


def test_schema_text() -> None:
    texts = {op.name: schema.schema(op) for op in OPS}
    assert texts["rmsnorm"] == (
        "rmsnorm(Tensor x, Tensor? weight=None, Tensor? bias=None, float eps=1e-06, float weight_offset=0.0) -> Tensor"
    )
    assert texts["silu_mul"] == "silu_mul(Tensor gate, Tensor up) -> Tensor"


def test_stub_files_are_up_to_date() -> None:
    for path, content in stubs.files().items():
        assert path.read_text() == content, "run python -m cute_ops_torch.tools.stubs"


@pytest.mark.feature("zero rows, and their gradients")
@pytest.mark.parametrize("rows", [(0,), (2, 0, 3)])
def test_zero_rows(op: Op, make_inputs: Callable[..., Any], rows: tuple[int, ...]) -> None:
    by_name = dict(zip(op.inputs, make_inputs(op, rows), strict=True))
    tensors = [by_name[name].requires_grad_() for name in op.differentiable]
    out = getattr(torch.ops.cute, op.name)(*by_name.values())
    outs = testing.shown(op, out)
    assert [o.shape for o in outs] == [op.outputs[n].of(op.example(rows, 64)) for n in op.shown]
    outs = [o for o in outs if o.is_floating_point()]
    grads = torch.autograd.grad(outs, tensors, [torch.ones_like(o) for o in outs])
    for t, g in zip(tensors, grads, strict=True):
        assert g.shape == t.shape
        assert not g.any()


def test_strided_rows(op: Op, make_inputs: Callable[..., Any]) -> None:
    tensors = make_inputs(op, (4, 6))
    wide = [
        t if not d.rows else t.T.contiguous().T if not d.dims
        else torch.cat([t.transpose(0, 1)] * 3, -1)[..., t.shape[-1] : 2 * t.shape[-1]].transpose(0, 1)
        for t, d in zip(tensors, op.inputs.values(), strict=True)
    ]  # fmt: skip
    raw = getattr(torch.ops.cute, op.name)
    torch.testing.assert_close(raw(*wide), raw(*tensors))
    outs = raw(*wide)
    assert all(o.is_contiguous() for o in (outs if isinstance(outs, tuple) else (outs,)))


@pytest.mark.feature("meta device")
def test_meta_device(any_op: Op, make_inputs: Callable[..., Any]) -> None:
    out = runner.functional(any_op)(*make_inputs(any_op, device="meta"))
    outs = out if isinstance(out, tuple) else (out,)
    assert all(o.device.type == "meta" for o in outs)
    assert [o.shape for o in outs] == [t.of(any_op.example((3, 5), 64)) for t in any_op.results.values()]


@pytest.mark.feature("autocast")
def test_autocast_leaves_dtypes_alone(any_op: Op, make_inputs: Callable[..., Any]) -> None:
    raw, tensors = runner.functional(any_op), make_inputs(any_op)
    with torch.autocast("cpu", torch.bfloat16):
        out = raw(*tensors)
    torch.testing.assert_close(out, raw(*tensors), rtol=0, atol=0)


@pytest.mark.feature("deterministic algorithms")
def test_deterministic_algorithms(any_op: Op, make_inputs: Callable[..., Any]) -> None:
    """Nothing refuses to run, nothing depends on memory that torch then fills with NaN."""
    raw, tensors = runner.functional(any_op), make_inputs(any_op)
    expected = raw(*tensors)
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.utils.deterministic.fill_uninitialized_memory
        torch.testing.assert_close(raw(*tensors), expected, rtol=0, atol=0)
        if any_op.grad:
            leaves = [
                t.requires_grad_() for n, t in zip(any_op.inputs, tensors, strict=True) if n in any_op.differentiable
            ]
            outs = [o for o in testing.shown(any_op, raw(*tensors)) if o.is_floating_point()]
            both = [
                torch.autograd.grad(outs, leaves, list(map(torch.ones_like, outs)), retain_graph=True) for _ in "ab"
            ]
            torch.testing.assert_close(*both, rtol=0, atol=0)
    finally:
        torch.use_deterministic_algorithms(False)


def double_reference(xp: Any, x: Any, scale: Any = None, *, factor: int, flip: bool) -> tuple[Any, Any]:
    out = x * (-factor if flip else factor)
    return out, None if scale is None else xp.astype(x * scale, xp.float32)


def test_registering_ones_own_op() -> None:
    own = Op(
        "double",
        inputs={"x": Tensor("*m n", "T"), "scale": Tensor("n", "T", optional=True)},
        outputs={"out": Tensor("*m n", "T"), "scaled": Tensor("*m n", "float32", given="scale")},
        dtypes={"T": FLOATS},
        attrs={"factor": 2, "flip": False},
        reference=double_reference,
        kernel="nowhere:Double",
    )
    function = cute_ops_torch.register(own, namespace="cute_test")
    assert cute_ops_torch.register(own, namespace="cute_test") is function
    x = torch.randn(3, 4)
    out, scaled = function(x, flip=True)
    assert scaled is None
    torch.testing.assert_close(out, -2 * x)
    torch.testing.assert_close(function(x, x[0])[1], x * x[0])
    assert torch.ops.cute_test.double(x)[1].shape == (0,)
    torch.library.opcheck(torch.ops.cute_test.double.default, (x,), {"factor": 3})
    twin = Op("double", inputs=own.inputs, outputs=own.outputs, dtypes=own.dtypes, attrs=own.attrs, kernel="no:Double",
              reference=lambda xp, x, *scale, **attrs: double_reference(xp, -x, *scale, **attrs))  # fmt: skip
    with pytest.raises(ValueError, match=r"torch\.ops\.cute_test\.double is registered already") as refused:
        cute_ops_torch.register(twin, namespace="cute_test")
    assert str(refused.value).endswith("another name, or namespace: register(double, 'cute_test_2')")
    changed = cute_ops_torch.register(twin, namespace="cute_test_2")
    for run in (changed, torch.compile(lambda x: changed(x), fullgraph=True, backend="aot_eager")):
        torch.testing.assert_close(run(x)[0], -2 * x)


def test_a_reference_that_returns_its_input_gives_a_copy() -> None:
    same = Op("same", inputs={"x": Tensor("*m n", "T")}, outputs={"out": Tensor("*m n", "T")}, dtypes={"T": FLOATS},
              reference=lambda xp, x: x, kernel="nowhere:Same")  # fmt: skip
    x = torch.randn(2, 3)
    out = cute_ops_torch.register(same, namespace="cute_test")(x)
    assert out.data_ptr() != x.data_ptr()
    assert torch.equal(out, x)


@pytest.mark.parametrize(
    ("reference", "returned"),
    [
        (lambda xp, x: xp.sum(x, axis=-1), "float32[2] for `out`, declared is float32[2, 3]."),
        (lambda xp, x: xp.astype(x, xp.float64), "float64[2, 3] for `out`, declared is float32[2, 3]."),
        (lambda xp, x: None, "nothing for `out`, declared is float32[2, 3]."),
        (lambda xp, x: [x], "a list for `out`, declared is float32[2, 3]."),
        (lambda xp, x: (x, x), "2 outputs, declared are 1."),
        (lambda xp, x: (), "0 outputs, declared are 1."),
    ],
    ids=["shape", "dtype", "nothing", "list", "more", "fewer"],
)
def test_a_reference_that_breaks_its_declaration_is_named(
    reference: Callable[..., Any], returned: str, request: pytest.FixtureRequest
) -> None:
    name = f"broken_{request.node.callspec.id}"
    broken = Op(name, inputs={"x": Tensor("*m n", "T")}, outputs={"out": Tensor("*m n", "T")}, dtypes={"T": FLOATS},
                reference=reference, kernel="nowhere:Broken")  # fmt: skip
    with pytest.raises(TypeError) as caught:
        cute_ops_torch.register(broken, namespace="cute_test")(torch.randn(2, 3))
    assert str(caught.value) == f"cute.{name}: its reference returned {returned}"


def test_verify_takes_a_case_without_rows() -> None:
    op = lookup.find("rmsnorm")
    arrays = testing.inputs(op, Case("none", {"m": (0,), "n": 8}), "bfloat16")
    testing.check(op, arrays, op.attrs, runner.run(op, arrays, op.attrs))


def test_only_an_allocator_that_caches_must_hand_out_poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    op = lookup.find("softmax")
    arrays = testing.inputs(op, Case("some", {"m": (2,), "n": 8}), "float32")
    tensors = list(runner.on_device(arrays).values())
    assert runner.not_checked() == ""
    monkeypatch.setattr(runner, "device", lambda: "cuda")
    monkeypatch.setattr(runner, "_poison", lambda op, tensors, attrs: {1})  # an address where no output lies
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    monkeypatch.delenv("PYTORCH_NO_CUDA_MEMORY_CACHING", raising=False)
    assert runner.not_checked() == ""
    with pytest.raises(AssertionError, match="no output lies where memory was poisoned"):
        runner._call(op, tensors, op.attrs)
    monkeypatch.setenv("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")
    (out,) = runner._call(op, tensors, op.attrs)
    testing.check(op, arrays, op.attrs, (out.numpy(),))
    assert runner.not_checked() == (
        "elements that a kernel does not write may go unseen, because PYTORCH_NO_CUDA_MEMORY_CACHING is set: memory is "
        "not filled with NaN"
    )
    monkeypatch.delenv("PYTORCH_NO_CUDA_MEMORY_CACHING")
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync")
    runner._call(op, tensors, op.attrs)
    assert "because PyTorch's allocator is cudaMallocAsync" in runner.not_checked()


@pytest.mark.parametrize("options", [{}, {"sections": (1, 3)}, {"frequencies": torch.ones(4).double()}], ids=str)
def test_positions_are_where_x_is(options: dict[str, Any]) -> None:
    """Under a default device, too, on which torch puts what is made without one."""
    x, positions = torch.randn(2, 5, 3, 8), torch.arange(5.0).double()
    at = positions.expand(2, 5) if "sections" in options else positions
    want = cute_ops_torch.rope_from_positions(x, at, **options)
    with torch.device("meta"):
        found = cute_ops_torch.rope_from_positions(x, at, **options)
    assert torch.equal(found, want)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_mean_loss_under_another_default_dtype(dtype: torch.dtype) -> None:
    hidden, weight, target = torch.randn(600, 8, requires_grad=True), torch.randn(16, 8), torch.randint(16, (600,))
    (want,) = torch.autograd.grad(cute_ops_torch.linear_cross_entropy(hidden, weight, target), hidden)
    torch.set_default_dtype(dtype)
    try:
        (found,) = torch.autograd.grad(cute_ops_torch.linear_cross_entropy(hidden, weight, target), hidden)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(found, want)
