"""Options of public functions that have another type or value than they may have."""

from __future__ import annotations

import inspect
import re
from functools import partial
from typing import Any

import numpy as np
import pytest

from cute_ops.composite.preferences import SMOOTHED
from cute_ops.composite.training import POLICIES, PREFERENCES
from tests.contract.adapters import Adapter
from tests.ops.wrong_calls import GOOD

NO_BOOLS: tuple[Any, ...] = ("no", "", 2, 0.5, float("nan"), [], (1,), None)
# Norms whose `eps` may be no negative number, infinity or NaN.
NORMS = [
    "rmsnorm", "add_rmsnorm", "layernorm", "add_layernorm", "l2norm", "head_rmsnorm", "head_layernorm", "rmsnorm_fp8",
    "add_rmsnorm_fp8", "qk_norm_rope", "group_norm", "rmsnorm_linear", "linear_add_rmsnorm", "dropout_add_rmsnorm",
]  # fmt: skip
ROWS = np.ones((2, 8), np.float32)


def good(adapter: Adapter, name: str) -> list[Any]:
    """The arguments of a good call."""
    specs = [np.ones(s, np.float32) if isinstance(s, tuple) else s for s in GOOD[name]]
    specs = [np.zeros(2, np.int32) if isinstance(s, dict) else s for s in specs]
    return [adapter.array(s) if isinstance(s, np.ndarray) else s for s in specs]


@pytest.mark.parametrize("name", GOOD)
def test_what_is_no_bool_is_no_flag(adapter: Adapter, name: str) -> None:
    """``"no"`` is true in Python: a flag that has another type is refused by name, also of an equal call before."""
    function, rng = getattr(adapter.ours, name), np.random.default_rng(list(name.encode()))
    flags = [p.name for p in inspect.signature(function).parameters.values() if isinstance(p.default, bool)]
    for flag in flags:
        value = NO_BOOLS[int(rng.integers(len(NO_BOOLS)))]
        with pytest.raises((TypeError, ValueError), match=rf"cute\.{name}: .*`{flag}`"):
            function(*good(adapter, name), **{flag: value})


@pytest.mark.parametrize("eps", [-1e-6, float("inf"), float("nan")])
@pytest.mark.parametrize("name", NORMS)
def test_eps_of_a_norm(adapter: Adapter, name: str, eps: float) -> None:
    """With a negative one a row is NaN, with infinity zero. What only computes shapes refuses them, too."""
    arrays = good(adapter, name)
    count = sum(isinstance(each, np.ndarray) or hasattr(each, "shape") for each in arrays)
    call = partial(getattr(adapter.ours, name), eps=eps)
    for run in (call, partial(adapter.abstract, lambda *given: call(*given, *arrays[count:]))):
        given = arrays if run is call else arrays[:count]
        with pytest.raises(ValueError, match=rf"cute\.{name}: attribute `eps` is "):
            run(*given)


@pytest.mark.parametrize("empty", ["hidden", "teacher_hidden"])
def test_distillation_of_heads_without_columns(adapter: Adapter, empty: str) -> None:
    heads = {"hidden": "weight", "teacher_hidden": "teacher_weight"}
    given = {name: array for pair in heads.items() for name, array in zip(pair, (ROWS, ROWS), strict=True)}
    given |= {empty: ROWS[:, :0], heads[empty]: ROWS[:, :0]}
    with pytest.raises(ValueError, match=rf"cute.linear_distillation_loss: argument `{empty}` has .=0, expected at l"):
        adapter.ours.linear_distillation_loss(**{name: adapter.array(array) for name, array in given.items()})


def preference(adapter: Adapter, kind: str, **options: Any) -> Any:
    hidden, weight = np.ones((2, 3, 8), np.float32), np.ones((6, 8), np.float32)
    own = {} if kind in ("cpo", "simpo", "orpo") else {"reference": np.ones(2, np.float32)}
    own |= {"desirable": np.ones(2, bool)} if kind == "kto" else {}
    arrays = {"hidden": hidden, "weight": weight, "target": np.zeros((2, 3), np.int32), **own}
    given = {name: adapter.array(array) for name, array in arrays.items()}
    return adapter.ours.linear_preference_loss(**given, kind=kind, **options)


