"""The optax example trains, agrees with XLA's own functions, and fails where an op is wrong."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

pytest.importorskip("flax", reason="flax is not installed")
pytest.importorskip("optax", reason="optax is not installed")
import decoder  # (found through conftest)
import optax_decoder as benchmark
import optax_step
from common import read

import cute_ops_jax


@pytest.fixture(autouse=True)
def text(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same on every machine: each version of Python has another standard library."""
    drawn = np.random.default_rng(0).zipf(1.5, 20_000)
    monkeypatch.setattr(optax_step, "tokens", lambda words: np.minimum(drawn - 1, words - 1).astype(np.int32))


@pytest.mark.drawn(0.35)
@pytest.mark.slow
@pytest.mark.parametrize("options", [*decoder.MODELS, "gemma3-270m --freeze embedding"])
def test_losses_agree_and_fall(options: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert optax_step.main(["--model", *options.split(), "--rounds", "1", "--steps", "8"]) == 0
    out = capsys.readouterr().out
    losses = [[float(x) for x in re.findall(r"\d\.\d{4}", line)] for line in out.splitlines() if line.startswith("│")]
    assert len(losses) == 2
    for first, last in losses:
        assert first == pytest.approx(6.238, abs=0.3)  # untrained: nearly uniform over 512 tokens
        assert last < first - 0.3
    on_gpu = jax.default_backend() == "gpu"
    assert re.search(r"ours: \d\.\d\d x XLA's tokens/s" if on_gpu else "No GPU here: .* tokens/s say nothing", out)


@pytest.mark.slow
def test_what_is_frozen_stays() -> None:
    run = optax_step.Run(decoder.small(decoder.MODELS["gemma3-270m"]), decoder.PARTS["ours"], "embedding")
    frozen, trained = jax.tree.leaves(run.frozen), jax.tree.leaves(run.state[0])
    assert [a.shape for a in frozen] == [(512, 64)]
    assert frozen[0].shape not in {a.shape for a in trained}


@pytest.mark.slow
def test_it_fails_when_an_op_is_one_percent_off(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(decoder.ours.GatedMLP):
        def __call__(self, x: Any) -> Any:
            return self.down(cute_ops_jax.silu_mul(self.gate(x), self.up(x)) * 1.01)

    monkeypatch.setitem(decoder.PARTS, "ours", decoder.PARTS["ours"]._replace(mlp=Wrong))
    monkeypatch.setitem(optax_step.TOLERANCE, "float32", 1e-5)
    assert optax_step.main(["--rounds", "1", "--steps", "4"]) == 1


@pytest.mark.slow
def test_benchmark(tmp_path: Path) -> None:
    benchmark.main(["--cpu-smoke", "--out", str(tmp_path), "--rounds", "1", "--steps", "2"])
    xla, ours = read(tmp_path / "optax_decoder.csv")
    assert (xla["ops"], ours["ops"]) == ("XLA", "ours")
    assert float(ours["apart"]) < 2e-4
    assert float(ours["tokens_per_s"]) > 0


@pytest.mark.slow
def test_steps_through_fuse(tmp_path: Path) -> None:
    """Every contender trains as XLA does."""
    pytest.importorskip("equinox", reason="equinox is not installed")
    import fuse_step

    found = fuse_step.main(["--cpu-smoke", "--out", str(tmp_path), "--rounds", "1", "--steps", "2"])
    assert found.keys() == {"stories15m", "equinox", "nnx"}
    rows = read(tmp_path / "fuse_step.csv")
    assert [(row["model"], row["contender"]) for row in rows] == [
        ("stories15m", "XLA"), ("stories15m", "ours"), ("stories15m", "fuse"),
        ("equinox", "XLA"), ("equinox", "fuse"), ("nnx", "XLA"), ("nnx", "fuse"),
    ]  # fmt: skip
    assert all(float(row["apart"]) < 2e-4 for row in rows)
