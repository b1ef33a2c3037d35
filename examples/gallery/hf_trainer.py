"""Hugging Face's Trainer on a patched model: one line more than without us. ``pip install accelerate`` first.

python examples/gallery/hf_trainer.py --steps 20
"""

from __future__ import annotations

import argparse
import tempfile

import torch
from lora import small_llama
from text import windows
from transformers import Trainer, TrainingArguments

import cute_ops_torch


def main(arguments: list[str] | None = None) -> list[float]:
    """Train; returns the losses that the Trainer logged."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args(arguments)
    model = small_llama()
    cute_ops_torch.patch(model)  # the one line
    rows = [torch.from_numpy(row) for window in windows(8, 63, options.steps) for row in window]
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model,
            TrainingArguments(
                folder, max_steps=options.steps, per_device_train_batch_size=8, learning_rate=3e-3, logging_steps=5,
                save_strategy="no", report_to="none", disable_tqdm=True,
            ),
            train_dataset=[{"input_ids": row, "labels": row} for row in rows],
        )  # fmt: skip
        trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    main()
