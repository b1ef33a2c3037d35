"""Keys of what calls hold constant, and what functions read."""

from __future__ import annotations

import enum
import functools
import gc
import logging
import math
import os
import random
import types
import weakref
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import numpy as np
import pytest

from cute_ops import fused, mods, testing
from cute_ops.constants import Exact, Unknown, constant, exact, state
from cute_ops.expressions import evaluate, gelu, parse, recognize, silu, text_of, trace
from cute_ops.ops.expression import many
from cute_ops.ops.expression.by_call import ByCall
from cute_ops.ops.gemm.by_call import traced

DISTINCT = [
    0, False, 0.0, -0.0, 1, True, 1.0, math.nan, -1, 0.5, math.inf, -math.inf, "1", "", None, ..., b"", b"1", (), [],
    {}, (1,), (True,), (1.0,), [1], ((0.0,),), ((-0.0,),), {1: 0.0}, {1: -0.0}, {True: 0.0}, frozenset(), {1}, {True},
    0j, complex(0.0, -0.0), 1 + 0j, np.float32(1), np.float64(1), np.int32(1), np.float32(0), np.float32(-0.0),
    Decimal("1"), Decimal("1.0"), slice(0, 1), slice(0, True), range(2), int, float, np.float32, math.sqrt,
]  # fmt: skip


def test_keys_are_equal_for_what_cannot_be_told_apart_alone() -> None:
    for i, a in enumerate(DISTINCT):
        for j, b in enumerate(DISTINCT):
            assert (exact(a) == exact(b)) == (i == j), (a, b)
    assert exact(float("nan")) == exact(float("nan"))
    assert len({exact(each) for each in DISTINCT}) == len(DISTINCT)
    assert Exact((0.0,)) != Exact((-0.0,)) and Exact((1,)) != Exact((True,)) and Exact((1,)) == Exact((1,))
    assert len({Exact((1,)), Exact((1.0,)), Exact((True,))}) == 3


@pytest.mark.parametrize("value", [object(), types.SimpleNamespace(a=1), np.zeros(1), [object()], open])
def test_what_may_change_has_no_key(value: Any) -> None:
    with pytest.raises(Unknown):
        constant(value)


class Mode(enum.Enum):
    PLAIN, TWICE = 1, 2


class Config:
    def __init__(self) -> None:
        self.limit, self.table, self.mode = 3.0, {"a": [1.0, 2.0]}, Mode.PLAIN


class Layer:
    factor = 2.0

    def __init__(self) -> None:
        self.scale, self.bias, self.config = 2.0, None, Config()
        self.act: Callable[..., Any] = lambda x: x * self.scale

    @property
    def double(self) -> float:
        return self.scale * 2

    def plain(self, xp: Any, x: Any) -> Any:
        return x * self.scale * self.factor if self.bias is None else x

    def nested(self, xp: Any, x: Any) -> Any:
        config = self.config
        return x * config.limit * config.table["a"][1]

    def of_property(self, xp: Any, x: Any) -> Any:
        return x * self.double

    def by_helper(self, xp: Any, x: Any) -> Any:
        return self.plain(xp, self.act(x))

    def in_comprehension(self, xp: Any, x: Any) -> Any:
        return sum([x * self.scale for _ in range(2)], 0.0)

    def __call__(self, xp: Any, x: Any) -> Any:
        return x * self.scale


SCALE, LIST, TABLE, NESTED = 2.0, [1.0, 2.0], {"k": 2.0, "other": 1.0}, {"a": {"b": (1.0, [2.0])}}
MODULE = types.ModuleType("numbers_of_a_test")
MODULE.inner = types.SimpleNamespace(k=2.0)  # type: ignore[attr-defined]


def helper(x: Any, *, by: float = 2.0) -> Any:
    return x * SCALE * by


def of_global(xp: Any, x: Any) -> Any:
    return x * SCALE


def of_list(xp: Any, x: Any) -> Any:
    for each in LIST:
        x = x * each
    return x


def of_table(xp: Any, x: Any) -> Any:
    return x * TABLE["k"]


def of_values(xp: Any, x: Any) -> Any:
    return x * sum(TABLE.values()) * TABLE.get("k", 1.0)


def of_nested(xp: Any, x: Any) -> Any:
    inner = NESTED["a"]
    return x * inner["b"][1][0]


def of_helper(xp: Any, x: Any) -> Any:
    return helper(x) * math.sqrt(2 / math.pi)


def of_module(xp: Any, x: Any) -> Any:
    return x * MODULE.inner.k


def of_default(xp: Any, x: Any, *, by: float = 2.0) -> Any:
    return x * by


