"""LoRA on a patched Hugging Face model: for the frozen weights of norms and head no gradient is computed.

python examples/gallery/lora.py --steps 40
"""

from __future__ import annotations

import argparse

import torch
from text import VOCABULARY, windows
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import cute_ops_torch
from cute_ops_torch.optim import AdamW

ADAPTED = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class LoRA(nn.Module):
    """``linear(x) + scale * x @ down.T @ up.T``, of which ``down`` and ``up`` are trained."""

    def __init__(self, linear: nn.Linear, rank: int, scale: float) -> None:
        super().__init__()
        self.linear, self.scale = linear, scale
        self.down = nn.Parameter(torch.randn(rank, linear.in_features) / linear.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(linear.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.scale * (x @ self.down.T @ self.up.T)


def adapt(model: nn.Module, rank: int = 8, scale: float = 2.0) -> list[nn.Parameter]:
    """Freeze a model and put adapters around its projections; returns what is left to train."""
    model.requires_grad_(False)
    for module in list(model.modules()):
        for name, child in module.named_children():
            if name in ADAPTED:
                setattr(module, name, LoRA(child, rank, scale))
    return [p for p in model.parameters() if p.requires_grad]


def small_llama() -> LlamaForCausalLM:
    """Stands in for a trained model: ``LlamaForCausalLM.from_pretrained(...)``."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=176, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def main(arguments: list[str] | None = None) -> list[float]:
    """Train the adapters; returns the losses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = small_llama()
    replaced, trained = cute_ops_torch.patch(model), adapt(model)
    model.to(device)
    count, whole = sum(p.numel() for p in trained), sum(p.numel() for p in model.parameters())
    print(f"{len(replaced)} modules patched; {count:,} of {whole:,} parameters are trained")
    optimizer, losses = AdamW(trained, lr=1e-2), []
    for step, window in enumerate(windows(batch=8, seqlen=64, steps=options.steps)):
        tokens = torch.from_numpy(window).to(device)
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % 10 == 0 or step == options.steps - 1:
            print(f"step {step:4d}  loss {losses[-1]:.3f}")
    return losses


if __name__ == "__main__":
    main()
