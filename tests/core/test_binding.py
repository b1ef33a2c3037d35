"""Binding: dims, dtypes, outputs, and the exact text of every error."""

from __future__ import annotations

import pytest

from cute_ops import FLOATS, Array, OneOf, Op, Tensor
from cute_ops.composite.models import MODELS
from cute_ops.declaration.binding import bind
from cute_ops.ops import ATTENTION, OPS, PRODUCTS, add_rmsnorm, cross_entropy, gelu, rmsnorm, silu_mul, swiglu
from cute_ops.ops.embedding.sorted_embedding_bwd import sorted_embedding_bwd

X = Array((3, 5, 64), "float32")
W = Array((64,), "float32")


def test_binds_dims_dtypes_and_outputs() -> None:
    bound = bind(rmsnorm, {"x": Array((3, 5, 64), "bfloat16"), "weight": W}, {"eps": 1e-5})
    assert bound.dims == {"m": (3, 5), "n": 64}
    assert bound.dtypes == {"T": "bfloat16", "W": "float32"}
    assert bound.outputs == {"out": Array((3, 5, 64), "bfloat16")}
    assert bound.attrs == {"eps": 1e-5, "weight_offset": 0.0}
    assert bound.rows == 15


def test_derived_dims() -> None:
    quantize = next(op for op in OPS if op.name == "quantize_fp8")
    for block, blocks in ((0, 1), (128, 3)):
        bound = bind(quantize, {"x": Array((2, 5, 300), "bfloat16")}, {"block": block})
        assert bound.outputs == {"out": Array((2, 5, 300), "float8_e4m3fn"), "scale": Array((2, 5, blocks), "float32")}


def test_no_leading_dims_is_one_row() -> None:
    bound = bind(rmsnorm, {"x": Array((64,), "float32")})
    assert bound.dims == {"m": (), "n": 64} and bound.rows == 1


def test_absent_outputs() -> None:
    backward = rmsnorm.grad
    assert backward is not None
    bound = bind(backward, {"x": X, "dout": X, "weight": W})
    assert bound.outputs["dweight"] == W and bound.outputs["dbias"] is None


@pytest.mark.parametrize(("dtype", "present"), [("bfloat16", True), ("float32", False)])
def test_shared_output_is_written_once(dtype: str, present: bool) -> None:
    backward = add_rmsnorm.grad
    assert backward is not None
    bound = bind(backward, {"residual_out": X, "dout": Array(X.shape, dtype)})
    assert (bound.outputs["dx"] is not None) is present
    assert bound.outputs["dresidual"] == X


@pytest.mark.parametrize("shape", [(0, 64), (3, 0, 64)])
def test_zero_rows_are_empty(shape: tuple[int, ...]) -> None:
    assert bind(rmsnorm, {"x": Array(shape, "float32")}).empty


def test_an_empty_input_is_empty_whatever_the_outputs_are() -> None:
    tokens = {"ends": Array((5,), "int32"), "classes": Array((0,), "int32"), "order": Array((0,), "int32")}
    bound = bind(sorted_embedding_bwd, {**tokens, "dout": Array((0, 64), "float32")})
    assert bound.outputs["dweight"] == Array((5, 64), "float32") and bound.empty
    assert not bind(rmsnorm, {"x": X}).empty