def of_mode(xp: Any, x: Any) -> Any:
    return x * 2 if Config.mode is Mode.TWICE else x  # type: ignore[attr-defined]


def of_import(xp: Any, x: Any) -> Any:
    import math

    return x * math.pi * SCALE


def closure(k: Any) -> Callable[..., Any]:
    def inner(x: Any) -> Any:
        return x * k

    def outer(xp: Any, x: Any) -> Any:
        return inner(x) * k

    return outer


class Twice(enum.Enum):
    ONE = 1

    def __call__(self, x: Any) -> Any:
        return x * SCALE


class Decorated:
    scale = 2.0


def of_member_in_a_loop(xp: Any, x: Any) -> Any:
    for each in (Twice.ONE,):
        x = each(x)
    return x


def of_numpy(xp: Any, x: Any) -> Any:
    return x * float(BY_NUMPY(1.0))


def of_vector(xp: Any, x: Any) -> Any:
    return x * float(BY_VECTOR(1.0))


def of_matrix(xp: Any, x: Any) -> Any:
    return x * float(MATRIX[0, 0])


def of_last_round(xp: Any, x: Any) -> Any:
    for i in range(2):
        if i:
            x = x * last.inner.k  # type: ignore[has-type]  # noqa: F821 (of the last round)
        last = MODULE  # noqa: F841
    return x


def wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(*args: Any) -> Any:
        return function(*args)

    return run


Change = Callable[[], None]


def put(owner: Any, name: str, value: Any) -> Change:
    def change() -> None:
        if isinstance(owner, dict | list):
            owner[name] = value  # type: ignore[index,call-overload]
        else:
            setattr(owner, name, value)

    return change


def situations() -> dict[str, tuple[Callable[[], Any], list[Change]]]:
    """What gives a function, and changes, after each of which it computes something else."""
    here = globals()
    layer, cell = Layer(), closure(2.0)
    partial = functools.partial(of_default, by=3.0)
    return {
        "global": (lambda: of_global, [put(here, "SCALE", 3.0), put(here, "SCALE", 3), put(here, "SCALE", True)]),
        "zero": (lambda: of_global, [put(here, "SCALE", 0.0), put(here, "SCALE", -0.0), put(here, "SCALE", 0)]),
        "list": (lambda: of_list, [put(LIST, 0, 5.0), lambda: LIST.append(2.0), put(here, "LIST", [7.0])]),  # type: ignore[arg-type]
        "element": (lambda: of_table, [put(TABLE, "k", 5.0), put(here, "TABLE", {"k": 7.0})]),
        "values": (lambda: of_values, [put(TABLE, "other", 5.0), put(TABLE, "new", 5.0)]),
        "nested": (lambda: of_nested, [lambda: put(NESTED["a"]["b"][1], 0, 5.0)()]),  # type: ignore[arg-type]
        "helper's global": (lambda: of_helper, [put(here, "SCALE", 4.0), put(helper, "__kwdefaults__", {"by": 3.0})]),
        "helper": (lambda: of_helper, [put(here, "helper", lambda x: x * 9.0)]),
        "module": (lambda: of_module, [put(MODULE.inner, "k", 3.0)]),
        "default": (lambda: of_default, [put(of_default, "__kwdefaults__", {"by": 3.0})]),
        "mode": (lambda: of_mode, [put(Config, "mode", Mode.TWICE)]),
        "import": (lambda: of_import, [put(here, "SCALE", 6.0)]),
        "closure": (lambda: cell, [lambda: put(cell.__closure__[1], "cell_contents", 3.0)()]),  # type: ignore[index]
        "wrapper": (lambda: wrapped(cell), [lambda: put(cell.__closure__[1], "cell_contents", 4.0)()]),  # type: ignore[index]
        "partial": (lambda: partial, [put(partial.keywords, "by", 4.0)]),
        "method": (lambda: layer.plain, [put(layer, "scale", 3.0), put(Layer, "factor", 3.0), put(layer, "bias", 1.0)]),
        "config": (lambda: layer.nested, [put(layer.config, "limit", 5.0), put(layer.config.table["a"], 1, 5.0)]),  # type: ignore[arg-type]
        "property": (lambda: layer.of_property, [put(layer, "scale", 7.0)]),
        "method's helper": (lambda: layer.by_helper, [put(layer, "scale", 8.0), put(layer, "act", lambda x: x * 5.0)]),
        "comprehension": (lambda: layer.in_comprehension, [put(layer, "scale", 9.0)]),
        "callable object": (lambda: layer, [put(layer, "scale", 10.0)]),
        "code": (lambda: of_module, [put(of_module, "__code__", (lambda xp, x: x * 5.0).__code__)]),
    }


