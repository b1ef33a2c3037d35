"""Losses of training steps, drawn: options, ignored tokens, sequences and batches without any; and no logits of all."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from cute_ops.composite import chunks
from cute_ops.composite.training import POLICIES, PREFERENCES
from tests.contract.adapters import Adapter

torch = pytest.importorskip("torch")
F = torch.nn.functional
Draw = random.Random


class Problem:
    """Sequences under a head; some tokens are ignored, or all of a sequence, or all."""

    def __init__(self, draw: Draw, sequences: int) -> None:
        rng = np.random.default_rng(draw.randrange(2**32))
        tokens, h, n = draw.choice([1, 2, 7]), draw.randrange(1, 9), draw.randrange(2, 40)
        shapes = (sequences, tokens, h), (n, h), (n,)
        self.hidden, self.weight, self.bias = (rng.standard_normal(s).astype(np.float32) for s in shapes)
        self.ignored = draw.choice([-100, 0])
        self.target = rng.integers(0, n, (sequences, tokens))
        self.target[rng.random(self.target.shape) < draw.choice([0.0, 0.4, 1.0])] = self.ignored
        self.temperature, self.rng = draw.choice([1.0, 0.7]), rng
        self.options = {"ignore_index": self.ignored, "temperature": self.temperature}

    def tokens(self, hidden: Any, weight: Any, bias: Any) -> tuple[Any, Any]:
        """The log-probability of each token, 0 where it is ignored, and whether it counts."""
        logs = F.log_softmax((hidden @ weight.T + bias) / self.temperature, -1)
        target = torch.from_numpy(self.target)
        kept = target != self.ignored
        return logs.gather(-1, torch.where(kept, target, 0)[..., None])[..., 0] * kept, kept.double()

    def numbers(self, *shape: int) -> np.ndarray:
        return self.rng.standard_normal(shape).astype(np.float32)

    def agrees(self, adapter: Adapter, ours: Callable[..., Any], exact: Callable[..., Any]) -> None:
        """A loss of hidden states, weight and bias, and its gradients."""
        given = [self.hidden, self.weight, self.bias]
        wide = [torch.from_numpy(a).double().requires_grad_() for a in given]
        loss = exact(*wide)
        (found,), slopes = adapter.value_and_gradients(adapter.usual(ours), adapter.arrays(given))
        np.testing.assert_allclose(found, loss.detach().numpy(), rtol=1e-4, atol=1e-4)
        if not torch.isfinite(loss):
            return
        for slope, wanted in zip(slopes, torch.autograd.grad(loss, wide), strict=True):
            largest = float(wanted.abs().max()) if wanted.numel() else 0.0
            np.testing.assert_allclose(slope, wanted.numpy(), rtol=1e-3, atol=1e-4 * max(largest, 1.0))


SMOOTHED = "dpo", "cpo", "simpo", "robust"
OTHERS = PREFERENCES[5:-1]


def of_pairs(kind: str, c: Any, r: Any, options: tuple[float, float, float]) -> Any:
    """By the functions of their papers; DiscoPOP's temperature is 0.5."""
    (beta, gamma, e), log, of = options, F.logsigmoid, torch.sigmoid
    b, d = (beta * c, beta * r), beta * (c - r)
    if kind in ("dpo", "cpo", "simpo"):
        logits = d - (gamma if kind == "simpo" else 0.0)
        return -log(logits) * (1 - e) - log(-logits) * e
    if kind == "exo_pair":
        share, wanted = torch.stack([of(d), of(-d)]), torch.tensor([1 - e, e], dtype=torch.float64)[:, None]
        return (share * (share / wanted).log()).sum(0)
    return {
        "ipo": lambda: (c - r - 1 / (2 * beta)) ** 2,
        "orpo": lambda: -beta * log((c - r) - (torch.log(-torch.expm1(c)) - torch.log(-torch.expm1(r)))),
        "hinge": lambda: torch.relu(1 - d),
        "robust": lambda: ((e - 1) * log(d) + e * log(-d)) / (1 - 2 * e),
        "nca_pair": lambda: -log(b[0]) - log(-b[0]) / 2 - log(-b[1]) / 2,
        "bco_pair": lambda: -log(b[0]) - log(-b[1]),
        "sppo_hard": lambda: (c - 0.5 / beta) ** 2 + (r + 0.5 / beta) ** 2,
        "apo_zero": lambda: 1 - of(b[0]) + of(b[1]),
        "apo_down": lambda: of(b[0]) + 1 - of(d),
        "discopop": lambda: -log(d) * (1 - of(2 * d)) + (-d).exp() * of(2 * d),
    }[kind]()


