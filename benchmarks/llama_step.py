"""One training step of a Llama-shaped decoder: tokens per second and peak memory.

The model is Hugging Face's ``LlamaForCausalLM`` with random weights (the layers of Llama 3.2 1B, eight of them), in
bfloat16, with SDPA attention and PyTorch's fused AdamW ("ours + AdamW": with ours). Every contender trains from the
same weights on the same tokens in a process of its own, because Liger changes Hugging Face's modules for good. Their
first losses are compared.

python benchmarks/llama_step.py --out out/benchmarks
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from common import Table, read, spread
from rich.console import Console
from rich.table import Table as View

CONTENDERS = (
    "eager", "torch.compile", "Liger", "Liger + compile", "ours", "ours + AdamW", "ours + compile",
    "graph pass + compile", "ours + graph pass + compile",
)  # fmt: skip
COLUMNS = (
    "contender", "batch", "seqlen", "tokens_per_s", "tokens_per_s_min", "tokens_per_s_max", "ms", "peak_gb",
    "loss_first", "loss_last",
)  # fmt: skip
# The largest difference of two contenders' losses after the same steps, in nats.
TOLERANCE = 0.02


def build(seed: int = 0, small: bool = False) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 8, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192,
    }  # fmt: skip
    if small:
        sizes |= {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2, "vocab_size": 512}
        sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(seed)
    config = LlamaConfig(tie_word_embeddings=False, attn_implementation="sdpa", use_cache=False, **sizes)
    with torch.device("cpu" if small else "cuda"):
        return LlamaForCausalLM(config).to(torch.bfloat16).train()


def prepare(contender: str, model: Any) -> Any:
    """The contender's form of the model."""
    parts = contender.split(" + ")
    if "Liger" in parts:
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama(
            rope=True, rms_norm=True, swiglu=True, fused_linear_cross_entropy=True, cross_entropy=False, model=model
        )
    if "ours" in parts:
        import cute_ops_torch

        cute_ops_torch.patch(model)
    if "graph pass" in parts:  # without "ours", the model as it is
        from cute_ops_torch import inductor

        inductor.enable(devices=(next(model.parameters()).device.type,))
    return torch.compile(model) if parts[-1] in ("compile", "torch.compile") else model


def optimizer_of(contender: str, model: Any, small: bool) -> torch.optim.Optimizer:
    if contender.endswith(" + AdamW"):
        from cute_ops_torch.optim import AdamW

        return AdamW(model.parameters(), lr=1e-4)
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=not small)


def measure(contender: str, batch: int, seqlen: int, steps: int, rounds: int, small: bool) -> dict[str, Any]:
    """Train a few steps; medians over rounds."""
    model = build(small=small)
    device = next(model.parameters()).device
    tokens = torch.randint(0, model.config.vocab_size, (batch, seqlen), device=device)
    run = prepare(contender, model)
    optimizer = optimizer_of(contender, model, small)

    def step() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = run(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        return loss.detach()

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    losses = [step() for _ in range(4)]  # compiles, too
    wait()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        for _ in range(steps):
            last = step()
        wait()
        times.append((time.perf_counter() - begin) / steps)
    peak = torch.cuda.max_memory_allocated() / 1e9 if device.type == "cuda" else 0.0
    seconds = spread(times)
    count = batch * seqlen
    return {
        "contender": contender, "batch": batch, "seqlen": seqlen, "tokens_per_s": count / seconds.median,
        "tokens_per_s_min": count / seconds.high, "tokens_per_s_max": count / seconds.low, "ms": seconds.median * 1e3,
        "peak_gb": peak, "loss_first": losses[0].item(), "loss_last": last.item(),
    }  # fmt: skip


def show(path: Path, console: Console) -> None:
    rows = read(path)
    view = View("contender", "tokens/s", "ms per step", "peak GB", "first loss", title="Llama-shaped training step")
    for row in rows:
        figures = (f"{float(row['tokens_per_s']):,.0f}", row["ms"], row["peak_gb"], row["loss_first"])
        view.add_row(row["contender"], *figures)
    console.print(view)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/benchmarks"), help="folder for llama_step.csv")
    parser.add_argument("--contenders", nargs="+", default=list(CONTENDERS), choices=CONTENDERS)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seqlen", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=5, help="steps of one sample")
    parser.add_argument("--rounds", type=int, default=5, help="samples")
    parser.add_argument("--cpu-smoke", action="store_true", help="a tiny model on the CPU: checks this file only")
    parser.add_argument("--one", choices=CONTENDERS, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    sizes = (options.batch, options.seqlen, options.steps, options.rounds, options.cpu_smoke)
    if options.one:
        print(json.dumps(measure(options.one, *sizes)))
        return 0

    console = Console(width=110)
    path = options.out / "llama_step.csv"
    table = Table(path, COLUMNS)
    losses = []
    for contender in options.contenders:
        command = [sys.executable, __file__, "--one", contender, "--batch", str(options.batch)]
        command += ["--seqlen", str(options.seqlen), "--steps", str(options.steps), "--rounds", str(options.rounds)]
        command += ["--cpu-smoke"] if options.cpu_smoke else []
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode:
            console.print(f"{contender}: failed\n{result.stderr[-2000:]}")
            continue
        row = json.loads(result.stdout.splitlines()[-1])
        losses.append(row["loss_first"])
        table.add(row)
    show(path, console)
    if losses and max(losses) - min(losses) > TOLERANCE:
        console.print(f"[red]the first losses differ by {max(losses) - min(losses):.3g} nats[/red]")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