ERRORS = {
    "shape": (
        {"x": X, "weight": Array((32,), "float32")},
        {},
        ValueError,
        """\
cute.rmsnorm: argument `weight` has n=32, but n=64.
  x:      float32[3, 5, 64]   declared T[*m n]
  weight: float32[32]         declared W[n]
  bound so far: *m=(3, 5), n=64, T=float32, W=float32""",
    ),
    "integer": (
        {"x": Array((3, 64), "int32")},
        {},
        TypeError,
        """\
cute.rmsnorm: argument `x` has dtype int32, expected float32, float16 or bfloat16.
  x: int32[3, 64]   declared T[*m n]""",
    ),
    "rank": (
        {"x": X, "weight": Array((1, 64), "float32")},
        {},
        ValueError,
        """\
cute.rmsnorm: argument `weight` has 2 dims, expected 1: W[n].
  x:      float32[3, 5, 64]   declared T[*m n]
  weight: float32[1, 64]      declared W[n]
  bound so far: *m=(3, 5), n=64, T=float32, W=float32""",
    ),
    "scalar": (
        {"x": Array((), "float32")},
        {},
        ValueError,
        """\
cute.rmsnorm: argument `x` has 0 dims, expected at least 1: T[*m n].
  x: float32[]   declared T[*m n]
  bound so far: T=float32""",
    ),
    "missing": (
        {"weight": W},
        {},
        TypeError,
        """\
cute.rmsnorm: argument `x` is required, but None was given.
  weight: float32[64]   declared W[n]""",
    ),
    "unknown": (
        {"x": X, "scale": W},
        {},
        TypeError,
        """\
cute.rmsnorm: unknown argument `scale`; it takes `x`, `weight`, `bias`.
  x: float32[3, 5, 64]   declared T[*m n]""",
    ),
    "attribute": (
        {"x": X},
        {"eps": "1e-6"},
        TypeError,
        """\
cute.rmsnorm: attribute `eps` must be float, got '1e-6'.
  x: float32[3, 5, 64]   declared T[*m n]
  bound so far: *m=(3, 5), n=64, T=float32""",
    ),
    "boolean attribute": (
        {"x": X},
        {"eps": True},
        TypeError,
        """\
cute.rmsnorm: attribute `eps` must be float, got True.
  x: float32[3, 5, 64]   declared T[*m n]
  bound so far: *m=(3, 5), n=64, T=float32""",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_error_text(name: str) -> None:
    inputs, attrs, kind, text = ERRORS[name]
    with pytest.raises(kind) as caught:
        bind(rmsnorm, inputs, attrs)  # type: ignore[arg-type]
    assert str(caught.value) == text


def table_op(**changes: object) -> Op:
    """A table of values per position, shared by or given per batch."""
    fields: dict = {
        "inputs": {"table": Tensor("*#m r", "T"), "x": Tensor("*m h 2r", "T")}, "dtypes": {"T": FLOATS},
        "outputs": {"out": Tensor("*m h r", "T")}, "reference": lambda xp, table, x: x, "kernel": "a:B",
        "static": ("h", "r"),
    }  # fmt: skip
    return Op("table", **{**fields, **changes})


def test_an_attribute_takes_one_of_its_values() -> None:
    assert bind(gelu, {"x": X}).attrs == {"approximate": "tanh"}
    assert bind(gelu, {"x": X}, {"approximate": "none"}).attrs == {"approximate": "none"}
    with pytest.raises(ValueError, match=r"^cute.gelu: attribute `approximate` must be 'tanh' or 'none', got 'erf'\."):
        bind(gelu, {"x": X}, {"approximate": "erf"})
    with pytest.raises(ValueError, match=r"must be 'tanh' or 'none', got 'tahn' \(did you mean tanh\?\)\."):
        bind(gelu, {"x": X}, {"approximate": "tahn"})
    with pytest.raises(TypeError, match=r"attribute `approximate` must be str, got True\."):
        bind(gelu, {"x": X}, {"approximate": True})
    with pytest.raises(ValueError, match="all of one type"):
        OneOf("tanh", 1)


def test_an_attribute_names_the_dtype_of_an_output() -> None:
    op = table_op(attrs={"to": OneOf("bfloat16", "float32")}, outputs={"out": Tensor("*m h r", "to")})
    given = {"table": Array((4,), "float16"), "x": Array((3, 2, 8), "float16")}
    assert [bind(op, given, attrs).outputs["out"].dtype for attrs in ({}, {"to": "float32"})] == ["bfloat16", "float32"]  # type: ignore[union-attr]
    assert op.dtype_choices(op.outputs["out"]) == ("bfloat16", "float32")
    with pytest.raises(ValueError, match="attribute `to` must be 'bfloat16' or 'float32', got 'float16'"):
        bind(op, given, {"to": "float16"})


def test_multiples_of_a_dim() -> None:
    bound = bind(swiglu, {"x": X})
    assert bound.dims == {"m": (3, 5), "n": 32}
    assert bound.outputs == {"out": Array((3, 5, 32), "float32")}
    with pytest.raises(ValueError) as caught:
        bind(swiglu, {"x": Array((3, 7), "float32")})
    assert str(caught.value) == (
        "cute.swiglu: argument `x` has 2n=7, expected a multiple of 2.\n"
        "  x: float32[3, 7]   declared T[*m 2n]\n"
        "  bound so far: *m=(3,), T=float32"
    )
    backward = swiglu.grad
    assert backward is not None
    with pytest.raises(ValueError, match="argument `dout` has n=64, but n=32"):
        bind(backward, {"x": X, "dout": X})


SIZES = {
    "ends": Tensor("b+1", "int32"), "x": Tensor("b k", "T"), "scale": Tensor("b ceil(k/128)", "T"),
    "q": Tensor("g*r d", "T"), "v": Tensor("g d/2 3", "T"),
}  # fmt: skip


def sizes_op(outputs: str = "2k r d/2 k-1 ceil(d/4)") -> Op:
    return Op(
        "sizes", inputs=SIZES, outputs={"out": Tensor(outputs, "T")}, dtypes={"T": FLOATS}, kernel="a:B",
        reference=lambda xp, *arrays: arrays[1],
    )  # fmt: skip


def sizes_of(**changed: tuple[int, ...]) -> dict[str, Array]:
    shapes = {"ends": (6,), "x": (5, 300), "scale": (5, 3), "q": (8, 10), "v": (2, 5, 3), **changed}
    return {name: Array(shape, "int32" if name == "ends" else "float32") for name, shape in shapes.items()}


def test_sizes_follow_from_others() -> None:
    bound = bind(sizes_op(), sizes_of())
    assert bound.dims == {"b": 5, "k": 300, "g": 2, "r": 4, "d": 10}
    assert bound.outputs == {"out": Array((600, 4, 5, 299, 3), "float32")}


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"x": (6, 300)}, "argument `x` has b=6, but b=5."),
        ({"ends": (0,)}, "argument `ends` has b+1=0, expected at least 1."),
        ({"scale": (5, 4)}, "argument `scale` has ceil(k/128)=4, but k=300."),
        ({"q": (7, 10)}, "argument `q` has g*r=7, expected a multiple of 2."),
        ({"v": (2, 4, 3)}, "argument `v` has d/2=4, but d=10."),
        ({"q": (8, 11)}, "argument `v` has d/2=5, but d=11: expected a multiple of 2."),
        ({"v": (2, 5, 4)}, "argument `v` has a dim of 4, expected 3."),
        ({"q": (0, 10), "v": (0, 5, 3)}, "argument `q` has g*r=0, from which r does not follow."),
        ({"x": (5, 0), "scale": (5, 0)}, "output `out` has k-1, but k=0: expected at least 0."),
    ],
)  # fmt: skip
def test_sizes_that_do_not_follow(changed: dict[str, tuple[int, ...]], problem: str) -> None:
    with pytest.raises(ValueError) as caught:
        bind(sizes_op(), sizes_of(**changed))
    assert str(caught.value).splitlines()[0] == f"cute.sizes: {problem}"


