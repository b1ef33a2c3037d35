"""What the convolution kernels are configured with."""

from __future__ import annotations

from dataclasses import dataclass

from cute_ops.config import KernelConfig


@dataclass(frozen=True)
class ConvConfig(KernelConfig):
    """How sequences and channels spread over threads.

    Attributes:
        threads: of a CTA at most.
        channels: that a thread holds at most: as many as alignment allows.
        ahead: rows that a thread loads ahead, at least.
        span: rows that a thread walks through at most; fewer where the GPU has room for more threads.
        resident: CTAs that are to fit on an SM together: a cap on registers.
        sms: SMs of the GPU: spans become shorter until there are CTAs for all of them.
    """

    threads: int
    channels: int
    ahead: int
    span: int
    resident: int
    sms: int

    @property
    def ctas(self) -> int:
        """CTAs that run at once."""
        return self.resident * self.sms
