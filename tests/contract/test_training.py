"""Losses of preferences, policies and distillation on a linear head against the formulas of their papers in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cute_ops.composite.preferences import SMOOTHED
from tests.contract.adapters import Adapter

torch = pytest.importorskip("torch")
F = torch.nn.functional
SEQUENCES, TOKENS, H, N = 6, 5, 8, 23


def problem(seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    hidden, weight = (rng.standard_normal(s).astype(np.float32) for s in ((SEQUENCES, TOKENS, H), (N, H)))
    target = rng.integers(0, N, (SEQUENCES, TOKENS)).astype(np.int64)
    target[rng.random(target.shape) < 0.3] = -100
    target[:, 0] = 1
    return hidden, weight, target, -10 * rng.random((SEQUENCES, TOKENS)).astype(np.float32)


def tokens_by_hand(hidden: Any, weight: Any, target: Any, temperature: float = 1.0) -> tuple[Any, Any]:
    logs = F.log_softmax(hidden @ weight.T / temperature, -1)
    kept = target != -100
    return logs.gather(-1, torch.where(kept, target, 0)[..., None])[..., 0] * kept, kept.double()


def preference_by_hand(kind: str, tokens: Any, kept: Any, reference: Any, desirable: Any) -> Any:
    sums = tokens.sum(-1)
    half = SEQUENCES // 2
    if kind == "kto":
        logits = 0.3 * (sums - reference - 0.2)
        return torch.where(desirable, 1 - torch.sigmoid(logits), 1 - torch.sigmoid(-logits)).mean()
    mean = sums / kept.sum(-1)
    c, r = (mean if kind in ("orpo", "simpo") else sums - reference if kind in ("dpo", "ipo") else sums).split(half)
    nll = -tokens[:half].sum() / kept[:half].sum()
    if kind == "orpo":
        odds = (c - r) - (torch.log1p(-c.exp()) - torch.log1p(-r.exp()))
        return -0.3 * F.logsigmoid(odds).mean() + 0.7 * nll
    if kind == "ipo":
        return ((c - r - 1 / 0.6) ** 2).mean() + 0.7 * nll
    logits = 0.3 * (c - r) - (0.4 if kind == "simpo" else 0.0)
    return (-F.logsigmoid(logits) * 0.9 - F.logsigmoid(-logits) * 0.1).mean() + 0.7 * nll


def compare(adapter: Adapter, ours: Any, given: list[np.ndarray], exact: Any) -> None:
    """The first output and its gradients."""
    wide = [torch.from_numpy(a).double().requires_grad_() for a in given]
    loss = exact(*wide)
    (found,), slopes = adapter.value_and_gradients(adapter.usual(ours), adapter.arrays(given))
    np.testing.assert_allclose(found, loss.detach().numpy(), rtol=2e-5, atol=2e-5)
    for slope, wanted in zip(slopes, torch.autograd.grad(loss, wide), strict=True):
        np.testing.assert_allclose(slope, wanted.numpy(), rtol=1e-3, atol=2e-5)


@pytest.mark.on_gpus
@pytest.mark.parametrize("kind", ["dpo", "ipo", "orpo", "simpo", "cpo", "kto"])
def test_preferences(adapter: Adapter, kind: str) -> None:
    hidden, weight, target, tokens = problem()
    reference = tokens.sum(-1)
    desirable = np.arange(SEQUENCES) % 3 > 0
    classes, before, wanted = (adapter.array(a) for a in (target, reference, desirable))
    smoothing = 0.1 if kind in SMOOTHED else 0.0
    options = {"kind": kind, "beta": 0.3, "gamma": 0.4, "label_smoothing": smoothing, "kl": 0.2}
    options["alpha"] = 0.0 if kind == "kto" else 0.7

    def ours(hidden: Any, weight: Any) -> Any:
        more = {"desirable": wanted, **options}
        return adapter.ours.linear_preference_loss(hidden, weight, classes, before, **more)[0]

    def by_hand(hidden: Any, weight: Any) -> Any:
        both = tokens_by_hand(hidden, weight, torch.from_numpy(target))
        return preference_by_hand(kind, *both, torch.from_numpy(reference).double(), torch.from_numpy(desirable))

    compare(adapter, ours, [hidden, weight], by_hand)


@pytest.mark.on_gpus
@pytest.mark.parametrize(("kind", "given"), [("grpo", True), ("grpo", False), ("bnpo", True), ("dr_grpo", True)])
def test_policies(adapter: Adapter, kind: str, given: bool) -> None:
    hidden, weight, target, further = problem(1)
    rng = np.random.default_rng(2)
    gain = rng.standard_normal(SEQUENCES).astype(np.float32)
    exact_tokens, kept = tokens_by_hand(*map(torch.from_numpy, (hidden, weight)), torch.from_numpy(target), 0.9)
    near = exact_tokens.numpy().astype(np.float32) + rng.standard_normal(further.shape).astype(np.float32) / 3
    further = exact_tokens.numpy().astype(np.float32) + rng.standard_normal(further.shape).astype(np.float32)
    old, reference = (near, further) if given else (None, None)
    classes, gains = adapter.array(target), adapter.array(gain)
    others = [None if a is None else adapter.array(a) for a in (old, reference)]

    def ours(hidden: Any, weight: Any) -> Any:
        return adapter.ours.linear_policy_loss(
            hidden, weight, classes, gains, *others, kind=kind, beta=0.1, clip_high=0.3, max_tokens=9, temperature=0.9
        )[0]

    def by_hand(hidden: Any, weight: Any) -> Any:
        tokens, _ = tokens_by_hand(hidden, weight, torch.from_numpy(target), 0.9)
        before = torch.from_numpy(old).double() if given else tokens.detach()
        ratio, a = (tokens - before).exp(), torch.from_numpy(gain).double()[:, None]
        losses = -torch.minimum(ratio * a, ratio.clip(0.8, 1.3) * a)
        if given:
            d = torch.from_numpy(reference).double() - tokens
            losses = losses + 0.1 * (d.exp() - d - 1)
        losses = losses * kept
        if kind == "grpo":
            return (losses.sum(-1) / kept.sum(-1)).mean()
        return losses.sum() / (kept.sum() if kind == "bnpo" else SEQUENCES * 9)

    compare(adapter, ours, [hidden, weight], by_hand)


@pytest.mark.on_gpus
@pytest.mark.parametrize(
    ("beta", "chunk_rows", "learned"), [(0.0, 0, False), (0.3, 7, False), (1.0, 0, False), (0.3, 0, True)]
)
def test_distillation(adapter: Adapter, chunk_rows: int, beta: float, learned: bool) -> None:
    """``learned``: the parts' weights want gradients."""
    hidden, weight, target, _ = problem(3)
    rng = np.random.default_rng(4)
    teacher = [rng.standard_normal(s).astype(np.float32) for s in ((SEQUENCES, TOKENS, 3), (N, 3))]
    classes, known = adapter.array(target), adapter.arrays(teacher)
    options = {"beta": beta, "temperature": 1.5, "chunk_rows": chunk_rows}

    def ours(hidden: Any, weight: Any, hard: Any = 0.25, soft: Any = 0.5) -> Any:
        return adapter.ours.linear_distillation_loss(hidden, weight, *known, classes, hard=hard, soft=soft, **options)

    def by_hand(hidden: Any, weight: Any, hard: Any = 0.25, soft: Any = 0.5) -> Any:
        th, tw = (torch.from_numpy(a).double() for a in teacher)
        q, p = F.log_softmax(hidden @ weight.T / 1.5, -1), F.log_softmax(th @ tw.T / 1.5, -1)
        kl = lambda a, b: (a.exp() * (a - b)).sum(-1)  # noqa: E731
        m = (beta * p.exp() + (1 - beta) * q.exp()).log()
        rows = kl(p, q) if beta == 0 else kl(q, p) if beta == 1 else beta * kl(p, m) + (1 - beta) * kl(q, m)
        tokens, kept = tokens_by_hand(hidden, weight, torch.from_numpy(target))
        return soft * (rows * kept).sum() / kept.sum() - hard * tokens.sum() / kept.sum()

    numbers = [np.array(number, np.float32) for number in (0.25, 0.5)] if learned else []
    compare(adapter, ours, [hidden, weight, *numbers], by_hand)