@pytest.fixture
def restored() -> Any:
    """Globals, and functions' attributes, as they were."""
    names = {name: value for name, value in globals().items() if not name.startswith("__")}
    lists, tables = [*LIST], dict(TABLE)
    kept = [(f, f.__code__, f.__kwdefaults__) for f in (helper, of_default, of_module)]
    yield
    globals().update(names)
    LIST[:], NESTED["a"]["b"][1][0], MODULE.inner.k, Layer.factor = lists, 2.0, 2.0, 2.0  # type: ignore[index]
    TABLE.clear()
    TABLE.update(tables)
    for function, code, defaults in kept:
        function.__code__, function.__kwdefaults__ = code, defaults
    if "mode" in vars(Config):
        del Config.mode


@pytest.mark.parametrize("name", situations())
def test_a_change_of_what_a_function_reads_is_another_state(name: str, restored: None) -> None:
    Config.mode = Mode.PLAIN  # type: ignore[attr-defined]
    make, changes = situations()[name]
    seen = [state(make())]
    for change in changes:
        assert seen[-1] is not None and state(make()) is seen[-1]
        change()
        seen.append(state(make()))
    assert len({id(each) for each in seen}) == len(seen)


def test_what_was_seen_before_is_the_state_of_then(restored: None) -> None:
    first = state(of_global)
    globals()["SCALE"] = 3.0
    assert state(of_global) is not first
    globals()["SCALE"] = 4.0 / 2
    assert state(of_global) is first
    a, b = Layer(), Layer()
    assert state(a.plain) is state(b.plain)
    b.scale = 5.0
    assert state(a.plain) is not state(b.plain)
    assert state(closure(2.0)) is state(closure(2.0)) is not state(closure(2))


def counts(xp: Any, x: Any) -> Any:
    global SCALE
    SCALE += 1.0
    return x * SCALE


def of_environment(xp: Any, x: Any) -> Any:
    return x * float(os.environ.get("CUTE_OPS_TEST_NUMBER", "1"))


def of_chance(xp: Any, x: Any) -> Any:
    return x * random.random()


def of_object(xp: Any, x: Any) -> Any:
    return x * vars(MODULE.inner)["k"]


def of_array(xp: Any, x: Any) -> Any:
    return x * ARRAY


def of_name(xp: Any, x: Any) -> Any:
    return x * getattr(MODULE.inner, "k")  # noqa: B009


class Matrix(np.ndarray):
    pass


Matrix.__module__ = "numpy"  # as that of `matrix` and `memmap`
BY_NUMPY, BY_VECTOR, MATRIX = np.frompyfunc(helper, 1, 1), np.vectorize(helper), np.ones((1, 1)).view(Matrix)
Decorated.method = wrapped(lambda self, xp, x: x * self.scale)  # type: ignore[attr-defined]
decorated = Decorated().method  # type: ignore[attr-defined]
UNKNOWN = [
    counts, of_environment, of_chance, of_object, of_array, of_name, of_member_in_a_loop, of_numpy, of_vector,
    of_matrix, of_last_round, decorated,
]  # fmt: skip

ARRAY = np.array(2.0)


@pytest.mark.parametrize("function", UNKNOWN)
def test_a_function_that_reads_what_cannot_be_known_has_no_state(
    function: Any, restored: None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "cute_ops"):
        assert state(function) is None
        assert state(function) is None
    assert len([r for r in caplog.records if " is traced at each call: " in r.message]) <= 1


def test_functions_of_this_package_are_known() -> None:
    """Primitives of expressions, and masks with a name, also one that is made for a width."""
    known = state(lambda xp, x: gelu(x))
    assert known is not None
    assert known is not state(lambda xp, x: silu(x))
    assert state(mods.window(3, 1)) is state(mods.window(3, 1)) is not state(mods.window(3, 2))
    assert state(lambda *x: mods.causal(*x)) is not None


def test_members_with_values_alone_and_numpys_functions_are_known() -> None:
    class Letters(str, enum.Enum):  # noqa: UP042 (what people write)
        A = "a"

        def __str__(self) -> str:
            return self.value

    for value in (Mode.TWICE, Letters.A, enum.IntFlag("F", "A").A, enum.StrEnum("S", "A").A, np.tanh, np.dtype("f4")):
        assert constant(value) == constant(value)
    for value in (Twice.ONE, enum.Enum("E", {"A": [1]}).A, BY_NUMPY, BY_VECTOR, MATRIX):
        with pytest.raises(Unknown):
            exact(value)


