"""Encoders of ``torch.nn.MultiheadAttention``: a vision transformer written as torchvision's is, and
``torch.nn.TransformerEncoder`` over padded batches of tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Config:
    """Sizes; those of ViT-B/16 by default, but for the number of layers."""

    hidden_size: int = 768
    num_hidden_layers: int = 6
    num_attention_heads: int = 12
    num_channels: int = 3
    image_size: int = 224
    patch_size: int = 16
    num_labels: int = 1000
    vocab_size: int = 30522
    model_type: str = "encoder"


class Output(NamedTuple):
    loss: Tensor


class Block(nn.Module):
    """Attention and an MLP, which read norms."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        n = config.hidden_size
        self.norm1, self.norm2 = (nn.LayerNorm(n, eps=1e-6) for _ in range(2))
        self.attention = nn.MultiheadAttention(n, config.num_attention_heads, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(n, 4 * n), nn.GELU(), nn.Dropout(0.0), nn.Linear(4 * n, n), nn.Dropout(0.0))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    """The loss of images' classes. Parameters of float32 run under autocast."""

    config_class = Config

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config, n, p = config, config.hidden_size, config.patch_size
        self.patches = nn.Conv2d(config.num_channels, n, p, stride=p)
        self.token = nn.Parameter(0.02 * torch.randn(1, 1, n))
        self.positions = nn.Parameter(0.02 * torch.randn((config.image_size // p) ** 2 + 1, n))
        self.blocks = nn.Sequential(*(Block(config) for _ in range(config.num_hidden_layers)))
        self.norm, self.head = nn.LayerNorm(n, eps=1e-6), nn.Linear(n, config.num_labels)

    @property
    def device(self) -> torch.device:
        return self.positions.device

    def forward(self, pixel_values: Tensor, labels: Tensor) -> Output:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.token.dtype == torch.float32):
            x = self.patches(pixel_values).flatten(2).transpose(1, 2)
            x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.positions
            return Output(F.cross_entropy(self.head(self.norm(self.blocks(x))[:, 0]).float(), labels))


class Tokens(nn.Module):
    """The loss of tokens that are hidden, of sequences with padding behind them (token 0)."""

    config_class = Config

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config, n = config, config.hidden_size
        self.embedding = nn.Embedding(config.vocab_size, n)
        layer = nn.TransformerEncoderLayer(
            n, config.num_attention_heads, 4 * n, dropout=0.0, activation="gelu", batch_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, config.num_hidden_layers, enable_nested_tensor=False)
        self.head = nn.Linear(n, config.vocab_size)

    @property
    def device(self) -> torch.device:
        return self.head.weight.device

    def forward(self, input_ids: Tensor, labels: Tensor) -> Output:
        x = self.encoder(self.embedding(input_ids), src_key_padding_mask=input_ids == 0)
        return Output(F.cross_entropy(self.head(x).flatten(0, 1).float(), labels.flatten(), ignore_index=-100))