def other_preferences(adapter: Adapter, draw: Draw, kind: str) -> None:
    for each in OTHERS[draw.randrange(3) :: 3]:
        preferences(adapter, draw, each)


def preferences(adapter: Adapter, draw: Draw, kind: str) -> None:
    sequences = draw.choice([0, 2, 6]) if kind != "kto" else draw.choice([0, 1, 5])
    given = Problem(draw, sequences)
    reference, desirable = -10 * abs(given.numbers(sequences)), given.rng.random(sequences) < 0.5
    beta, alpha, gamma = draw.choice([0.1, 0.7]), draw.choice([0.0, 1.0]), draw.choice([0.0, 0.4])
    smoothing, kl = draw.choice([0.0, 0.2]) if kind in SMOOTHED else 0.0, draw.choice([0.0, 0.3])
    smoothing = 0.1 if kind == "exo_pair" else smoothing
    alpha, average = 0.0 if kind == "kto" else alpha, draw.choice([None, None, False, True])
    compared = kind not in ("orpo", "simpo", "cpo") and not (kind == "hinge" and draw.random() < 0.5)
    arrays = [adapter.array(a) for a in (given.target, reference, desirable)]

    def ours(hidden: Any, weight: Any, bias: Any) -> Any:
        return adapter.ours.linear_preference_loss(
            hidden, weight, arrays[0], arrays[1] if compared else None, bias, kind=kind, beta=beta, alpha=alpha,
            gamma=gamma, label_smoothing=smoothing, tau=0.5, average=average, desirable=arrays[2], kl=kl,
            **given.options,
        )[0]  # fmt: skip

    def exact(*leaves: Any) -> Any:
        tokens, kept = given.tokens(*leaves)
        sums, half = tokens.sum(-1), sequences // 2
        sums = sums / kept.sum(-1) if average or (average is None and kind in ("orpo", "simpo")) else sums
        if compared:
            sums = sums - torch.from_numpy(reference).double()
        if kind == "kto":
            logits = beta * (sums - kl)
            return torch.where(torch.from_numpy(desirable), torch.sigmoid(-logits), torch.sigmoid(logits)).mean()
        losses = of_pairs(kind, sums[:half], sums[half:], (beta, gamma, smoothing))
        loss = losses.mean()
        return loss - alpha * tokens[:half].sum() / kept[:half].sum() if alpha else loss

    given.agrees(adapter, ours, exact)


