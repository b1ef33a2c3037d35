"""Every backward reference against the vector-Jacobian product of its forward reference, in float64."""

from __future__ import annotations

import numpy as np
import pytest

from cute_ops import Case, Op, testing
from cute_ops.ops import OPS

torch = pytest.importorskip("torch")
SMALL = [(op, case) for op in OPS for case in op.cases if testing.elements(case) <= 20000]


@pytest.mark.parametrize(("op", "case"), SMALL, ids=lambda v: v.name)
def test_gradient(op: Op, case: Case) -> None:
    import array_api_compat.torch as xp

    backward = op.grad
    assert backward is not None
    attrs = testing.attributes(op, case)
    arrays = {n: None if a is None else a.astype(np.float64) for n, a in testing.inputs(op, case, "float32").items()}
    tensors = {n: None if a is None else torch.from_numpy(a).requires_grad_() for n, a in arrays.items()}
    result = op.reference(xp, *tensors.values(), **attrs)
    outputs = dict(zip(op.outputs, result if isinstance(result, tuple) else (result,), strict=True))
    rng = np.random.default_rng(1)
    cotangents = {f"d{n}": torch.from_numpy(rng.standard_normal(tuple(o.shape))) for n, o in outputs.items()}
    wanted = {f"d{n}": t for n, t in tensors.items() if t is not None and n in op.differentiable}
    exact = dict(
        zip(
            wanted,
            torch.autograd.grad(list(outputs.values()), list(wanted.values()), list(cotangents.values())),
            strict=True,
        )
    )
    known = {**tensors, **outputs, **cotangents}
    got = dict(
        zip(backward.outputs, backward.reference(xp, *(known.get(n) for n in backward.inputs), **attrs), strict=True)
    )
    for name, gradient in exact.items():
        value = got[name] if got[name] is not None else got[backward.outputs[name].same_as or ""]
        torch.testing.assert_close(value, gradient, rtol=1e-9, atol=1e-9)


def test_the_tolerance_rule_rejects_a_wrong_result() -> None:
    op = OPS[0]
    case = Case("small", {"m": (8,), "n": 256})
    arrays, attrs = testing.inputs(op, case, "bfloat16"), testing.attributes(op, case)
    (right,) = testing.run_reference(op, arrays, attrs)
    assert right is not None
    testing.check(op, arrays, attrs, (right,))
    wrong = right.copy()
    wrong[3, 5] *= 1.03
    with pytest.raises(AssertionError, match=r"rmsnorm: output out: error .* exceeds .* at \(3, 5\)"):
        testing.check(op, arrays, attrs, (wrong,))
    poisoned = right.copy()
    poisoned[0, 0] = np.nan
    with pytest.raises(AssertionError, match="NaN"):
        testing.check(op, arrays, attrs, (poisoned,))
