"""The JAX examples' training steps, lowered for a GPU without one: nothing is compiled a second time."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import kernel_wheel
import pytest

from cute_ops.aot import build
from cute_ops.calls import manifest
from cute_ops.jit.target import parse

ROOT = Path(__file__).parents[2]
PROGRAM = """
import os, sys
if os.environ.get("BLOCK_COMPILER"):
    sys.modules["cutlass"] = None
import jax, jax.numpy as jnp, numpy as np
from cute_ops.jit import cache
{traced}
text = traced.lower(lowering_platforms=("cuda",)).as_text()
print(text.count("custom_call @cute_"), cache.counters.compiled, cache.counters.disk, cache.counters.bundled)
"""
TRACED = {
    "llama": """
import model_jax
from config import SMALL, initial_weights
params = {n: jnp.asarray(w) for n, w in initial_weights(SMALL).items()}
state = (params, params, params, jnp.zeros((), jnp.float32))
window = jnp.zeros((SMALL.batch, SMALL.seqlen + 1), jnp.int32)
traced = model_jax.update.trace(state, window, SMALL, model_jax.OPS["our"])
""",
    "optax_decoder": """
from decoder import MODELS, PARTS, small
from optax_step import Run
config = small(MODELS["qwen3-0.6b"])
run = Run(config, PARTS["ours"])
traced = jax.jit(run._update).trace(run.state, run.frozen, jnp.zeros((config.batch, config.seqlen + 1), jnp.int32))
""",
}

# The decoder's sizes, as the table of the models has them whose kernels a release ships.
QWEN = {
    "model_type": "qwen3", "hidden_size": 64, "intermediate_size": 176, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512, "rms_norm_eps": 1e-6, "hidden_act": "silu",
}  # fmt: skip


def counts(example: str, **more: str) -> list[int]:
    """Calls of kernels in the program; kernels compiled, loaded from disk, loaded from a bundle."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "examples" / example), *sys.path])
    environment = {**os.environ, "PYTHONPATH": path, "CUTE_OPS_ARCH": "sm_90a", "JAX_PLATFORMS": "cpu", **more}
    command = [sys.executable, "-c", PROGRAM.format(traced=TRACED[example])]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return [int(word) for word in done.stdout.split()]


@pytest.mark.drawn(0.5)
@pytest.mark.slow
@pytest.mark.parametrize("example", TRACED)
def test_a_second_run_compiles_nothing_and_a_bundle_needs_no_compiler(
    example: str, tmp_path: Path, cache_folder: Path
) -> None:
    if example == "optax_decoder":
        pytest.importorskip("flax", reason="flax is not installed")
        pytest.importorskip("optax", reason="optax is not installed")
    calls, compiled, *rest = counts(example, CUTE_OPS_RECORD=str(tmp_path / "m.txt"))
    # Layers of norms, sums with norms and gates, each with its gradient.
    assert calls >= 10 and compiled >= 6 and rest == [0, 0]
    if example == "llama":  # what the cache holds is what the bundle takes from it
        assert counts(example, BLOCK_COMPILER="1") == [calls, 0, compiled, 0]
    else:
        many = manifest.parse(
            re.sub(r"\[256\b", "[*", (tmp_path / "m.txt").read_text(encoding="utf-8"))
        )  # few rows run other kernels
        told = build.variants_of(kernel_wheel.calls_of(QWEN, "float32"), [parse("sm_90a")])
        ran = build.variants_of(many, [parse("sm_90a")])
        assert {variant.symbol for variant in ran} <= {variant.symbol for variant in told}
    built = build.build(manifest.read(tmp_path / "m.txt"), [parse("sm_90a")], tmp_path / "bundle")
    assert len(built) == compiled and not any(one.seconds for one in built), "what was recorded is what ran"
    served = {"CUTE_OPS_BUNDLE": str(tmp_path / "bundle"), "CUTE_OPS_CACHE_DIR": str(tmp_path / "none")}
    assert counts(example, BLOCK_COMPILER="1", **served) == [calls, 0, 0, compiled]
    assert not (tmp_path / "none").exists()
