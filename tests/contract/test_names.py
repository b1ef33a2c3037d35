"""Public names of both adapters: what one has and the other has not is listed here, each with its reason."""

from __future__ import annotations

import importlib

import pytest

from cute_ops.composite.layers import LAYERS

ONE_ONLY = {
    "cute_ops_torch": {
        "flex_attention": "torch's own function, whose arguments it takes",
        "scaled_dot_product_attention": "torch's own function, whose arguments it takes",
        "nn": "modules; those of JAX are in cute_ops_jax.nnx and cute_ops_jax.equinox, which need flax and equinox",
        "patch": "changes Hugging Face's modules, which are torch's; in JAX `fuse` changes any function",
        "unpatch": "undoes `patch`",
        "register_attention": "for Hugging Face's models, which are torch's",
        "warm_up": "compiles what Hugging Face's models call, which are torch's",
    },
    "cute_ops_jax": {
        "dot_product_attention": "jax.nn's own function, whose arguments it takes",
        "export": "exports programs of jax.export with their kernels; torch.export knows ops of torch by itself",
        "load": "loads what `export` wrote",
        "fuse": "changes a function's program; in torch a pass of torch.compile does, and `patch`",
        "probe": "says why kernels cannot run through XLA's FFI, which torch does not need",
        "vocab_parallel_cross_entropy": "for shard_map; in torch losses of DTensors are sharded by themselves",
        "vocab_parallel_linear_cross_entropy": "for shard_map; in torch losses of DTensors are sharded by themselves",
    },
}  # fmt: skip
# Layers of the table that have another name in a library.
OTHER_NAMES = {("cute_ops_torch.nn", "QKNormRope"): "QKNormRoPE", ("cute_ops_torch.nn", "QKVRope"): "QKVRoPE"}


def test_what_only_one_adapter_has_is_listed() -> None:
    pytest.importorskip("torch")
    pytest.importorskip("jax")
    names = {each: {n for n in dir(importlib.import_module(each)) if not n.startswith("_")} for each in ONE_ONLY}
    torch_names, jax_names = names.values()
    assert torch_names - jax_names == ONE_ONLY["cute_ops_torch"].keys()
    assert jax_names - torch_names == ONE_ONLY["cute_ops_jax"].keys()


@pytest.mark.parametrize("library", ["cute_ops_torch.nn", "cute_ops_jax.nnx", "cute_ops_jax.equinox"])
def test_every_layer_is_in_every_library(library: str) -> None:
    pytest.importorskip(library)
    module = importlib.import_module(library)
    assert [name for name in LAYERS if not hasattr(module, OTHER_NAMES.get((library, name), name))] == []
