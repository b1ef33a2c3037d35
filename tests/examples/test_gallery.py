"""The gallery's programs run and learn; patched and sharded models learn what the others do."""

from __future__ import annotations

import json
import linecache
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import equinox_decoder
import fsdp2
import jax_mesh
import lora
import nanogpt
import pytest
import serve
import sft
import torch

import cute_ops_torch

GALLERY = Path(__file__).parents[2] / "examples" / "gallery"


@pytest.mark.drawn(0.5, among="gallery")
@pytest.mark.slow
@pytest.mark.parametrize(("program", "steps"), [(nanogpt, 20), (sft, 20), (equinox_decoder, 20)])
def test_it_learns(program, steps: int) -> None:
    losses = program.main(["--steps", str(steps)])
    assert len(losses) == steps and losses[-1] < 0.7 * losses[0]


@pytest.mark.slow
def test_the_trainer_learns() -> None:
    hf_trainer = pytest.importorskip("hf_trainer", exc_type=ImportError)
    first, second = hf_trainer.main(["--steps", "10"])
    assert second < first


@pytest.mark.slow
def test_adapters_learn_the_same_on_a_model_that_is_not_patched(monkeypatch: pytest.MonkeyPatch) -> None:
    losses = lora.main(["--steps", "4"])
    assert losses[-1] < losses[0]
    monkeypatch.setattr(cute_ops_torch, "patch", lambda model: [])
    assert losses == pytest.approx(lora.main(["--steps", "4"]), rel=1e-5)


# What torchrun does, but torch is imported once.
FORKS = """
import os, runpy, sys, torch.distributed.fsdp, torch.distributed.tensor

children = []
for rank in "01":
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank}
    if not (child := os.fork()):
        sys.argv = sys.argv[1:]
        sys.path.insert(0, os.path.dirname(sys.argv[0]))
        runpy.run_path(sys.argv[0], run_name="__main__")
        sys.exit()
    children.append(child)
sys.exit(any([os.waitpid(child, 0)[1] for child in children]))
"""


@pytest.mark.drawn(0.5, among="gallery")
@pytest.mark.slow
@pytest.mark.parametrize("devices", ["", pytest.param("0,1", marks=pytest.mark.gpu)], ids=["cpu", "two_gpus"])
def test_shards_learn_what_the_whole_learns(devices: str) -> None:
    if devices and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    with socket.create_server(("localhost", 0)) as free:
        port = str(free.getsockname()[1])
    ranks = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    done = subprocess.run(
        [sys.executable, "-c", FORKS, str(GALLERY / "fsdp2.py"), "--steps", "3"],
        capture_output=True, text=True, check=False, timeout=300,
        env={**os.environ, **ranks, "CUDA_VISIBLE_DEVICES": devices, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    first, *_, last = nanogpt.main(["--steps", "3"])
    said = [float(loss) for loss in re.findall(r"loss (\S+) nats per byte on 2 ranks", done.stdout)]
    assert said == pytest.approx([first, last], abs=5e-3)  # by PyTorch's AdamW, which rounds otherwise than ours


def test_ranks_are_started_by_torchrun(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit):
        fsdp2.main([])
    assert "started by torchrun --nproc-per-node 2 examples/gallery/fsdp2.py" in capsys.readouterr().err


@pytest.mark.slow
def test_a_mesh_computes_what_one_device_does() -> None:
    loss, gradient = jax_mesh.main()
    assert loss < 1e-5 and gradient < 1e-6


@pytest.mark.slow
def test_a_bundle_is_built_and_named(tmp_path: Path, cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUTE_OPS_BUNDLE", "")
    serve.main(["build", "--folder", str(tmp_path)])
    assert len(list(tmp_path.glob("bundle/kernels/*.so"))) == len(serve.MANIFEST.splitlines())
    assert serve.run(tmp_path) == 0


@pytest.mark.drawn(0.5, among="gallery")
@pytest.mark.slow
def test_the_notebook_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    cells = json.loads((GALLERY / "first_steps.ipynb").read_text(encoding="utf-8"))["cells"]
    known: dict = {}
    for cell in (cell for cell in cells if cell["cell_type"] == "code"):
        name, text = f"<{cell['id']}>", "".join(cell["source"])
        linecache.cache[name] = len(text), None, text.splitlines(True), name  # as notebooks do
        exec(compile(text, name, "exec"), known)
    said = capsys.readouterr().out
    assert "torch.Size([1024])" in said and "sm_90a" in said