def policies(adapter: Adapter, draw: Draw, kind: str) -> None:
    given = Problem(draw, draw.choice([0, 1, 4]))
    low, high, beta, most = (
        draw.choice([0.1, 0.2]),
        draw.choice([0.2, 0.4]),
        draw.choice([0.0, 0.1]),
        draw.choice([0, 9]),
    )
    gain, shape = given.numbers(len(given.target)), given.target.shape
    level = draw.choice(["token", "sequence"]) if kind != "cispo" else "token"
    bound, tokens_of_all = draw.choice([None, 1.5]), draw.choice([None, 11])
    factor = abs(given.numbers(*shape)) if draw.random() < 0.4 else None
    with torch.no_grad():
        now, _ = given.tokens(*(torch.from_numpy(a).double() for a in (given.hidden, given.weight, given.bias)))
    near = [now.numpy().astype(np.float32) + given.numbers(*shape) / 2 for _ in range(2)]
    old, reference = (a if draw.random() < 0.7 else None for a in near)
    classes, gains = adapter.array(given.target), adapter.array(gain)
    # What is given for ignored tokens may be anything.
    anything = np.where(given.target == given.ignored, draw.choice([np.nan, -np.inf, -100.0]), 0).astype(np.float32)
    others = [None if a is None else adapter.array(a + anything) for a in (old, reference)]
    options = {"beta": beta, "clip_low": low, "clip_high": high, "max_tokens": most, "level": level,
               "ratio_bound": bound, "num_tokens": tokens_of_all, **given.options}  # fmt: skip
    options["token_weights"] = None if factor is None else adapter.array(factor + anything)

    def ours(hidden: Any, weight: Any, bias: Any) -> Any:
        return adapter.ours.linear_policy_loss(
            hidden, weight, classes, gains, *others, bias=bias, kind=kind, **options
        )[0]  # fmt: skip

    def exact(*leaves: Any) -> Any:
        tokens, kept = given.tokens(*leaves)
        before = tokens.detach() if old is None else torch.from_numpy(old).double()
        further, a = tokens - before, torch.from_numpy(gain).double()[:, None]
        if level == "sequence":
            further = (further * kept).sum(-1, keepdim=True) / kept.sum(-1, keepdim=True).clip(min=1)
        ratio = further.exp()
        losses = -torch.minimum(ratio.clip(max=bound) * a if bound else ratio * a, ratio.clip(1 - low, 1 + high) * a)
        if kind == "cispo":
            losses = -ratio.clip(max=1 + high).detach() * a * tokens
        losses = losses if factor is None else losses * torch.from_numpy(factor).double()
        if reference is not None:
            d = torch.from_numpy(reference).double() - tokens
            losses = losses + beta * (d.exp() - d - 1)
        losses = losses * kept
        if kind == "grpo":
            return (losses.sum(-1) / kept.sum(-1).clip(min=1)).mean()
        if kind == "bnpo":
            return losses.sum() / kept.sum().clip(min=1)
        if kind in ("dapo", "cispo"):
            return losses.sum() / (tokens_of_all or kept.sum().clip(min=1))
        return losses.sum() / (shape[0] * (most or shape[1]))

    given.agrees(adapter, ours, exact)


def distillation(adapter: Adapter, draw: Draw, kind: str) -> None:
    given = Problem(draw, draw.choice([0, 1, 3]))
    width, beta = draw.randrange(1, 6), {"kl": 0.0, "reverse": 1.0, "jsd": draw.choice([0.1, 0.5, 0.9])}[kind]
    teacher = [given.numbers(*given.target.shape, width), given.numbers(len(given.weight), width)]
    known, classes = adapter.arrays(teacher), adapter.array(given.target) if draw.random() < 0.7 else None
    hard, soft = draw.choice([0.0, 0.5]) if classes is not None else 0.0, draw.choice([1.0, 0.3])
    shift = given.numbers(len(given.weight)) if draw.random() < 0.5 else np.zeros(len(given.weight), np.float32)
    teacher_bias = adapter.array(shift) if shift.any() else None
    options = {"beta": beta, "temperature": given.temperature, "hard": hard, "soft": soft,
               "chunk_rows": draw.choice([0, 1, 3]), "ignore_index": given.ignored}  # fmt: skip

    def ours(hidden: Any, weight: Any, bias: Any) -> Any:
        given = (hidden, weight, *known, classes, bias)
        return adapter.ours.linear_distillation_loss(*given, teacher_bias=teacher_bias, **options)

    def exact(hidden: Any, weight: Any, bias: Any) -> Any:
        th, tw = (torch.from_numpy(a).double() for a in teacher)
        q = F.log_softmax((hidden @ weight.T + bias) / given.temperature, -1)
        p = F.log_softmax((th @ tw.T + torch.from_numpy(shift).double()) / given.temperature, -1)
        kl = lambda a, b: (a.exp() * (a - b)).sum(-1)  # noqa: E731
        m = (beta * p.exp() + (1 - beta) * q.exp()).log()
        rows = {"kl": kl(p, q), "reverse": kl(q, p), "jsd": beta * kl(p, m) + (1 - beta) * kl(q, m)}[kind]
        if classes is None:
            return soft * rows.mean()
        target = torch.from_numpy(given.target)
        kept = target != given.ignored
        logs = F.log_softmax(hidden @ weight.T + bias, -1).gather(-1, torch.where(kept, target, 0)[..., None])[..., 0]
        return (soft * (rows * kept).sum() - hard * (logs * kept).sum()) / kept.sum()

    given.agrees(adapter, ours, exact)