def test_an_output_that_would_be_half_a_number() -> None:
    with pytest.raises(ValueError, match=r"^cute.sizes: output `out` has k/7, but k=300: expected a multiple of 7\."):
        bind(sizes_op("k/7"), sizes_of())


@pytest.mark.parametrize("lead", [(), (5,), (1, 5), (3, 5), (3, 1), (1,), (1, 1)])
def test_leading_dims_that_broadcast(lead: tuple[int, ...]) -> None:
    x = Array((3, 5, 2, 8), "float32")
    bound = bind(table_op(), {"table": Array((*lead, 4), "float32"), "x": x})
    assert bound.dims == {"m": (3, 5), "h": 2, "r": 4}
    assert bound.outputs == {"out": Array((3, 5, 2, 4), "float32")}


@pytest.mark.parametrize("lead", [(3,), (3, 3), (5, 5), (2, 3, 5), (2, 1), (1, 1, 5), (1, 3, 1)])
def test_leading_dims_that_do_not_broadcast(lead: tuple[int, ...]) -> None:
    with pytest.raises(ValueError) as caught:
        bind(table_op(), {"table": Array((*lead, 4), "float32"), "x": Array((3, 5, 2, 8), "float32")})
    assert str(caught.value).startswith(
        f"cute.table: argument `table` has leading dims {lead}, expected the last ones of *m=(3, 5), or 1.\n"
    )


