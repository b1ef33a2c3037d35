"""A Hugging Face Llama (random weights): one call replaces its norms and MLPs by ours; logits and gradients compared.

python examples/llama/hugging_face.py
"""

from __future__ import annotations

import copy
import sys

import torch
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

import cute_ops_torch

# Largest error relative to the largest value of the tensor, in float32.
TOLERANCE = 1e-4


def small_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512, hidden_size=128, intermediate_size=352, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def run(model: LlamaForCausalLM, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """Logits, loss and the gradient of every weight."""
    loss = model(tokens, labels=tokens).loss  # from the hidden states, once patched: no logits exist
    loss.backward()
    with torch.no_grad():
        logits = model(tokens).logits
    grads = {f"gradient of {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": logits, "loss": loss.detach()} | grads


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return ((got - expected).abs().max() / expected.abs().max()).item()


def main() -> int:
    """Compare; returns the exit code."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = small_llama().to(device)
    patched = copy.deepcopy(model)
    replaced = cute_ops_torch.patch(patched)
    tokens = torch.randint(0, 512, (2, 200), device=device)
    expected, got = run(model, tokens), run(patched, tokens)
    if got.keys() != expected.keys():
        raise RuntimeError(f"the patched model has other weights: {got.keys() ^ expected.keys()}")

    errors = {name: relative_error(got[name], expected[name]) for name in expected}
    worst = sorted((n for n in errors if n.startswith("gradient")), key=lambda n: -errors[n])[:3]
    table = Table("LlamaForCausalLM, patched against original", "relative error", f"at most {TOLERANCE}")
    for name in ("logits", "loss", *worst):
        table.add_row(name, f"{errors[name]:.1e}", "yes" if errors[name] <= TOLERANCE else "NO")
    console = Console()
    console.print(table)
    ran = "kernels" if device.type == "cuda" else "references: there is no GPU here"
    console.print(f"replaced {len(replaced)} modules by {', '.join(sorted({r.op for r in replaced}))}, run as {ran}")
    console.print(f"compared {len(errors)} tensors; shown: logits, loss and the three worst gradients")
    return 0 if all(e <= TOLERANCE for e in errors.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
