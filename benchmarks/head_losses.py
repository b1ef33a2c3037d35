"""Losses of preferences, policies and distillation on a linear head, forward and backward: ours beside Liger's.

Both take the same hidden states, weights and targets in turns, in one process; a sample is one forward and backward,
timed by events. `peak_mb` is what the call holds beyond its inputs at most, the gradients that it returns among them.
`loss` and `relative_error` (of the hidden states' gradient, against Liger's) say that they compute the same. Both
compute a reference model's log-probabilities within the call.

    python benchmarks/head_losses.py --out out/benchmarks
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from common import Table, parse, read
from linear_cross_entropy import Run, in_turns
from rich.console import Console

import cute_ops_torch as ops

COLUMNS = (
    "kind", "contender", "sequences", "tokens", "hidden", "vocabulary", "dtype", "status", "ms", "ms_min", "ms_max",
    "peak_mb", "loss", "relative_error",
)  # fmt: skip
SHAPES = ((8, 1024, 2048, 128256), (8, 1024, 4096, 32000))
OURS, LIGER = "ours (torch)", "Liger"
BETA, GAMMA, HARD = 0.1, 0.5, 0.5
Tensor = torch.Tensor


class Inputs(NamedTuple):
    """Hidden states ``[sequences, tokens, hidden]`` and weights of a model and of another one without gradients."""

    hidden: Tensor
    weight: Tensor
    target: Tensor
    other: Tensor
    other_weight: Tensor
    desirable: Tensor
    advantages: Tensor


def inputs(sequences: int, tokens: int, hidden: int, vocabulary: int, device: torch.device) -> Inputs:
    """Logits of the size 1."""
    generator = torch.Generator(device).manual_seed(0)
    options = {"dtype": torch.bfloat16, "device": device, "generator": generator}
    x, other = (torch.randn(sequences, tokens, hidden, **options) for _ in range(2))  # type: ignore[call-overload]
    w, v = (torch.randn(vocabulary, hidden, **options).mul_(hidden**-0.5) for _ in range(2))  # type: ignore[call-overload]
    target = torch.randint(vocabulary, (sequences, tokens), device=device, generator=generator)
    target[:, : tokens // 8] = -100  # a prompt
    desirable = torch.arange(sequences, device=device) % 2 == 0
    advantages = torch.randn(sequences, device=device, generator=generator)
    return Inputs(x.requires_grad_(), w.requires_grad_(), target, other, v, desirable, advantages)


def ours(kind: str, given: Inputs) -> Tensor:
    x, w, target = given[:3]
    if kind in ("distillation", "jensen-shannon"):
        teacher = (given.other.flatten(0, 1), given.other_weight, target.flatten())
        beta = 0.5 if kind == "jensen-shannon" else 0.0
        return ops.linear_distillation_loss(x.flatten(0, 1), w, *teacher, beta=beta, hard=HARD, soft=1 - HARD)
    if kind == "grpo":
        return ops.linear_policy_loss(x, w, target, given.advantages, beta=0.0)[0]
    reference = None
    if kind in ("dpo", "kto"):
        with torch.no_grad():
            reference = ops.linear_log_probs(given.other, given.other_weight, target)
    more = {"orpo": {"alpha": 1.0}, "simpo": {"gamma": GAMMA}, "kto": {"desirable": given.desirable}}.get(kind, {})
    return ops.linear_preference_loss(x, w, target, reference, kind=kind, beta=BETA, **more)[0]


def of_liger(kind: str) -> Callable[[Inputs], Tensor]:
    from liger_kernel import chunked_loss

    other: dict[str, Callable[[Inputs], Tensor]] = {
        "dpo": lambda g: chunked_loss.LigerFusedLinearDPOLoss(beta=BETA)(
            g.weight, g.hidden, g.target, None, g.other, g.other_weight
        ),
        "orpo": lambda g: chunked_loss.LigerFusedLinearORPOLoss(beta=BETA)(g.weight, g.hidden, g.target),
        "simpo": lambda g: chunked_loss.LigerFusedLinearSimPOLoss(beta=BETA, gamma=GAMMA, compute_nll_loss=False)(
            g.weight, g.hidden, g.target
        ),
        "kto": lambda g: chunked_loss.LigerFusedLinearKTOLoss(beta=BETA, use_ref_model=True)(
            g.hidden, g.weight, g.target, None, g.desirable, g.other, g.other_weight, None,
            torch.zeros((), device=g.hidden.device),
        ),
        "grpo": lambda g: chunked_loss.LigerFusedLinearGRPOLoss(beta=0.0, use_ref_model=False, loss_type="grpo")(
            g.hidden, g.weight, g.target.clamp_min(0), (g.target >= 0).long(), g.advantages
        ),
        "jensen-shannon": lambda g: chunked_loss.LigerFusedLinearJSDLoss(HARD, 1 - HARD)(
            g.hidden.flatten(0, 1), g.weight, g.other.flatten(0, 1), g.other_weight, g.target.flatten()
        ),
        "distillation": lambda g: chunked_loss.LigerFusedLinearJSDLoss(HARD, 1 - HARD, beta=0.0)(
            g.hidden.flatten(0, 1), g.weight, g.other.flatten(0, 1), g.other_weight, g.target.flatten()
        ),
    }  # fmt: skip
    return other[kind]


KINDS = ("dpo", "orpo", "simpo", "kto", "grpo", "jensen-shannon", "distillation")


def measure(table: Table, kind: str, given: Inputs, rounds: int, names: list[str]) -> None:
    def of(name: str) -> Run:
        return partial(partial(ours, kind) if name == OURS else of_liger(kind), given)

    sizes = *given.hidden.shape, len(given.weight)
    case = {"kind": kind, **dict(zip(("sequences", "tokens", "hidden", "vocabulary"), sizes, strict=True))}
    makers = {name: partial(of, name) for name in (LIGER, OURS) if name in names}
    in_turns(table, case, makers, given.hidden, given.weight, rounds)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/benchmarks"), help="folder for head_losses.csv")
    parser.add_argument("--rounds", type=int, default=7, help="samples of each")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--contenders", nargs="+", default=[OURS, LIGER], choices=[OURS, LIGER])
    options = parse(parser, arguments, torch.cuda.is_available())
    device = torch.device("cpu" if options.cpu_smoke else "cuda")
    path = options.out / "head_losses.csv"
    table = Table(path, COLUMNS)
    for shape in ((4, 16, 32, 512),) if options.cpu_smoke else SHAPES:
        given = inputs(*shape, device)
        for kind in options.kinds:
            measure(table, kind, given, options.rounds, options.contenders)
    console = Console(width=160, highlight=False)
    for row in read(path):
        shown = ("kind", "contender", "vocabulary", "ms", "peak_mb", "loss", "relative_error", "status")
        console.print(" | ".join(row[c] for c in shown))


if __name__ == "__main__":
    main()