def test_leading_dims_must_agree() -> None:
    with pytest.raises(
        ValueError, match=r"^cute.silu_mul: argument `up` has leading dims \(5, 3\), but \*m=\(3, 5\)\."
    ):
        bind(silu_mul, {"gate": X, "up": Array((5, 3, 64), "float32")})


def test_one_dtype_variable_one_dtype() -> None:
    with pytest.raises(TypeError, match=r"argument `up` has dtype float16, but T=float32 from `gate`\."):
        bind(silu_mul, {"gate": X, "up": Array(X.shape, "float16")})


@pytest.mark.parametrize("residual", ["float16", "bfloat16"])
def test_narrower_residual_is_refused(residual: str) -> None:
    with pytest.raises(ValueError, match=f"argument `residual` has dtype {residual}, expected float32"):
        bind(add_rmsnorm, {"x": X, "residual": Array(X.shape, residual)})


def test_declarations_are_checked() -> None:
    def declare(**changes: object) -> Op:
        fields: dict = {
            "inputs": {"x": Tensor("*m n", "T")}, "outputs": {"out": Tensor("*m n", "T")}, "dtypes": {"T": FLOATS},
            "reference": lambda xp, x: x, "kernel": "a:B",
        }  # fmt: skip
        return Op("mine", **{**fields, **changes})

    assert repr(declare()) == "Op mine(x: T[*m n]) -> out: T[*m n]"
    with pytest.raises(ValueError, match="names used twice"):
        declare(outputs={"x": Tensor("*m n", "T")})
    with pytest.raises(ValueError, match="neither a variable nor a dtype"):
        declare(inputs={"x": Tensor("*m n", "U")})
    with pytest.raises(ValueError, match="leading dims must come first"):
        declare(inputs={"x": Tensor("n *m", "T")})
    for shape in ("*m n-k", "n *m", "0n", "* n", "*#m n", "b + 1", "ceil(n)", "n/0", "(n+1)/2", "2*3n", "n*"):
        with pytest.raises(ValueError, match=r"leading dims must|not a shape like|not a size like|cannot broadcast"):
            declare(outputs={"out": Tensor(shape, "T")})
    with pytest.raises(ValueError, match=r"x cannot broadcast: no input has all of \*m"):
        declare(inputs={"x": Tensor("*#m n", "T")})
    with pytest.raises(ValueError, match="comes after an optional one"):
        declare(inputs={"x": Tensor("n", "T", optional=True), "y": Tensor("n", "T")})
    with pytest.raises(ValueError, match="no input is required"):
        declare(inputs={"x": Tensor("*m n", "T", optional=True)})
    with pytest.raises(ValueError, match="'module:Class'"):
        declare(kernel="a.B")
    with pytest.raises(ValueError, match="out has dim k, neither an input's nor in `derived`"):
        declare(outputs={"out": Tensor("*m k", "T")})
    with pytest.raises(ValueError, match="for inference only, yet declares a gradient"):
        declare(grad=rmsnorm.grad, inference_only="train something else")
    with pytest.raises(ValueError, match=r"gradient rmsnorm_bwd reads"):
        declare(grad=rmsnorm.grad)


@pytest.mark.parametrize("op", [*OPS, *PRODUCTS, *ATTENTION, *MODELS], ids=lambda op: op.name)
def test_public_ops_are_documented(op: Op) -> None:
    for section in ("Args:", "Returns:", "Raises:", "Source:"):
        assert section in op.doc
    for name in (*op.inputs, *op.attrs):
        assert f"{name}:" in op.doc
    assert op.cases


def test_an_ignored_target_that_no_target_can_be() -> None:
    logits, target = Array((3, 5), "float32"), Array((3,), "int32")
    for ignored in (2**31, -(2**31) - 1):
        with pytest.raises(
            ValueError,
            match=rf"^cute\.cross_entropy: attribute `ignore_index` is {ignored}, which no target of int32 can be\.",
        ):
            bind(cross_entropy, {"logits": logits, "target": target}, {"ignore_index": ignored})
    bind(cross_entropy, {"logits": logits, "target": target._replace(dtype="int64")}, {"ignore_index": 2**31})
