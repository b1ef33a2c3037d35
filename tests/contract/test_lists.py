"""Ops with lists of tensors: values, lists of gradients, batches, lists that are written, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cute_ops import FLOATS, Op, Tensor, testing
from tests.contract.adapters import Adapter, as_tuple
from tests.ops import listing

FORWARDS = {op.name: op for op in (listing.add_n, listing.scale_all, listing.concatenate)}
INSTANCES = [one for op in FORWARDS.values() for each in (op, *op.steps) for one in each.instances]
FACTORS = np.array([1.0, 2.0, 3.0], np.float32)
EXACT = {
    "add_n": lambda xs: (sum(xs),), "scale_all": lambda xs, fs: [x * f for x, f in zip(xs, fs, strict=True)],
    "concatenate": lambda xs: (np.concatenate(xs, -2),),
}  # fmt: skip


def drawn(*rows: int, lead: tuple[int, ...] = ()) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.standard_normal((*lead, r, 8)).astype(np.float32) for r in rows]


def arguments(name: str, lead: tuple[int, ...] = ()) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The list, and what follows it."""
    return drawn(*((4, 4, 4) if name == "add_n" else (1, 5, 3)), lead=lead), [FACTORS] if name == "scale_all" else []


def gradients_of(name: str, outputs: Any) -> list[np.ndarray]:
    """Of the sum of the outputs' sines, for each tensor of the list."""
    cosines = [np.cos(out) for out in outputs]
    if name == "add_n":
        return cosines * 3
    if name == "scale_all":
        return [c * f for c, f in zip(cosines, FACTORS, strict=True)]
    return np.split(cosines[0], [1, 6], -2)


def close(found: Any, expected: Any) -> None:
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.drawn(0.5)
@pytest.mark.slow
@pytest.mark.on_gpus
@pytest.mark.parametrize("way", ["plain", "compiled"])
@pytest.mark.parametrize("name", FORWARDS)
def test_values_and_a_list_of_gradients(adapter: Adapter, name: str, way: str) -> None:
    """Of all tensors, of one, and of all but one."""
    xs, rest = arguments(name)
    function, others = adapter.register(FORWARDS[name]), adapter.arrays(rest)
    run = function if way == "plain" else adapter.compiled(function)
    expected = EXACT[name](xs, *rest)
    exact = gradients_of(name, expected)
    for wanted in ((0, 1, 2), (2,), (0, 2)):

        def call(*some: Any, wanted: tuple[int, ...] = wanted) -> Any:
            known = dict(zip(wanted, some, strict=True))
            return run([known[i] if i in known else adapter.array(x) for i, x in enumerate(xs)], *others)

        given = [adapter.array(xs[i]) for i in wanted]
        values, gradients = adapter.value_and_gradients(call, given, [np.cos(e) for e in expected])
        close(values, expected)
        close(gradients, [exact[i] for i in wanted])


def test_tuples_are_lists(adapter: Adapter) -> None:
    add_n, xs = adapter.register(listing.add_n), adapter.arrays(drawn(4, 4))
    np.testing.assert_array_equal(adapter.numpy(add_n(tuple(xs))), adapter.numpy(add_n(xs)))


@pytest.mark.parametrize("name", FORWARDS)
def test_batches_of_lists(adapter: Adapter, name: str) -> None:
    """Gradients of a batch, and a batch of gradients."""
    xs, rest = arguments(name, (2,))
    function, others = adapter.register(FORWARDS[name]), adapter.arrays(rest)
    expected = [
        np.stack(each) for each in zip(*(EXACT[name]([x[i] for x in xs], *rest) for i in range(2)), strict=True)
    ]
    exact = gradients_of(name, expected)

    def call(*xs: Any) -> Any:
        return function(list(xs), *others)

    given = adapter.arrays(xs)
    values, gradients = adapter.value_and_gradients(adapter.vmap(call), given, [np.cos(e) for e in expected])
    close(values, expected)
    close(gradients, exact)
    each = adapter.vmap(adapter.grad(lambda *xs: adapter.loss(call(*xs)), (0, 1, 2)))(*given)
    close(map(adapter.numpy, each), exact)


@pytest.mark.parametrize("one", INSTANCES, ids=lambda op: op.name)
def test_values_against_float64(adapter: Adapter, one: Op) -> None:
    (case,) = one.cases
    arrays, attrs = testing.inputs(one, case, "bfloat16"), testing.attributes(one, case)
    testing.check(one, arrays, attrs, adapter.run(one, arrays, attrs))


def test_a_list_of_inputs_is_written(adapter: Adapter) -> None:
    """In place in PyTorch, and as results in JAX."""
    rows = Tensor("r n", "T", many="k", own=("r",))
    grow = adapter.register(
        Op(
            "grow", inputs={"xs": rows, "by": Tensor("k", "float32")}, outputs={}, mutates=("xs",),
            dtypes={"T": FLOATS}, kernel="a:B",
            reference=lambda xp, xs, by: ([x * by[i] for i, x in enumerate(xs)],),
        )
    )  # fmt: skip
    xs, by = drawn(2, 3), adapter.array(np.array([2.0, 3.0], np.float32))
    for run in (grow, adapter.compiled(grow)):
        given = adapter.arrays(xs)
        results = run(given, by)
        assert (results is None) == (adapter.name == "torch")
        close(map(adapter.numpy, as_tuple(given if results is None else results)), [xs[0] * 2, xs[1] * 3])


ONES = np.ones((3, 8), np.float32)


@pytest.mark.parametrize(
    ("given", "kind", "said"),
    [
        (ONES, TypeError, r"argument `xs` must be a list of tensors, got (Tensor|ArrayImpl)"),
        ([], ValueError, "argument `xs` is empty, expected one tensor or more"),
        ([ONES, None], TypeError, r"argument `xs\[1\]` is required, but None was given"),
        ([ONES] * 2 + [ONES[:, :7]], ValueError, r"argument `xs\[2\]` has n=7, but n=8"),
        ([ONES, ONES.astype(np.int32)], TypeError, r"argument `xs\[1\]` has dtype int32, expected"),
        ([ONES, "a"], TypeError, r"argument `xs\[1\]` must be {one_array}, got str"),
    ],
)
def test_what_is_refused(adapter: Adapter, given: Any, kind: type[Exception], said: str) -> None:
    made = adapter.array(given) if given is ONES else [adapter.array(a) if hasattr(a, "shape") else a for a in given]
    with pytest.raises(kind, match=f"cute.add_n: .*{said.replace('{one_array}', adapter.one_array)}"):
        adapter.register(listing.add_n)(made)
