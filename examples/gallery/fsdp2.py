"""FSDP2: the GPT of nanogpt.py with its parameters sharded over ranks. On a CPU the ranks talk through gloo.

torchrun --nproc-per-node 2 examples/gallery/fsdp2.py --steps 20
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from nanogpt import GPT
from text import windows
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import init_device_mesh


def main(arguments: list[str] | None = None) -> list[float]:
    """Train; returns the losses, means over the ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args(arguments)
    if "RANK" not in os.environ:
        parser.error("ranks are started by torchrun --nproc-per-node 2 examples/gallery/fsdp2.py")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh(device, (ranks,))
    torch.manual_seed(0)  # the same weights on every rank, of which each keeps its share
    model = GPT().to(device)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=device == "cuda"), []
    for step, window in enumerate(windows(batch=16, seqlen=64, steps=options.steps)):
        mine = torch.from_numpy(window).to(device).chunk(ranks)[rank]
        loss = model(mine[:, :-1], mine[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach() / ranks
        dist.all_reduce(total)
        losses.append(total.item())
        if rank == 0 and (step % 10 == 0 or step == options.steps - 1):
            print(f"step {step:4d}  loss {losses[-1]:.3f} nats per byte on {ranks} ranks")
    dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    main()
