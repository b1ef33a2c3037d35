"""Configs of the kernels of group norm."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from cute_ops.declaration.config import KernelConfig


class GroupConfig(KernelConfig):
    """How groups of channels spread over threads and CTAs.

    Attributes:
        form: ``smem``: what is read stays in the shared memory of a cluster until it is no longer needed; ``held``: it
            goes to registers, and clusters take several parts, one of which arrives in shared memory; ``passes``: it is
            read again.
        threads: of a CTA.
        cluster: CTAs that share a group, or with channels last some neighbouring groups.
        resident: CTAs that are to fit on an SM together: a cap on registers.
        team: threads that take a channel together; with channels last 0.
        width: channels of a cluster, whole groups, with channels last; else 0.
        vec: channels of a thread, with channels last; else 0.
        keep: whether the gradient to what the activation is of stays in shared memory in fp32, in place of dy: an
            exponential and a quotient for each element are computed once.
        clusters: that run at once, in the form ``held``.
    """

    form: Literal["smem", "held", "passes"]
    threads: int
    cluster: int = 1
    resident: int = 1
    team: int = 0
    width: int = 0
    vec: int = 0
    keep: bool = False
    clusters: int = 0


def groups_of(attrs: Mapping[str, Any], dims: Mapping[str, Any]) -> Any:
    """How many groups of channels: an attribute of the forward, a dim of its gradient's inputs."""
    return attrs.get("groups") or dims["g"]
