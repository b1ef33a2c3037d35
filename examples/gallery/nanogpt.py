"""A GPT-2 in PyTorch, trained on bytes: our layer norms, GELU, loss and optimizer around PyTorch's attention.

python examples/gallery/nanogpt.py --steps 100 --compile
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from text import VOCABULARY, windows
from torch import Tensor, nn

import cute_ops_torch
from cute_ops_torch.nn import LayerNorm
from cute_ops_torch.optim import AdamW


class Block(nn.Module):
    """Causal attention and an MLP, each after a layer norm and added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.mlp_norm = LayerNorm(width), LayerNorm(width)
        self.qkv, self.attention_out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, seqlen, width = x.shape
        q, k, v = self.qkv(self.attention_norm(x)).view(batch, seqlen, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attention_out(mixed.transpose(1, 2).reshape(batch, seqlen, width))
        return x + self.down(cute_ops_torch.gelu(self.up(self.mlp_norm(x))))


class GPT(nn.Module):
    """Learned positions, blocks, and the embedding again as the head."""

    def __init__(self, width: int = 64, heads: int = 4, layers: int = 2, seqlen: int = 64) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(seqlen, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = LayerNorm(width)
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The mean loss, in nats per byte; the logits never exist as a whole."""
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        hidden = self.norm(self.blocks(x))
        return cute_ops_torch.linear_cross_entropy(hidden, self.tokens.weight, targets)


def main(arguments: list[str] | None = None) -> list[float]:
    """Train; returns the losses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--compile", action="store_true", help="by torch.compile")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = GPT().to(device)
    optimizer = AdamW(model.parameters(), lr=3e-3)
    loss_of = torch.compile(model, fullgraph=True) if options.compile else model
    losses = []
    for step, window in enumerate(windows(batch=16, seqlen=64, steps=options.steps)):
        batch = torch.from_numpy(window).to(device)
        loss = loss_of(batch[:, :-1], batch[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % 20 == 0 or step == options.steps - 1:
            print(f"step {step:4d}  loss {losses[-1]:.3f} nats per byte")
    return losses


if __name__ == "__main__":
    main()