@pytest.mark.parametrize("kind", PREFERENCES)
def test_smoothing_of_preferences(adapter: Adapter, kind: str) -> None:
    """A kind that does not smooth does not ignore the option, and no kind takes a share that is none."""
    wrong = (-0.1, 1.5, float("nan")) if kind in SMOOTHED else (0.1, float("nan"))
    for share in wrong:
        with pytest.raises(
            ValueError, match=r"cute\.linear_preference_loss: option `label_smoothing` is .*, expected "
        ):
            preference(adapter, kind, label_smoothing=share)


def policy(adapter: Adapter, kind: str, **options: Any) -> Any:
    shapes = {"hidden": (2, 3, 8), "weight": (6, 8), "target": (2, 3), "advantages": (2,)}
    given = {name: adapter.array(np.ones(s, "i4" if name == "target" else "f4")) for name, s in shapes.items()}
    return adapter.ours.linear_policy_loss(**given, kind=kind, **options)


def test_numbers_of_tokens(adapter: Adapter) -> None:
    """With a negative one the loss would have the other sign."""
    for wrong in (-3, 2.5, True):
        with pytest.raises((TypeError, ValueError), match=r"cute\.linear_policy_loss: option `max_tokens` "):
            policy(adapter, "dr_grpo", max_tokens=wrong)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf"), 10**400, -2e37])
def test_numbers_of_training_that_are_none(adapter: Adapter, wrong: float) -> None:
    """Also those that a kind does not read; only a bound may be infinite, and bounds nothing then."""
    rng = np.random.default_rng(list(str(wrong).encode()))
    given = "an int of 1329 bits" if isinstance(wrong, int) else re.escape(str(wrong))
    kinds, policies = rng.choice(PREFERENCES, 5), rng.choice(POLICIES, 4)
    for kind, name in zip(kinds, ("beta", "alpha", "gamma", "tau", "kl"), strict=True):
        with pytest.raises(
            ValueError, match=rf"cute\.linear_preference_loss: option `{name}` is {given}, expected a fi"
        ):
            preference(adapter, str(kind), **{name: wrong})
    for kind, name in zip(policies, ("beta", "clip_low", "clip_high", "ratio_bound"), strict=True):
        if name == "beta" or abs(wrong) != float("inf"):
            with pytest.raises(ValueError, match=rf"cute\.linear_policy_loss: option `{name}` is {given}, expected a"):
                policy(adapter, str(kind), **{name: wrong})
    unbounded = policy(adapter, "grpo", clip_low=float("inf"), clip_high=float("inf"), ratio_bound=float("inf"))[0]
    assert np.isclose(adapter.numpy(unbounded), -1.0)


@pytest.mark.parametrize("wrong", [0, 0.0, -1e-46, 5e-324, 1e38])
def test_numbers_that_float32_cannot_divide_by(adapter: Adapter, wrong: float) -> None:
    text = re.escape(str(wrong))
    for kind, name in (("ipo", "beta"), ("sppo_hard", "beta"), ("discopop", "tau"), ("dpo", "temperature")):
        with pytest.raises(ValueError, match=rf"cute\.linear_preference_loss: option `{name}` is {text}, expected "):
            preference(adapter, kind, **{name: wrong})
    rows = adapter.array(ROWS)
    with pytest.raises(ValueError, match=r"cute\.divergence: attribute `temperature` is .*, expected "):
        adapter.ours.divergence(rows, rows, temperature=float(wrong))


@pytest.mark.parametrize("base", [0.0, -1.0, float("inf"), float("nan")])
def test_bases_of_frequencies(adapter: Adapter, base: float) -> None:
    with pytest.raises(ValueError, match=r"cute\.rope_from_positions: option `base` is .*, expected a positive number"):
        adapter.ours.rope_from_positions(*good(adapter, "rope_from_positions"), base=base)
