"""Configs of the rotary kernels."""

from __future__ import annotations

from cute_ops.declaration.config import KernelConfig


class RotaryConfig(KernelConfig):
    """Threads of a CTA, and heads of a token that one thread works on."""

    threads: int
    heads_per_thread: int


class RotaryBackwardConfig(RotaryConfig):
    """Persistent: ``resident`` CTAs on each of the GPU's SMs."""

    resident: int
