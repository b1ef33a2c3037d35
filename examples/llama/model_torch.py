"""The decoder in PyTorch. ``Ops`` is all that differs between our ops and PyTorch's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from config import ADAM_EPS, BETAS, EPS, LEARNING_RATE, WEIGHT_DECAY, Config, initial_weights, rotary
from torch import Tensor

import cute_ops_torch


class Ops(NamedTuple):
    rmsnorm: Callable[..., Tensor]
    add_rmsnorm: Callable[..., tuple[Tensor, Tensor]]
    silu_mul: Callable[[Tensor, Tensor], Tensor]


def own_rmsnorm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, eps)


def own_add_rmsnorm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    residual = x + residual
    return own_rmsnorm(residual, weight, eps), residual


def own_silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


OPS = {
    "own": Ops(own_rmsnorm, own_add_rmsnorm, own_silu_mul),
    "our": Ops(cute_ops_torch.rmsnorm, cute_ops_torch.add_rmsnorm, cute_ops_torch.silu_mul),
}


class Decoder(torch.nn.Module):
    """Byte-level Llama: RMSNorm, rotary embedding, causal attention, SwiGLU, tied embeddings."""

    def __init__(self, config: Config, ops: Ops) -> None:
        super().__init__()
        self.config, self.ops = config, ops
        for name, value in initial_weights(config).items():
            self.register_parameter(name.replace(".", "_"), torch.nn.Parameter(torch.from_numpy(value)))
        cos, sin = rotary(config)
        self.register_buffer("cos", torch.from_numpy(cos))
        self.register_buffer("sin", torch.from_numpy(sin))

    def forward(self, window: Tensor) -> Tensor:
        """The mean loss, in nats per byte, of ``window: int64[batch, seqlen + 1]``."""
        tokens, following = window[:, :-1], window[:, 1:]
        residual = F.embedding(tokens, self.embedding)
        x = self.ops.rmsnorm(residual, self.layers_0_attention_norm, eps=EPS)
        for i in range(self.config.layers):
            weight = {n: getattr(self, f"layers_{i}_{n}") for n in ("qkv", "attention_out", "gate", "up", "down")}
            x = self.attention(F.linear(x, weight["qkv"]))
            x = F.linear(x, weight["attention_out"])
            x, residual = self.ops.add_rmsnorm(x, residual, getattr(self, f"layers_{i}_mlp_norm"), eps=EPS)
            x = self.ops.silu_mul(F.linear(x, weight["gate"]), F.linear(x, weight["up"]))
            x = F.linear(x, weight["down"])
            last = i + 1 == self.config.layers
            norm = self.norm if last else getattr(self, f"layers_{i + 1}_attention_norm")
            x, residual = self.ops.add_rmsnorm(x, residual, norm, eps=EPS)
        logits = F.linear(x, self.embedding).float()
        return F.cross_entropy(logits.flatten(0, 1), following.flatten())

    def attention(self, qkv: Tensor) -> Tensor:
        c = self.config
        q, k, v = qkv.view(c.batch, c.seqlen, 3, c.heads, c.headdim).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(self.rotate(q), self.rotate(k), v, is_causal=True)
        return out.transpose(1, 2).reshape(c.batch, c.seqlen, c.hidden)

    def rotate(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * self.cos - b * self.sin, b * self.cos + a * self.sin], dim=-1)


def make_step(
    config: Config, ops: str, compiled: bool = False, dtype: str = "float32"
) -> Callable[[np.ndarray], float]:
    """A training step: takes a batch, updates the weights, returns the loss."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = Decoder(config, OPS[ops]).to(device, getattr(torch, dtype))
    forward = torch.compile(model, fullgraph=True) if compiled else model
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=BETAS, eps=ADAM_EPS, weight_decay=WEIGHT_DECAY
    )

    def step(window: np.ndarray) -> float:
        loss = forward(torch.from_numpy(window).to(device, torch.int64))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step
