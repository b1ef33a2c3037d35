"""Pipelines of stages in shared memory that TMA fills, and their participants, which carry their own state."""

from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass.pipeline import (
    Agent,
    CooperativeGroup,
    PipelineState,
    PipelineTmaAsync,
    PipelineUserType,
    make_pipeline_state,
)

from cute_ops.kernels.tensor_core.sizes import WARP


def tma_pipeline(mbarriers, stages, stage_bytes, consumers, cluster=None):
    """A pipeline that one thread fills by TMA.

    Args:
        mbarriers: two of each stage, see :meth:`SharedMemory.mbarriers`.
        stages: of the pipeline.
        stage_bytes: what TMA writes to a stage.
        consumers: threads of a CTA that read a stage, whole warps. One thread of each warp releases it.
        cluster: CTAs ``(m, n, k)`` of a cluster whose rows and columns share what they load: a stage is free once all
            of them have released it.
    """
    arrivals, shared = consumers // WARP, {}
    if cluster is not None:
        arrivals = consumers
        shared = {"cta_layout_vmnk": cute.make_layout((1, *cluster)), "enable_multicast_signaling": True}
    return PipelineTmaAsync.create(
        num_stages=stages, producer_group=CooperativeGroup(Agent.Thread),
        consumer_group=CooperativeGroup(Agent.Thread, arrivals), tx_count=stage_bytes, barrier_storage=mbarriers,
        defer_sync=True, **shared,
    )  # fmt: skip


class Stage(NamedTuple):
    """A stage that a producer may fill: its index, and the mbarrier that TMA completes."""

    index: Any
    full: Any


class Participant:
    """One side of a pipeline. It goes round ``stages`` neighbouring stages from ``first`` on, by default all.

    Loops carry its state, as that of the compiler's own ``PipelineState``.
    """

    kind: PipelineUserType

    def __init__(self, pipeline, stages=None, first=None, state=None):
        self.pipeline, self.first = pipeline, first
        self.state = state or make_pipeline_state(self.kind, stages or pipeline.num_stages)

    def advance(self, count=1):
        """Skip stages."""
        self.state.advance(count)

    def clone(self):
        return type(self)(self.pipeline, None, self.first, self.state.clone())

    @property
    def at(self):
        """The state, as the pipeline counts stages."""
        state = self.state
        if self.first is None:
            return state
        return PipelineState(state.stages, state.count, state.index + self.first, state.phase)

    def __get_mlir_types__(self):
        return self.state.__get_mlir_types__()

    def __extract_mlir_values__(self):
        return self.state.__extract_mlir_values__()

    def __new_from_mlir_values__(self, values):
        return type(self)(self.pipeline, None, self.first, self.state.__new_from_mlir_values__(values))


class Producer(Participant):
    """The side that fills stages."""

    kind = PipelineUserType.Producer

    def acquire_and_advance(self, stage_bytes=None):
        """Wait until a stage is free, and expect TMA's bytes in it, by default those of the pipeline."""
        at = self.at.clone()
        stage = Stage(at.index, self.pipeline.producer_get_barrier(at))
        if stage_bytes is None:
            self.pipeline.producer_acquire(at)
        else:
            self.pipeline.sync_object_empty.wait(at.index, at.phase)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(stage.full, stage_bytes)
        self.advance()
        return stage

    def tail(self):
        """Wait until consumers, of other CTAs too, have released what was filled."""
        self.pipeline.producer_tail(self.at)


class Consumer(Participant):
    """The side that reads stages."""

    kind = PipelineUserType.Consumer

    def wait(self):
        """Wait until the stage is full; its index."""
        at = self.at
        self.pipeline.consumer_wait(at)
        return at.index

    def release_and_advance(self):
        """Let the stage be filled again."""
        self.pipeline.consumer_release(self.at)
        self.advance()
