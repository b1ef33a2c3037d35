"""Examples as one call, with NumPy in place of a framework; tests of both frameworks run what follows from it."""

from __future__ import annotations

import numpy as np

from cute_ops.declaration.batching import as_one_call
from cute_ops.ops.gemm.linear import linear
from cute_ops.ops.norm.add_rmsnorm import add_rmsnorm
from cute_ops.ops.norm.rmsnorm import rmsnorm
from cute_ops.ops.rotary.rope import rope
from cute_ops.ops.routing.route import route


def test_a_batch_is_a_leading_dim() -> None:
    x, residual, weight = np.ones((5, 3, 8)), np.arange(24.0).reshape(3, 8), np.ones(8)
    one = as_one_call(np, add_rmsnorm, {"x": (x, True), "residual": (residual, False), "weight": (weight, False)}, 5)
    assert one is not None and one.op is add_rmsnorm
    assert {name: a.shape for name, a in one.inputs.items()} == {"x": x.shape, "residual": x.shape, "weight": (8,)}
    assert (one.inputs["residual"] == residual).all()
    assert one.unfolded(add_rmsnorm.outputs["out"], x).shape == x.shape


def test_what_would_mix_examples_is_no_one_call() -> None:
    x, weight = np.ones((5, 3, 8)), np.ones((5, 8))
    assert as_one_call(np, rmsnorm, {"x": (x, True), "weight": (weight, True)}, 5) is None
    (backward,) = rmsnorm.steps  # sums over rows
    given = {"x": (x, True), "dout": (x, True), "weight": (weight[0], False)}
    assert as_one_call(np, backward, given, 5) is None
    assert as_one_call(np, backward.only("dx"), given, 5) is not None
    assert route.grad is not None  # a row's gradient depends on how often all rows choose an expert
    given = {"logits": (x, True), "weights": (x[..., :2], True), "index": (np.zeros((5, 3, 2), np.int32), True)}
    assert as_one_call(np, route.grad, {**given, "load": (x[:, 0], True)}, 5) is None


def test_an_op_of_batches() -> None:
    x, weight = np.arange(48.0).reshape(2, 3, 8), np.ones((5, 4, 8))
    one = as_one_call(np, linear, {"x": (x, False), "weight": (weight, True)}, 5)
    assert one is not None and one.op is linear.batched
    assert (one.inputs["x"] == x.reshape(6, 8)).all()
    assert {name: a.shape for name, a in one.inputs.items()} == {"x": (5, 6, 8), "weight": (5, 4, 8)}
    assert one.unfolded(linear.outputs["out"], np.ones((5, 6, 4))).shape == (5, 2, 3, 4)


def test_inputs_that_broadcast_stay_small_unless_they_are_batched() -> None:
    x, table = np.ones((5, 2, 3, 4, 8)), np.ones((3, 4))
    given = {"x": (x, True), "cos": (table, False), "sin": (table, False)}
    one, every = as_one_call(np, rope, given, 5), as_one_call(np, rope, {**given, "sin": (np.ones((5, 3, 4)), True)}, 5)
    assert one is not None and one.inputs["cos"].shape == (3, 4)
    assert every is not None and every.inputs["cos"].shape == every.inputs["sin"].shape == (5, 2, 3, 4)
