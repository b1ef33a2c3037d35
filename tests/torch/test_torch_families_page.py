"""``docs/families.md``: what ``patch`` replaces in each family of Hugging Face's models, and what is left and why.

``python tests/torch/test_torch_families_page.py`` writes the page anew.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import cute_ops_torch
from tests.torch.test_torch_patch_families import CAUSAL, MASKED, SIZES, make, quietly

transformers = pytest.importorskip("transformers")
PAGE = Path(__file__).parents[2] / "docs" / "families.md"
VISION = (
    "vit", "deit", "beit", "dinov2", "clip_vision_model", "siglip_vision_model", "swin", "convnext", "segformer",
    "dinov3_vit", "ijepa", "vit_mae",
)  # fmt: skip
SPEECH = ("wav2vec2", "hubert", "wavlm", "whisper", "audio-spectrogram-transformer", "unispeech")
SEQUENCES = ("t5", "bart", "pegasus", "mbart", "m2m_100", "marian", "umt5")
_SMALL = SIZES | {
    "image_size": 32, "patch_size": 8, "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "d_ff": 96, "d_kv": 16,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96,
    "num_heads": 4, "num_layers": 2, "num_decoder_layers": 2, "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4, "max_source_positions": 32, "max_target_positions": 32, "num_mel_bins": 16,
    "max_length": 64, "decoder_start_token_id": 1,
}  # fmt: skip
_OWN_LISTS = ("swin", "segformer", "convnext")  # whose sizes are one for each stage
_TITLE = """# Families

Made by `python tests/torch/test_torch_families_page.py` with transformers {version}: what
[`patch`](patch.md) replaces in a small model of each family, with two layers, and what goes on running its own
`forward`, with the reason. No family has code of its own.

| family | replaced | left |
|---|---|---|
"""


def encoder(family: str) -> nn.Module:
    """A small model without a head."""
    known = transformers.models.auto.configuration_auto.CONFIG_MAPPING
    if family not in known:
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    kind = known[family]
    small = {} if family in _OWN_LISTS else _SMALL
    has = {name: n for name, n in small.items() if type(getattr(kind(), name, None)) is type(n)}
    torch.manual_seed(0)
    model: nn.Module = transformers.AutoModel.from_config(kind(**has))
    return model


def row(family: str) -> str:
    """A line of the table."""
    found = quietly(make(family) if family in (*CAUSAL, *MASKED) else encoder(family))
    replaced = ", ".join(f"{n} `{op}`" for op, n in Counter(each.op for each in found).items())
    left = Counter((each.kind, each.reason) for each in found.left)
    said = "; ".join(f"{n} {kind}{'s' * (n > 1)}: {reason}" for (kind, reason), n in left.items()) or "nothing"
    return f"| `{family}` | {replaced} | {said} |"


def inputs_of(model: Any) -> dict[str, torch.Tensor]:
    draw, config = torch.Generator().manual_seed(2), model.config
    if model.main_input_name == "pixel_values":
        size = getattr(config, "image_size", 64)
        size = size if isinstance(size, int) else size[0]
        return {"pixel_values": torch.randn(2, 3, size, size, generator=draw)}
    if model.main_input_name == "input_values":
        if hasattr(config, "max_length") and hasattr(config, "num_mel_bins"):
            return {"input_values": torch.randn(2, config.max_length, config.num_mel_bins, generator=draw)}
        return {"input_values": torch.randn(2, 2000, generator=draw)}
    if model.main_input_name == "input_features":
        steps = 2 * config.max_source_positions
        features = torch.randn(2, config.num_mel_bins, steps, generator=draw)
        return {"input_features": features, "decoder_input_ids": torch.randint(3, 90, (2, 5), generator=draw)}
    ids = torch.randint(3, 90, (2, 8), generator=draw)
    return {"input_ids": ids} | ({"decoder_input_ids": ids} if config.is_encoder_decoder else {})


def computed(model: Any) -> list[torch.Tensor]:
    """What a model gives in evaluation, and the gradients of its first output."""
    model.eval().zero_grad()
    torch.manual_seed(4)  # of masks that are drawn
    out = model(**inputs_of(model))[0]
    cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(3))
    out.backward(cotangent)
    return [out.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


ENCODERS = (*VISION, *SPEECH, *SEQUENCES)
DRAWN = random.Random(8).sample(ENCODERS, 4)


@pytest.mark.drawn(0.5)
@pytest.mark.slow
@pytest.mark.parametrize("family", DRAWN)
def test_patched_encoders_compute_what_they_did(family: str) -> None:
    check(family)


def check(family: str) -> None:
    model = encoder(family)
    want = computed(model)
    quietly(model)
    got = computed(model)
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        largest = float(b.abs().max()) if b.numel() else 0.0
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5 * max(1.0, largest))
    cute_ops_torch.unpatch(model)


@pytest.mark.slow
def test_the_page_has_drawn_families() -> None:
    text = PAGE.read_text(encoding="utf-8")
    if f"transformers {transformers.__version__}" not in text:
        pytest.skip("the page was made with another version")
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    assert len(rows) >= 80
    for family in random.Random(17).sample((*CAUSAL, *MASKED, *ENCODERS), 6):
        assert row(family) in rows, row(family)


def main(arguments: list[str]) -> int:
    transformers.logging.set_verbosity_error()
    rows, bad = [], 0
    for family in (*CAUSAL, *MASKED, *ENCODERS):
        try:
            rows.append(row(family))
            if family in ENCODERS and "--check" in arguments:
                check(family)
        except (Exception, pytest.skip.Exception) as error:
            bad += 1
            print(f"{family}: {type(error).__name__}: {str(error)[:400]}", flush=True)
    PAGE.write_text(_TITLE.format(version=transformers.__version__) + "\n".join(rows) + "\n", encoding="utf-8")
    print(f"{len(rows)} families, {bad} without a row or wrong")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
