"""How torch shards a Llama of Hugging Face over ranks, for ``parallelize_module``; ``cute_ops_torch.patch`` before it
keeps its ops. ``lm_head`` is not in the plan: shard its weight by rows, ``[Shard(0)]``, so that the loss stays sharded.
"""

from __future__ import annotations

from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)


def sequence_parallel() -> dict[str, ParallelStyle]:
    """Norms have slices of the sequence, projections heads or features."""
    rows = RowwiseParallel(output_layouts=Shard(1), use_local_output=False)
    return {
        "model.embed_tokens": RowwiseParallel(
            input_layouts=Replicate(), output_layouts=Shard(1), use_local_output=False
        ),
        "model.norm": SequenceParallel(),
        "model.layers.*.input_layernorm": SequenceParallel(),
        "model.layers.*.post_attention_layernorm": SequenceParallel(),
        "model.layers.*.self_attn": PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": Shard(1)},
            desired_input_kwarg_layouts={"hidden_states": Replicate()},
            use_local_output=True,
        ),
        "model.layers.*.mlp": PrepareModuleInput(
            input_layouts=Shard(1), desired_input_layouts=Replicate(), use_local_output=True
        ),
        **{f"model.layers.*.self_attn.{n}_proj": ColwiseParallel() for n in "qkv"},
        **{f"model.layers.*.mlp.{n}_proj": ColwiseParallel() for n in ("gate", "up")},
        "model.layers.*.self_attn.o_proj": rows,
        "model.layers.*.mlp.down_proj": rows,
    }
