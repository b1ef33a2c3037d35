"""The demo trains, writes what it says and fails when an op is wrong."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch

# The model sets the precision of products for its program. All tests are imported in one, so only its own get it.
_PRECISION = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
train = pytest.importorskip("train")
import model_jax  # noqa: E402 (found through conftest)
import model_torch  # noqa: E402

jax.config.update("jax_default_matmul_precision", _PRECISION)


@pytest.fixture(autouse=True)
def products_in_whole_float32() -> Iterator[None]:
    with jax.default_matmul_precision("highest"):
        yield


def only(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One way to train: compiling takes most of the demo's time, and one test has all of them."""
    monkeypatch.setattr(train, "MODES", {mode: train.MODES[mode]})


@pytest.fixture
def one_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second one would be compiled again."""
    monkeypatch.setattr(train, "SMALL", replace(train.SMALL, layers=1))


@pytest.fixture
def only_ours_in_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's own ops are traced and differentiated as a compiler does, but Inductor builds no kernels of them."""
    make, compile = train.MODES["torch.compile"], torch.compile

    def make_step(config: Any, ops: str, **kwargs: Any) -> Callable[[np.ndarray], float]:
        with monkeypatch.context() as patch:
            if ops == "own":
                patch.setattr(torch, "compile", partial(compile, backend="aot_eager"))
            return make(config, ops, **kwargs)

    monkeypatch.setitem(train.MODES, "torch.compile", make_step)


@pytest.mark.slow
@pytest.mark.usefixtures("one_layer", "only_ours_in_inductor")
def test_demo(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train.main(["--steps", "4", "--speed-steps", "0", "--out", str(tmp_path)]) == 0
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    header, *rows = csv.reader((tmp_path / "loss.csv").open())
    assert header[0] == "step"
    assert len(header) == 7
    losses = np.array(rows, dtype=float)[:, 1:]
    assert losses.shape == (4, 6)
    np.testing.assert_allclose(losses[0], np.log(256), rtol=0.1)  # untrained: nearly uniform over bytes
    said = " ".join(capsys.readouterr().out.split())
    assert "The curves agree." in said and "4/4" not in said  # a bar's last state
    assert "jax.jit, cute_ops: loss " in said
    assert ("No GPU here: cute_ops runs as its references" in said) == (not torch.cuda.is_available())


@pytest.fixture(scope="module")
def own_losses() -> dict[str, list[float]]:
    return {}


def train_with_own_ops_once(mode: str, losses: dict[str, list[float]], monkeypatch: pytest.MonkeyPatch) -> None:
    """What a mode's own ops gave stays what it was while ours change."""
    make = train.MODES[mode]

    def make_step(config: Any, ops: str, **kwargs: Any) -> Callable[[np.ndarray], float]:
        if ops == "our":
            return make(config, ops, **kwargs)
        if mode in losses:
            known = iter(losses[mode])
            return lambda _: next(known)
        step, kept = make(config, ops, **kwargs), losses.setdefault(mode, [])

        def recorded(batch: np.ndarray) -> float:
            kept.append(step(batch))
            return kept[-1]

        return recorded

    monkeypatch.setattr(train, "MODES", {mode: make_step})


@pytest.mark.drawn(0.5)
@pytest.mark.slow
@pytest.mark.usefixtures("one_layer")
@pytest.mark.parametrize(
    ("mode", "op"), [*(("torch eager", op) for op in model_torch.Ops._fields), ("jax.jit", "add_rmsnorm")]
)
def test_demo_fails_when_an_op_is_one_percent_off(
    mode: str, op: str, own_losses: dict[str, list[float]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train_with_own_ops_once(mode, own_losses, monkeypatch)
    model = {"torch eager": model_torch, "jax.jit": model_jax}[mode]
    right = model.OPS["our"]

    def wrong(*args: object, **kwargs: object) -> object:
        out = getattr(right, op)(*args, **kwargs)
        return (out[0] * 1.01, out[1]) if isinstance(out, tuple) else out * 1.01

    monkeypatch.setitem(model.OPS, "our", right._replace(**{op: wrong}))
    assert train.main(["--steps", "12", "--speed-steps", "0", "--out", str(tmp_path)]) == 1


@pytest.mark.slow
@pytest.mark.usefixtures("one_layer")
def test_demo_fails_on_nan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    only("torch eager", monkeypatch)
    right = model_torch.OPS["our"]
    broken = right._replace(silu_mul=lambda gate, up: gate * float("nan"))
    monkeypatch.setitem(model_torch.OPS, "our", broken)
    assert train.main(["--steps", "2", "--speed-steps", "0", "--out", str(tmp_path)]) == 1


@pytest.mark.slow
def test_both_models_have_the_same_loss_and_gradient() -> None:
    import jax
    from config import SMALL, initial_weights
    from data import batches, load_bytes

    window = next(batches(load_bytes(), SMALL.batch, SMALL.seqlen))
    torch_model = model_torch.Decoder(SMALL, model_torch.OPS["our"])
    torch_loss = torch_model(torch.from_numpy(window).long())
    torch_loss.backward()
    params = {n: jax.numpy.asarray(w) for n, w in initial_weights(SMALL).items()}
    differentiated = jax.jit(jax.value_and_grad(model_jax.loss), static_argnums=(2, 3))
    jax_loss, jax_grads = differentiated(params, window, SMALL, model_jax.OPS["our"])
    assert torch_loss.item() == pytest.approx(float(jax_loss), rel=1e-6)
    for name, grad in jax_grads.items():
        expected = getattr(torch_model, name.replace(".", "_")).grad.numpy()
        np.testing.assert_allclose(grad, expected, atol=2e-5 * np.abs(expected).max(), err_msg=name)
