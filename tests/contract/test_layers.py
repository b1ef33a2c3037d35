"""Layers of three frameworks against the one table: what each learns, how that starts, and which function it calls."""

from __future__ import annotations

import importlib
from operator import attrgetter
from typing import Any

import numpy as np
import pytest

from cute_ops import mods
from cute_ops.composite.layers import LAYERS

NORMS, HEADS = ("RMSNorm", "AddRMSNorm", "LayerNorm", "AddLayerNorm"), ("HeadRMSNorm", "HeadLayerNorm")
CONVOLUTIONS = ("CausalConv1d", "CausalConv1dChannelsFirst")
DROPOUTS = ("DropoutAddRMSNorm", "DropoutAddLayerNorm")
LOSSES = ("CrossEntropy", "CrossEntropyMetrics", "CrossEntropyOfSlice", "SoftCrossEntropy", "Divergence")
LINEAR_LOSSES = ("LinearCrossEntropy", "LinearCrossEntropyMetrics")
SIZES = {
    "n": 24, "head_dim": 24, "in_features": 24, "out_features": 256, "hidden_features": 40, "heads": 2, "channels": 24,
    "w": 4,
}  # fmt: skip
MADE_OF = {
    **dict.fromkeys((*NORMS, *DROPOUTS, "QKNormRope"), (24,)), **dict.fromkeys(("GatedMLP", "MLP"), (24, 40)),
    **dict.fromkeys(CONVOLUTIONS, (24, 4)),
    **dict.fromkeys(HEADS, (2, 24)), "GroupNorm": (4, 24), ("flax", "GroupNorm"): (24, 4),
    "QKVRope": (24, 2, 1, 64), "Attention": (2,), **dict.fromkeys(LOSSES, ()),
    ("torch", "LinearCrossEntropyMetrics"): (256, 24),
}  # fmt: skip
GIVEN = {
    "x": (3, 24), "residual": (3, 24), "q": (3, 2, 24), "k": (3, 1, 24), "cos": (3, 12), "sin": (3, 12),
    ("QKVRope", "cos"): (3, 32), ("QKVRope", "sin"): (3, 32), ("LinearAddRMSNorm", "residual"): (3, 256),
    ("CausalConv1d", "x"): (3, 5, 24), ("CausalConv1dChannelsFirst", "x"): (3, 24, 5), "initial_state": (3, 3, 24),
    **{(name, "x"): (3, 2, 24) for name in HEADS}, ("GroupNorm", "x"): (3, 24, 24),
    **{("Attention", x): (1, 5, h, 32) for x, h in (("q", 2), ("k", 1), ("v", 1))},
    **dict.fromkeys(("logits", "hidden", "student", "teacher", ("SoftCrossEntropy", "target")), (3, 24)),
    "lse_partial": (3,), ("CrossEntropyMetrics", "weight"): (24,), "class_weight": (256,),
}  # fmt: skip
INTEGERS = {"seed": np.array(5, np.int32), "target": np.array([7, -100, 0], np.int32),
            "seq_idx": np.array([[0, 0, 1, 1, 1]] * 3, np.int32)}  # fmt: skip


class Torch:
    """Modules of torch; layers inside have longer names."""

    package, library, names = "cute_ops_torch", "cute_ops_torch.nn", {"QKVRope": "QKVRoPE", "QKNormRope": "QKNormRoPE"}

    @property
    def flags(self) -> dict[str, dict[str, Any]]:
        return {
            name: {"bias": True} for name in ("RMSNorm", "AddRMSNorm", "AddLayerNorm", *CONVOLUTIONS, *LINEAR_LOSSES)
        }

    def read(self, module: Any, name: str) -> Any:
        if name == "halves" and not hasattr(module, name):
            return module.gate_up_proj.halves
        if not hasattr(module, name) and name in getattr(module, "options", ()):
            return module.options[name]
        return attrgetter(name.replace(".", "_proj."))(module)

    def parameters(self, module: Any) -> list[Any]:
        return list(module.parameters())

    def array(self, a: np.ndarray) -> Any:
        return importlib.import_module("torch").from_numpy(a)

    def called(self, module: Any) -> Any:
        return module


class Equinox:
    """Modules of equinox."""

    package, library, names = "cute_ops_jax", "cute_ops_jax.equinox", dict[str, str]()

    @property
    def flags(self) -> dict[str, dict[str, Any]]:
        key = importlib.import_module("jax").random.key(0)
        keyless = (*NORMS, *HEADS, *DROPOUTS, *LOSSES, *CONVOLUTIONS, "GroupNorm", "QKNormRope", "Attention")
        biased = {name: {"use_bias": True} for name in (*LINEAR_LOSSES, *CONVOLUTIONS)}
        return {name: {**({} if name in keyless else {"key": key}), **biased.get(name, {})} for name in LAYERS}

    def read(self, module: Any, name: str) -> Any:
        return option(module, name) if "." not in name and not hasattr(module, name) else attrgetter(name)(module)

    def parameters(self, module: Any) -> list[Any]:
        return [x for x in importlib.import_module("jax").tree.leaves(module) if hasattr(x, "shape")]

    def array(self, a: np.ndarray) -> Any:
        return a

    def called(self, module: Any) -> Any:
        """Of images it takes one."""
        return importlib.import_module("jax").vmap(module) if type(module).__name__ == "GroupNorm" else module


