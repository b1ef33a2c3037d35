"""What both models share: sizes, initial weights, rotary tables, hyperparameters. NumPy only."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

EPS = 1e-5
LEARNING_RATE, BETAS, ADAM_EPS, WEIGHT_DECAY = 1e-3, (0.9, 0.95), 1e-8, 0.1


@dataclass(frozen=True)
class Config:
    """Sizes of a decoder and of its batches."""

    layers: int
    hidden: int
    mlp: int
    heads: int
    seqlen: int
    batch: int
    vocabulary: int = 256

    @property
    def tokens(self) -> int:
        """Tokens in one step."""
        return self.batch * self.seqlen

    @property
    def headdim(self) -> int:
        return self.hidden // self.heads


SMALL = Config(layers=2, hidden=128, mlp=352, heads=4, seqlen=128, batch=8)
LARGE = Config(layers=8, hidden=2048, mlp=5632, heads=16, seqlen=2048, batch=8)


def initial_weights(config: Config, seed: int = 0) -> dict[str, np.ndarray]:
    """Weights by name, ``(out, in)`` as PyTorch stores them; the embedding is also the output layer."""
    rng = np.random.default_rng(seed)
    c = config

    def normal(*shape: int, scale: float = 0.02) -> np.ndarray:
        return (rng.standard_normal(shape) * scale).astype(np.float32)

    weights = {"embedding": normal(c.vocabulary, c.hidden), "norm": np.ones(c.hidden, np.float32)}
    for i in range(c.layers):
        narrow = 0.02 / (2 * c.layers) ** 0.5  # what adds to the residual stream starts small
        weights |= {
            f"layers.{i}.attention_norm": np.ones(c.hidden, np.float32),
            f"layers.{i}.qkv": normal(3 * c.hidden, c.hidden),
            f"layers.{i}.attention_out": normal(c.hidden, c.hidden, scale=narrow),
            f"layers.{i}.mlp_norm": np.ones(c.hidden, np.float32),
            f"layers.{i}.gate": normal(c.mlp, c.hidden),
            f"layers.{i}.up": normal(c.mlp, c.hidden),
            f"layers.{i}.down": normal(c.hidden, c.mlp, scale=narrow),
        }
    return weights


def rotary(config: Config) -> tuple[np.ndarray, np.ndarray]:
    """Cosines and sines, ``float32[seqlen, headdim / 2]``."""
    frequency = 10000.0 ** (-np.arange(0, config.headdim, 2) / config.headdim)
    angle = np.arange(config.seqlen)[:, None] * frequency
    return np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