def test_discopop_of_sequences_far_apart(adapter: Adapter) -> None:
    """The power of a large number that has no weight is none."""
    hidden, weight, target, _ = problem(6)
    reference = np.array([3000] * 3 + [0] * 3, np.float32)
    classes, known = adapter.array(target), adapter.array(reference)

    def ours(hidden: Any, weight: Any) -> Any:
        return adapter.ours.linear_preference_loss(hidden, weight, classes, known, kind="discopop")[0]

    def by_hand(hidden: Any, weight: Any) -> Any:
        tokens, _ = tokens_by_hand(hidden, weight, torch.from_numpy(target))
        chosen, rejected = (tokens.sum(-1) - torch.from_numpy(reference)).chunk(2)
        return 0.1 * (rejected - chosen).mean()

    compare(adapter, ours, [hidden, weight], by_hand)


def test_distillation_is_compiled(adapter: Adapter) -> None:
    arrays = [np.random.default_rng(0).standard_normal(s).astype(np.float32) for s in ((3, 8), (9, 8), (3, 4), (9, 4))]
    given = adapter.arrays(arrays)
    found = adapter.compiled(adapter.ours.linear_distillation_loss)(*given)
    np.testing.assert_allclose(
        adapter.numpy(found), adapter.numpy(adapter.ours.linear_distillation_loss(*given)), rtol=1e-5
    )


