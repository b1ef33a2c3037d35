"""Functions of attention's scores and masks: their ops, their texts, and what bounds say of a tile."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from cute_ops import Array, mods
from cute_ops.calls import manifest
from cute_ops.declaration.binding import bind
from cute_ops.expressions.captured import operands_on
from cute_ops.expressions.limits import limits_and_rest
from cute_ops.expressions.reads import Mod, ranged
from cute_ops.expressions.reference import evaluate
from cute_ops.expressions.text import parse
from cute_ops.ops.attention import mods as of_attention
from cute_ops.ops.attention.by_call import FORMS, op_of
from tests.ops.attention_calls import drawn_with_functions

Q = Array((2, 64, 4, 64), "bfloat16")
QUERY, KEY = 2, 3  # of coordinates
DOCUMENT = {"document": Array((2, 64), "int64")}


def test_equal_functions_are_one_op() -> None:
    def own(xp: Any, batch: Any, head: Any, q: Any, k: Any, document: Any) -> Any:
        return xp.equal(document[batch, q], document[batch, k])

    first, second = op_of(mask_mod=mods.documents, captured=DOCUMENT), op_of(mask_mod=own, captured=DOCUMENT)
    assert first is op_of(mask_mod=mods.documents, captured=DOCUMENT)
    assert first.name.rpartition("_")[2] == second.name.rpartition("_")[2]
    assert first.name != op_of(mask_mod=mods.documents, captured={"document": Array((2, 64), "float32")}).name


def test_arrays_have_the_dims_that_they_are_read_by() -> None:
    def every(xp: Any, score: Any, batch: Any, head: Any, q: Any, k: Any, a: Any, b: Any, c: Any) -> Any:
        return score + a[batch, head] * b[head, q - k] + c[k] * a.shape[1]

    arrays = {"a": Array((2, 4), "float32"), "b": Array((4, 9), "float32"), "c": Array((64,), "float16")}
    op = op_of(every, captured=arrays)
    assert [op.inputs[name].shape for name in "abc"] == ["*m g*r", "g*r c1d1", "c2d0"]
    assert [step.name for step in op.steps] == [f"{op.name}_bwd{of}" for of in ("", "_a", "_b", "_c")]
    assert op.parallel == ("g",)

    def of_head(xp: Any, score: Any, batch: Any, head: Any, q: Any, k: Any, b: Any) -> Any:
        return score * 2.0 ** (-head) + b[head // 2, k]

    assert op_of(of_head, captured={"b": arrays["b"]}).parallel == ()


def _reading(first: str, second: str) -> Any:
    """A change of scores that reads two arrays of these names."""
    made: dict[str, Any] = {}
    exec(
        f"def read(xp, score, batch, head, q, k, {first}, {second}): "
        f"return score * {first}[head, k] + {second}[head, k]", made,
    )  # fmt: skip
    return made["read"]


@pytest.mark.parametrize("form", FORMS)
def test_captured_arrays_may_have_any_name(form: str) -> None:
    """That of what an op, its gradient or its sums have, in letters of any language, or of another one's gradient."""
    first = op_of(_reading("a", "b"), captured=dict.fromkeys("ab", Array((4, 9), "float32")), form=form)
    steps = first, *first.steps
    steps = *steps, *(part for step in steps if step.program for part in step.program.ops)
    words = {name for step in steps for of in (step.inputs, step.outputs, step.attrs) for name in of}
    words |= {*(first.finish.defaults if first.finish else ())}
    words |= {"Ellipsis", "TypeError", "ctx", "bias", "\u03b1", "captured1"}
    for word in words - {"q", "k"}:
        for names in ((word, f"d{word}"), (f"d{word}", word), (word, "captured0"), (word, "dcaptured0")):
            op = op_of(_reading(*names), captured=dict.fromkeys(names, Array((4, 9), "float32")), form=form)
            assert len(op.inputs) == len(first.inputs)


