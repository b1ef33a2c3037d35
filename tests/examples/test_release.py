"""What a release brings beside the package: the shapes of well-known models, and how to cite it."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import kernel_wheel
import pytest
import yaml

from cute_ops.aot.build import variants_of
from cute_ops.jit import target

ROOT = Path(__file__).parents[2]
MODELS = kernel_wheel.models()


def test_there_are_twenty_models_with_a_source_each() -> None:
    sources = [str(config["source"]) for config in MODELS.values()]
    assert len(MODELS) == len(set(sources)) == 20
    assert all(source.startswith("https://huggingface.co/") and source.endswith("/config.json") for source in sources)


def test_a_model_is_called_with_and_without_a_batch() -> None:
    lines = {str(call) for call in kernel_wheel.calls_of(MODELS["Qwen3-30B-A3B"])}
    for rows in ("1,4096", "4096"):
        assert f"rmsnorm x:bfloat16[{rows},2048] weight:bfloat16[2048]" in lines
        assert f"rmsnorm x:bfloat16[{rows},32,128] weight:bfloat16[128]" in lines  # of its heads
    assert "swiglu x:bfloat16[4096,1536]" in lines  # of the tokens of experts, which all layers have
    assert any(line.startswith("cross_entropy logits:bfloat16[4096,151936] ") for line in lines)


@pytest.mark.slow
def test_every_call_has_a_kernel(drawn: Callable[[Sequence[Any], float], Sequence[Any]]) -> None:
    every = [*{str(call): call for config in MODELS.values() for call in kernel_wheel.calls_of(config)}.values()]
    some = drawn(every, 0.4)
    found = len(variants_of(some, [target.parse("sm_90a")]))
    assert found / len(some) * len(every) > 600  # as docs/shipping.md says


def test_the_citation_is_complete() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert {"cff-version", "message", "title", "authors"} <= citation.keys() and citation["license"] == "Apache-2.0"


def test_one_place_names_the_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The citation repeats it, and the site takes it from there."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation.get("repository-code") == project.get("urls", {}).get("Repository")
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    import hooks

    monkeypatch.setattr(hooks, "ROOT", tmp_path)
    for table, wanted in (
        ("", (None, None)),
        ('urls = {Repository = "https://x.example/y/"}', ("https://x.example/y/", "y")),
    ):
        (tmp_path / "pyproject.toml").write_text(f'[project]\nname = "x"\n{table}\n', encoding="utf-8")
        config: Any = hooks.on_config(SimpleNamespace(repo_url=None, repo_name=None))
        assert (config.repo_url, config.repo_name) == wanted