def option(module: Any, name: str) -> Any:
    """An option of a JAX module that keeps pairs of them."""
    return dict(module.options)[name]


class Nnx(Equinox):
    """Modules of flax, whose kernels are transposed."""

    library, names = "cute_ops_jax.nnx", {"GatedMLP": "PackedGatedMLP"}

    def called(self, module: Any) -> Any:
        return module

    def parameters(self, module: Any) -> list[Any]:
        nnx = importlib.import_module("flax.nnx")
        return importlib.import_module("jax").tree.leaves(nnx.state(module, nnx.Param))  # type: ignore[no-any-return]

    @property
    def flags(self) -> dict[str, dict[str, Any]]:
        rngs = importlib.import_module("flax.nnx").Rngs(0)
        biased = {name: {"use_bias": True} for name in (*NORMS, *LINEAR_LOSSES, *CONVOLUTIONS)}
        return {name: {"rngs": rngs, **biased.get(name, {})} for name in LAYERS if name not in LOSSES}

    def read(self, module: Any, name: str) -> Any:
        place, _, last = name.rpartition(".")
        holder = attrgetter(place)(module) if place else module
        kernels = hasattr(holder, "kernel")
        if name in dict(getattr(module, "options", ())):
            return option(module, name)
        theirs = {"eps": "epsilon", "weight": "kernel" if kernels else "scale"}
        found = getattr(holder, theirs.get(last, last.replace("_weight", "_scale")))
        if isinstance(found, importlib.import_module("flax.nnx").Param):
            return found[...].T if kernels and last == "weight" else found[...]
        return found


@pytest.mark.parametrize("library", ["torch", "flax", "equinox"])
def test_attention_with_functions_and_packed_sequences(library: str) -> None:
    """Options are the module's, arrays those of a call; without sinks it learns nothing."""
    pytest.importorskip(library, reason=f"{library} is not installed")
    of, rng = LIBRARIES[library](), np.random.default_rng(0)
    options = {"causal": True, "left": 3, "score_mod": mods.alibi}
    made = {"rngs": importlib.import_module("flax.nnx").Rngs(0)} if library == "flax" else {}
    module = importlib.import_module(of.library).Attention(**options, **made)
    assert not [x for x in of.parameters(module) if hasattr(x, "shape")]
    q, k, v = (of.array(rng.standard_normal((9, heads, 32), np.float32)) for heads in (2, 1, 1))
    slopes, offsets = of.array(np.ones(2, np.float32)), of.array(np.array([0, 4, 9], np.int32))
    given = {"captured": {"slopes": slopes}, "cu_seqlens_q": offsets}
    found = module(q, k, v, **given)
    right = importlib.import_module(of.package).attention(q, k, v, **options, **given)
    for one, other in zip(found, right, strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


LIBRARIES = {"torch": Torch, "flax": Nnx, "equinox": Equinox}


@pytest.mark.drawn(0.35)
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("library", LIBRARIES)
def test_a_layer_follows_its_row(library: str, name: str) -> None:
    pytest.importorskip(library, reason=f"{library} is not installed")
    row, of, rng = LAYERS[name], LIBRARIES[library](), np.random.default_rng(0)
    cls = getattr(importlib.import_module(of.library), of.names.get(name, name))
    module = cls(*MADE_OF.get((library, name), MADE_OF.get(name, (24, 256))), **of.flags.get(name, {}))
    assert len(of.parameters(module)) == len(row.learned)
    held = {place: of.read(module, place) for place in row.learned}
    for place, (dims, start) in row.learned.items():
        assert held[place].shape == tuple(eval(dim, {}, SIZES) for dim in dims.split()), place
        array = np.asarray(held[place].detach() if library == "torch" else held[place])
        if start is not None:
            assert (array == start).all(), place
        elif array.ndim > 1:
            assert len(np.unique(array)) > array.size // 2, place
    drawn = {
        argument: of.array(INTEGERS[argument])
        if argument in INTEGERS and (name, argument) not in GIVEN
        else of.array(rng.standard_normal(GIVEN.get((name, argument), GIVEN.get(argument)), np.float32))
        for argument in row.arguments
        if argument not in held
    }
    function = getattr(importlib.import_module(of.package), row.function)
    expected = function(
        *({**held, **drawn}[argument] for argument in row.arguments),
        **{option: of.read(module, option) for option in row.options},
    )
    found = of.called(module)(*drawn.values())
    for one, other in zip(*((r if isinstance(r, tuple) else (r,)) for r in (found, expected)), strict=True):
        one, other = (np.asarray(a.detach() if library == "torch" else a) for a in (one, other))
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
