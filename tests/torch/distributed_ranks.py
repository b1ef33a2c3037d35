"""A process group whose ranks run checks: ``distributed_ranks.py RANKS DEVICE FOLDER RANK [CHECK ...]``.

All ranks run all checks, in one process each; a rank writes what failed to ``FOLDER/<rank>.json``. A check that fails
on one rank leaves the others waiting, so after the first failure a rank ends. RANK is a number, or ``all``.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Collection
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.torch import distributed_training  # noqa: F401  adds its checks
from tests.torch.distributed_checks import CHECKS, World


def fork(ranks: int) -> int:
    """Fork the ranks and return the number of each; the first process waits for them and exits."""
    if find_spec("transformers") is not None:
        from transformers import LlamaForCausalLM  # noqa: F401  once for all
    for rank in range(ranks):
        if not os.fork():
            return rank
    for _ in range(ranks):
        _, status = os.wait()
        if status:
            os._exit(1)  # who started this ends the others
    os._exit(0)


def main(ranks: int, device: str, folder: Path, which: str, names: Collection[str] = ()) -> None:
    rank = fork(ranks) if which == "all" else int(which)
    # As torchrun sets them: Hugging Face reads them.
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    torch.set_num_threads(1)
    options: dict[str, Any] = {"backend": "gloo"}
    if device == "cuda":
        torch.cuda.set_device(rank)
        options = {"backend": "nccl", "device_id": torch.device("cuda", rank)}
    dist.init_process_group(
        init_method=f"file://{folder.absolute()}/ranks", timeout=timedelta(seconds=300), world_size=ranks, rank=rank,
        **options,
    )  # fmt: skip
    world, found = World(device), dict[str, str]()
    for name in names or CHECKS:
        start = time.monotonic()
        print(f"at {name}", flush=True)
        try:
            CHECKS[name](world)
            found[name] = "passed"
        except BaseException:
            found[name] = traceback.format_exc()
        print(f"{name}: {time.monotonic() - start:.1f} s", flush=True)
        (folder / f"{rank}.json").write_text(json.dumps(found))
        if found[name] != "passed":
            os._exit(1)
    os._exit(0)  # an orderly shutdown of the group would wait for ranks that may have failed


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), sys.argv[4], sys.argv[5:])