def test_manifests_name_an_op_that_a_module_binds(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("own_attention")
    module.documents = op_of(mask_mod=mods.documents, captured=DOCUMENT)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    call = manifest.call_of(bind(module.documents, {"q": Q, "k": Q, "v": Q, **DOCUMENT}, {"causal": True}), {})
    assert call is not None
    assert call.name == "own_attention:documents"
    (read,) = manifest.parse(str(call))
    assert read.op is module.documents


@pytest.mark.parametrize("seed", range(40))
def test_bounds_hold_of_every_tile(seed: int) -> None:
    """No tile is skipped of which a score counts, and none is taken for whole of which one does not."""
    call, functions = drawn_with_functions(seed, 60)
    if functions.mask is None:
        pytest.skip("no mask")
    names = [*functions.captured]
    arrays = {name: Array(a.shape, str(a.dtype)) for name, a in functions.captured.items()}
    op = op_of(functions.score, functions.mask, arrays)
    mask = of_attention.mask_of(call.attrs.get("left", -1), -1, _mask_text(op))
    assert mask is not None
    rng = np.random.default_rng(seed)
    rests = [others for found, others in (limits_and_rest(mask, axis) for axis in (KEY, QUERY)) if found and others]
    texts = [text for text in of_attention.bounds_of(mask)[0].split(" | ") if text]
    sizes = [np.float64(x) for x in (call.batch, call.h, call.s, call.t)]
    for _ in range(12):
        batch, head = np.float64(rng.integers(call.batch)), np.float64(rng.integers(call.h))
        q, k = (np.sort(rng.integers(0, n, 2)) for n in (call.s, call.t))
        queries, keys = (np.arange(low, high + 1.0) for low, high in (q + call.t - call.s, k))
        given = [batch, head, queries[:, None], keys, *sizes]
        operands = operands_on(mask, np, given, [functions.captured[name] for name in names])
        both, numbers = ranged(mask), [batch, head, queries[0], queries[-1], keys[0], keys[-1], *sizes]
        for i, value in enumerate(operands[mask.given :]):
            if i in (*both[0], *both[1]):
                numbers += [value.min(), value.max()]
            elif of_attention.known(mask)[mask.given + i]:
                numbers.append(value)
        for each, text in zip((mask, *rests), texts, strict=True):
            seen = np.broadcast_to(evaluate(each.expression, np, operands)[0], (len(queries), len(keys)))
            every, some = (bool(x) for x in evaluate(parse(text), np, [np.asarray(x) for x in numbers]))
            assert seen.all() or not every
            assert some or not seen.any()


def test_bounds_of_documents_in_order_are_exact() -> None:
    mask = of_attention.mask_mod(mods.documents, {0: "i"})
    bounds = parse(of_attention.bounds_of(mask)[0])
    numbers = np.zeros(10)
    for low_q, high_q, low_k, high_k in np.sort(np.random.default_rng(0).integers(0, 4, (50, 2, 2))).reshape(50, 4):
        given = [*numbers, np.float64(low_q), np.float64(high_q), np.float64(low_k), np.float64(high_k)]
        every, some = evaluate(bounds, np, [np.asarray(x) for x in given])
        assert every == (low_q == high_q == low_k == high_k)
        assert some == (low_q <= high_k and low_k <= high_q)


def test_what_has_no_bounds_is_told() -> None:
    floats = of_attention.mask_mod(lambda xp, batch, head, q, k, far: q - k < far[head], {0: "f"})
    both = of_attention.mask_mod(lambda xp, batch, head, q, k, keep: keep[q, k] != 0, {0: "i"})
    whole = of_attention.mask_mod(mods.prefix, {0: "i"})
    assert [of_attention.bounds_of(mask)[1] for mask in (floats, both, whole)] == [("array 0",), ("array 0",), ()]


def _mask_text(op: Any) -> str:
    """The text of the mask of an op's own functions."""
    text: str = op.reference.keywords["own"].mask
    assert Mod.parse(text).text == text
    return text