def test_a_function_is_traced_anew_where_what_it_reads_cannot_be_known(monkeypatch: pytest.MonkeyPatch) -> None:
    made = ByCall(of_environment)
    names = []
    for value in ("2", "3", "2"):
        monkeypatch.setenv("CUTE_OPS_TEST_NUMBER", value)
        (out,) = made.op("t").reference(np, np.ones((2, 3), np.float32))
        assert (out == float(value)).all()
        names.append(made.op("t").name)
    assert names[0] == names[2] != names[1]


def test_name_and_op_come_from_one_trace(restored: None) -> None:
    made, x = ByCall(counts), np.ones((2, 3), np.float32)
    for _ in range(3):
        op = made.op("t")
        (out,) = op.reference(np, x)
        same = ByCall(closure_of_product(float(out[0, 0])), "counts").op("t")
        assert same is op


def closure_of_product(k: float) -> Callable[..., Any]:
    return lambda xp, x: x * k


@pytest.mark.slow
def test_nothing_keeps_the_object_of_a_method_alive() -> None:
    layer = Layer()
    for method in (layer.plain, layer.nested, layer.by_helper, layer):
        assert state(method) is not None
        ByCall(method).op("t")
    gone = weakref.ref(layer)
    del layer, method
    gc.collect()
    assert gone() is None


def test_functions_as_attributes_count_with_what_they_read(restored: None) -> None:
    def applied(xp: Any, x: Any, *, act: Callable[..., Any]) -> Any:
        return act(x)

    made = ByCall(applied)
    first = made.op("t", (("act", helper),))
    globals()["SCALE"] = 3.0
    second = made.op("t", (("act", helper),))
    (out,) = second.reference(np, np.ones((1, 2), np.float32))
    assert first is not second and (out == 6.0).all()


def test_what_is_expected_is_what_the_function_wrote(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if another word were recognised: 2e-3 off."""
    monkeypatch.setattr(recognize, "TOLERANCE", 2**-7)

    def nearly(xp: Any, x: Any) -> Any:
        return 0.5 * x * (1 + xp.erf(0.7121 * x))

    op = fused(nearly, operands={"x": "*m n"})
    x = np.linspace(-4, 4, 801, dtype=np.float32).reshape(1, -1)
    exact = 0.5 * x * (1 + np.vectorize(math.erf)(0.7121 * x.astype(np.float64)))
    (found,) = testing.expected(op, {"x": x}, {})
    np.testing.assert_allclose(found, exact, rtol=1e-12, atol=1e-15)
    testing.check(op, {"x": x}, {}, testing.run_reference(op, {"x": x}, {}))
    recognised = parse(text_of(trace(nearly, {"x": "*m n"})))
    assert [node.primitive for node in recognised.nodes] == ["operand", "gelu"]
    with pytest.raises(AssertionError, match="output out"):
        testing.check(op, {"x": x}, {}, evaluate(recognised, np, [x]))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_lookalikes_of_gelu_are_computed_as_written(dtype: str) -> None:
    import ml_dtypes

    x = np.linspace(-4, 4, 801).reshape(1, -1).astype(getattr(ml_dtypes, dtype, dtype))
    wide, erf = x.astype(np.float64), np.vectorize(math.erf)
    for k in (0.7121, 0.70703125, 0.7071):
        op = fused(lambda xp, x, k=k: 0.5 * x * (1 + xp.erf(k * x)), name="lookalike", operands={"x": "*m n"})
        (out,) = testing.run_reference(op, {"x": x}, {})
        unit = {"float32": 2**-22, "bfloat16": 2**-8, "float16": 2**-11}[dtype]
        np.testing.assert_allclose(out.astype(np.float64), 0.5 * wide * (1 + erf(k * wide)), rtol=unit, atol=1e-6)


def test_a_number_that_keeps_changing_is_warned_of_once(caplog: Any) -> None:
    """Each of its values is an op, of ``fused`` and of an epilogue."""

    def scaled(scale: float) -> Any:
        return lambda xp, x: x * scale

    by_call = [ByCall(scaled(float(i)), "scaled") for i in range(many.MANY + 3)]
    for made in by_call[: many.MANY - 1]:
        made.op("t")
    assert not caplog.messages
    for made in by_call[many.MANY - 1 :]:
        made.op("t")
    (text,) = caplog.messages
    assert text.startswith("scaled has become 64 ops, one for each value") and "make what changes an operand" in text
    caplog.clear()
    scaled_by = [0.0]
    for i in range(many.MANY + 3):
        scaled_by[0] = i + 0.5
        traced(lambda xp, acc: acc * scaled_by[0], (), "n k")
    (text,) = caplog.messages
    assert text.startswith("the epilogue <lambda> of linear has become 64 ops")