def test_log_probabilities(adapter: Adapter) -> None:
    hidden, weight, target, _ = problem(5)
    tokens, kept = tokens_by_hand(*map(torch.from_numpy, (hidden, weight)), torch.from_numpy(target), 2.0)
    for average in (False, True):
        found = adapter.ours.linear_log_probs(
            *adapter.arrays([hidden, weight, target]), average=average, temperature=np.float32(2.0)
        )
        exact = tokens.sum(-1) / (kept.sum(-1) if average else 1)
        np.testing.assert_allclose(adapter.numpy(found), exact.numpy(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda ours, *a: ours.linear_preference_loss(*a, kind="ppo"), "option `kind` is 'ppo', expected 'dpo', 'ipo'"),
        (lambda ours, *a: ours.linear_preference_loss(*a), "argument `reference` is None, which 'dpo' needs"),
        (lambda ours, h, w, t: ours.linear_preference_loss(h[:3], w, t[:3], kind="cpo"),
         "argument `target` has 3 sequences, which are"),
        (lambda ours, h, w, t: ours.linear_preference_loss(h, w, t, h[:, 0, 0], kind="kto"),
         "argument `desirable` is None, which 'kto' needs"),
        (lambda ours, h, w, t: ours.linear_policy_loss(h, w, t, h[:, 0, 0], kind="dpo"),
         "option `kind` is 'dpo', expected 'grpo', 'bnpo', 'dr_grpo', 'dapo' or 'cispo'"),
        (lambda ours, h, w, t: ours.linear_policy_loss(h, w, t, h[:, 0, 0], kind="cispo", level="sequence"),
         "option `level` is 'sequence', expected 'token'"),
        (lambda ours, h, w, t: ours.linear_preference_loss(h, w, t, h[:, 0, 0], kind="robust", label_smoothing=0.5),
         "option `label_smoothing` is 0.5, expected at least 0 and below 0.5 for 'robust'"),
        (lambda ours, h, w, t: ours.linear_distillation_loss(h, w, h, w, hard=0.5),
         "option `hard` is 0.5, which needs the argument `target`"),
        (lambda ours, h, w, t: ours.linear_distillation_loss(h, w, h, w, beta=2.0),
         "attribute `beta` is 2.0, expected a number from 0 to 1"),
        (lambda ours, h, w, t: ours.linear_distillation_loss(h, w, h, w, temperature=0.0),
         "attribute `temperature` is 0.0, expected a positive number"),
        (lambda ours, h, w, t: ours.linear_log_probs(h, w, t, temperature=0.0),
         "cute.linear_log_probs: option `temperature` is 0.0, expected a positive number"),
        (lambda ours, h, w, t: ours.linear_log_probs(h, w[:, 1:], t),
         "cute.linear_log_probs: in linear_cross_entropy: argument `weight` has h="),
        (lambda ours, h, w, t: ours.linear_policy_loss(h, w, t, h[:, 0, :2]), "argument `advantages` has the shape "),
        (lambda ours, h, w, t: ours.linear_policy_loss(h, w, t, h[:, 0, 0], h[:, :1, 0]),
         "argument `old` has the shape "),
        (lambda ours, h, w, t: ours.linear_distillation_loss(h, w, h, w, t[:, :1]), "argument `target` has the shape "),
        (lambda ours, h, w, t: ours.linear_distillation_loss(h[0, 0, 0], w, h, w, t), "argument `hidden` has 0 dims"),
        (lambda ours, h, w, t: ours.linear_distillation_loss(h, w, h, w, soft=w[0]), "option `soft` has the shape "),
        (lambda ours, h, w, t: ours.linear_distillation_loss(h, w, h, w, chunk_rows=-1),
         "attribute `chunk_rows` is -1, expected 0, or at least 1"),
    ],
    ids=["kind", "reference", "pairs", "desirable", "policy", "level", "smoothing", "hard", "beta", "temperature",
         "scale", "weight", "advantages", "old", "target", "dims", "factor", "rows"],
)  # fmt: skip
def test_what_is_refused(adapter: Adapter, call: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        call(adapter.ours, *adapter.arrays(problem()[:3]))


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda ours, h, w, t: ours.linear_distillation_loss(h, w, h, w, h[..., 0]),
         "argument `target` has dtype float32, expected int64 or int32"),
        (lambda ours, h, w, t: ours.linear_distillation_loss(h, w, h, w, t, ignore_index=0.5),
         "option `ignore_index` must be int, got 0.5"),
        (lambda ours, h, w, t: ours.linear_distillation_loss(h, w, h, w, t, ignore_index=True),
         "option `ignore_index` must be int, got True"),
        (lambda ours, h, w, t: ours.linear_distillation_loss(h, w, h, w, t, hard="yes"),
         "option `hard` must be a number, or an array without dims, got 'yes'"),
        (lambda ours, h, w, t: ours.linear_log_probs(h, w, t, average="none"),
         "cute.linear_log_probs: option `average` must be bool"),
        (lambda ours, h, w, t: ours.linear_preference_loss(h, w, t, kind="cpo", average="sum"),
         "option `average` must be bool"),
    ],
    ids=["target", "index", "flag", "factor", "log_probs", "preference"],
)  # fmt: skip
def test_other_types_are_refused(adapter: Adapter, call: Any, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        call(adapter.ours, *adapter.arrays(problem()[:3]))
