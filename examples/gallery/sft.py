"""Supervised fine-tuning of a patched model in a loop of one's own, as TRL's does it: prompts are read, answers learnt.

python examples/gallery/sft.py --steps 30
"""

from __future__ import annotations

import argparse

import torch
from lora import small_llama

import cute_ops_torch
from cute_ops_torch.optim import AdamW

PAIRS = [("What is a row's copy rate?", "Bytes over seconds."), ("Who compiles the kernel?", "The first call does.")]
IGNORED = -100  # a target that the loss leaves out


def batch_of(pairs: list[tuple[str, str]], device: str) -> dict[str, torch.Tensor]:
    """Bytes as tokens, padded to the longest; only the answers are targets."""
    texts = [(list(prompt.encode()), [*answer.encode(), 0]) for prompt, answer in pairs]
    longest = max(len(prompt) + len(answer) for prompt, answer in texts)
    tokens = torch.zeros(len(texts), longest, dtype=torch.int64)
    labels, mask = torch.full_like(tokens, IGNORED), torch.zeros_like(tokens)
    for i, (prompt, answer) in enumerate(texts):
        end = len(prompt) + len(answer)
        tokens[i, :end], mask[i, :end] = torch.tensor(prompt + answer), 1
        labels[i, len(prompt) : end] = torch.tensor(answer)
    return {name: t.to(device) for name, t in (("input_ids", tokens), ("labels", labels), ("attention_mask", mask))}


def main(arguments: list[str] | None = None) -> list[float]:
    """Train; returns the losses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = small_llama().to(device)
    cute_ops_torch.patch(model)
    optimizer, losses, batch = AdamW(model.parameters(), lr=3e-3), [], batch_of(PAIRS, device)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=options.steps)
    for step in range(options.steps):
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % 10 == 0 or step == options.steps - 1:
            print(f"step {step:4d}  loss {losses[-1]:.3f} nats per byte of an answer")
    return losses


if __name__ == "__main__":
    main()
