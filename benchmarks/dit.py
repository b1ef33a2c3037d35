"""A diffusion transformer (Peebles and Xie, 2023): latents in patches, and layers that a time and a class modulate.

It is written as model builders write it: layer norms without weights, ``x * (1 + scale) + shift``, gates on what each
layer adds, and ``scaled_dot_product_attention``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Config:
    """Sizes; those of DiT-XL/2 by default, but for the number of layers."""

    hidden_size: int = 1152
    num_hidden_layers: int = 4
    num_attention_heads: int = 16
    num_channels: int = 4
    image_size: int = 32
    patch_size: int = 2
    num_labels: int = 1000
    frequencies: int = 256
    model_type: str = "dit"


class Output(NamedTuple):
    loss: Tensor


class Layer(nn.Module):
    """Attention and an MLP; both read a modulated norm and are added times a gate."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        n = config.hidden_size
        self.heads = config.num_attention_heads
        self.norm1, self.norm2 = (nn.LayerNorm(n, eps=1e-6, elementwise_affine=False) for _ in range(2))
        self.qkv, self.proj = nn.Linear(n, 3 * n), nn.Linear(n, n)
        self.up, self.down = nn.Linear(n, 4 * n), nn.Linear(4 * n, n)
        self.modulation = nn.Linear(n, 6 * n)

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(F.silu(c)).unsqueeze(1).chunk(6, dim=-1)
        x = x + gate1 * self.attend(self.norm1(x) * (1 + scale1) + shift1)
        y = self.up(self.norm2(x) * (1 + scale2) + shift2)
        return x + gate2 * self.down(F.gelu(y, approximate="tanh"))

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2))


class DiT(nn.Module):
    """The noise that was added to latents, and the mean square of what it is off by."""

    config_class = Config

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config, n, p = config, config.hidden_size, config.patch_size
        patches = (config.image_size // p) ** 2
        self.patches = nn.Conv2d(config.num_channels, n, p, stride=p)
        self.positions = nn.Parameter(0.02 * torch.randn(patches, n))
        self.times = nn.Sequential(nn.Linear(config.frequencies, n), nn.SiLU(), nn.Linear(n, n))
        self.classes = nn.Embedding(config.num_labels + 1, n)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.LayerNorm(n, eps=1e-6, elementwise_affine=False)
        self.modulation, self.head = nn.Linear(n, 2 * n), nn.Linear(n, p * p * config.num_channels)

    @property
    def device(self) -> torch.device:
        return self.positions.device

    def forward(self, latents: Tensor, times: Tensor, labels: Tensor, noise: Tensor) -> Output:
        c = self.times(self.waves(times).to(latents.dtype)) + self.classes(labels)
        x = self.patches(latents).flatten(2).transpose(1, 2) + self.positions
        for layer in self.layers:
            x = layer(x, c)
        shift, scale = self.modulation(F.silu(c)).unsqueeze(1).chunk(2, dim=-1)
        found = self.head(self.norm(x) * (1 + scale) + shift)
        side, p = self.config.image_size // self.config.patch_size, self.config.patch_size
        found = found.unflatten(1, (side, side)).unflatten(-1, (p, p, -1)).permute(0, 5, 1, 3, 2, 4)
        return Output(F.mse_loss(found.reshape(noise.shape).float(), noise.float()))

    def waves(self, times: Tensor) -> Tensor:
        half = self.config.frequencies // 2
        rates = torch.exp(-math.log(10000) / half * torch.arange(half, device=times.device))
        angles = times[:, None].float() * rates
        return torch.cat([angles.cos(), angles.sin()], dim=-1)