KINDS = [
    *((preferences, kind) for kind in PREFERENCES if kind not in OTHERS), (other_preferences, "others"),
    *((policies, kind) for kind in POLICIES),
    *((distillation, kind) for kind in ("kl", "reverse", "jsd")),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*(Mean of empty|degrees of freedom):RuntimeWarning")
@pytest.mark.parametrize(("draws", "kind"), KINDS, ids=lambda each: each if isinstance(each, str) else "")
def test_drawn_losses(adapter: Adapter, draws: Callable[..., None], kind: str, drawn: Callable[..., Any]) -> None:
    for seed in drawn(range(3), 0.4):
        try:
            draws(adapter, Draw(f"{kind} {seed}"), kind)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {type(error).__name__}: {error}") from error


def test_slices_of_classes_have_the_loss_of_all(adapter: Adapter, drawn: Callable[..., Any]) -> None:
    """Devices that share the classes: their losses add up, and each has the gradient of its slice."""
    for seed in drawn(range(4), 0.5):
        draw = Draw(seed)
        rng, rows, n = np.random.default_rng(seed), draw.choice([0, 1, 5]), draw.randrange(3, 30)
        logits, ignored = 3 * rng.standard_normal((rows, n)).astype(np.float32), draw.choice([-100, 2])
        target = rng.integers(0, n, rows)
        target[rng.random(rows) < draw.choice([0.0, 0.5, 1.0])] = ignored
        scale, cap, smoothing, z = (draw.choice(a) for a in ([1.0, 0.5], [0.0, 4.0], [0.0, 0.2], [0.0, 0.1]))
        wide = torch.from_numpy(logits).double().requires_grad_()
        scaled = wide * scale if not cap else cap * torch.tanh(wide * scale / cap)
        lse, classes = scaled.logsumexp(-1), torch.from_numpy(target)
        losses = F.cross_entropy(scaled, classes, ignore_index=ignored, reduction="none", label_smoothing=smoothing)
        losses = losses + z * lse.square() * (classes != ignored)
        weights = rng.standard_normal(rows)
        (slope,) = torch.autograd.grad((losses * torch.from_numpy(weights)).sum(), wide)
        cuts = [0, *sorted(draw.sample(range(1, n), draw.randrange(1, 3))), n]
        total, found = np.zeros(rows), []
        for start, stop in pairwise(cuts):
            others = torch.cat([scaled[:, :start], scaled[:, stop:]], -1).logsumexp(-1).detach().numpy()
            own = np.where(target == ignored, -1000, target - start)  # no class of a slice is the ignored one
            options = {"ignore_index": -1000, "label_smoothing": smoothing, "z_loss": z, "classes": n, "softcap": cap,
                       "logit_scale": scale}  # fmt: skip
            arrays = [adapter.array(own), adapter.array(others.astype(np.float32))]
            (loss, *_), (part,) = adapter.value_and_gradients(
                lambda x, arrays=arrays, options=options: adapter.ours.cross_entropy_of_slice(x, *arrays, **options)[0],
                [adapter.array(logits[:, start:stop])], [weights.astype(np.float32)],
            )  # fmt: skip
            total += loss
            found.append(part)
        np.testing.assert_allclose(total, losses.detach().numpy(), rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(np.concatenate(found, -1), slope.numpy(), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", ["preference", "policy", "distillation"])
def test_no_loss_holds_all_logits(adapter: Adapter, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "MIN_BYTES", 1 << 16)
    rng, sequences, tokens, h, n = np.random.default_rng(0), 32, 64, 16, 2048
    given = [rng.standard_normal(s).astype(np.float32) for s in ((sequences, tokens, h), (n, h))]
    target, numbers = (
        adapter.array(a) for a in (rng.integers(0, n, (sequences, tokens)), np.ones(sequences, np.float32))
    )
    teacher = adapter.arrays(given)

    def loss(hidden: Any, weight: Any) -> Any:
        if name == "distillation":
            return adapter.ours.linear_distillation_loss(hidden, weight, *teacher, target)
        if name == "policy":
            return adapter.ours.linear_policy_loss(hidden, weight, target, numbers)[0]
        return adapter.ours.linear_preference_loss(hidden, weight, target, numbers)[0]

    assert adapter.most_memory(loss, adapter.arrays(given)) < sequences * tokens * n * 4
