"""Training steps shaped like fourteen kinds of models: milliseconds per step, patched and not.

Each model has the sizes of one that people train, in one layer's width, heads, vocabulary and experts, but few layers,
so that a step takes 20 to 60 ms. The harness is that of ``llama_step.py``: bfloat16, fused AdamW, the same weights and
inputs for every contender, a process for each, which take turns; their first losses are compared. Dropout is off, for
the losses to be comparable. A process runs all models, one after the other, so that a model costs a compile and some
steps, not a start; with ``--together`` each model has processes of its own, which all compile at the same time and keep
their memory until their model is measured. What the contenders say (what ``patch`` replaced and left, kernels) is kept
beside the CSV file.

python benchmarks/model_steps.py --out out/benchmarks [--models BERT-large ViT-H] [--contenders eager ours]
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from common import Table, first_line, parse, read, spread
from dit import DiT
from encoders import Tokens, ViT
from llama_step import READY, TOLERANCE, Steps, Worker, in_drawn_order, prepare
from rich.console import Console
from rich.table import Table as View

CONTENDERS = (
    "eager", "torch.compile", "Liger", "ours", "ours + compile", "graph pass + compile", "ours + graph pass + compile",
)  # fmt: skip
COLUMNS = (
    "model", "contender", "batch", "seqlen", "ms", "ms_min", "ms_max", "host_ms", "peak_gb", "loss_first", "loss_last",
    "warm_up_s", "status",
)  # fmt: skip
# Steps before the first sample: they compile, and fill the optimizer's state.
WARM_UP = 3
# Models that return bfloat16 losses round them by this much of their value.
ULP = 2**-7


class Shape(NamedTuple):
    """A model and a batch of it.

    Attributes:
        kind: its class, or the name of one of ``transformers``.
        config: arguments of the config.
        small: those that make it tiny, for the CPU.
        batch, seqlen: sizes of a batch.
        inputs: the arguments of a call, of its config, a batch's sizes and the device.
        dtype: of parameters; a model of float32 turns autocast on.
    """

    kind: str | type[Any]
    config: Mapping[str, Any]
    small: Mapping[str, Any]
    batch: int
    seqlen: int
    inputs: Callable[[Any, int, int, torch.device], dict[str, torch.Tensor]]
    dtype: torch.dtype = torch.bfloat16

    def build(self, small: bool, seed: int = 0) -> Any:
        import transformers

        torch.manual_seed(seed)
        sizes = {**self.config, **(self.small if small else {})}
        kind: Any = getattr(transformers, self.kind) if isinstance(self.kind, str) else self.kind
        with torch.device("cpu" if small else "cuda"):
            return kind(kind.config_class(**sizes)).to(self.dtype).train()


def causal(config: Any, batch: int, seqlen: int, device: torch.device) -> dict[str, torch.Tensor]:
    tokens = torch.randint(3, config.vocab_size, (batch, seqlen), device=device)
    return {"input_ids": tokens, "labels": tokens}


def masked(config: Any, batch: int, seqlen: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Tokens of which 15% are to be predicted."""
    tokens = torch.randint(3, config.vocab_size, (batch, seqlen), device=device)
    hidden = torch.rand(tokens.shape, device=device) < 0.15
    return {"input_ids": tokens.masked_fill(hidden, 2), "labels": tokens.masked_fill(~hidden, -100)}


def padded(config: Any, batch: int, seqlen: int, device: torch.device) -> dict[str, torch.Tensor]:
    """The same, with a third to all of each sequence's tokens."""
    inputs = masked(config, batch, seqlen, device)
    lengths = torch.randint(seqlen // 3, seqlen + 1, (batch, 1), device=device)
    behind = torch.arange(seqlen, device=device) >= lengths
    return {name: each.masked_fill(behind, -100 if name == "labels" else 0) for name, each in inputs.items()}


def image(config: Any, batch: int, seqlen: int, device: torch.device) -> dict[str, torch.Tensor]:
    size = (batch, config.num_channels, config.image_size, config.image_size)
    pixels = torch.randn(size, device=device, dtype=torch.bfloat16)
    return {"pixel_values": pixels, "labels": torch.randint(0, config.num_labels, (batch,), device=device)}


def noisy(config: Any, batch: int, seqlen: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Latents with noise, at random times."""
    size = (batch, config.num_channels, config.image_size, config.image_size)
    latents, noise = (torch.randn(size, device=device, dtype=torch.bfloat16) for _ in range(2))
    times, labels = (torch.randint(0, most, (batch,), device=device) for most in (1000, config.num_labels))
    return {"latents": latents, "times": times, "labels": labels, "noise": noise}


def speech(config: Any, batch: int, seqlen: int, device: torch.device) -> dict[str, torch.Tensor]:
    frames = (batch, config.num_mel_bins, 2 * config.max_source_positions)
    labels = torch.randint(3, config.vocab_size, (batch, seqlen), device=device)
    return {"input_features": torch.randn(frames, device=device, dtype=torch.bfloat16), "labels": labels}


def translation(config: Any, batch: int, seqlen: int, device: torch.device) -> dict[str, torch.Tensor]:
    source, target = (torch.randint(3, config.vocab_size, (batch, seqlen), device=device) for _ in range(2))
    return {"input_ids": source, "labels": target}


_WITHOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_TINY = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 128,
}  # fmt: skip
_TINY_DECODER = {**_TINY, "num_key_value_heads": 2, "head_dim": 16}
_TINY_ENCODER = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 32, "num_labels": 8,
    "vocab_size": 128,
}  # fmt: skip
SHAPES = {
    "BERT-large": Shape(
        "BertForMaskedLM",
        {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16, "num_hidden_layers": 6, **_WITHOUT},
        _TINY, 64, 512, masked,
    ),
    "ViT-H": Shape(
        "ViTForImageClassification",
        {"hidden_size": 1280, "intermediate_size": 5120, "num_attention_heads": 16, "num_hidden_layers": 4,
         "patch_size": 14, "num_labels": 1000, **_WITHOUT},
        {**_TINY, "image_size": 28, "num_labels": 8}, 128, 257, image,
    ),
    "ViT-B/16 by nn.MultiheadAttention": Shape(ViT, {}, _TINY_ENCODER, 256, 197, image),
    "ViT-B/16 under autocast": Shape(ViT, {}, _TINY_ENCODER, 256, 197, image, torch.float32),
    "padded nn.TransformerEncoder": Shape(Tokens, {}, _TINY_ENCODER, 64, 512, padded),
    "DiT": Shape(DiT, {}, {"hidden_size": 64, "num_hidden_layers": 2, "image_size": 8}, 64, 256, noisy),
    "Whisper-large": Shape(
        "WhisperForConditionalGeneration",
        {"d_model": 1280, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 20,
         "decoder_attention_heads": 20, "encoder_ffn_dim": 5120, "decoder_ffn_dim": 5120, "num_mel_bins": 128,
         "dropout": 0.0, "use_cache": False},
        {"d_model": 64, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 96,
         "decoder_ffn_dim": 96, "num_mel_bins": 8, "max_source_positions": 30, "max_target_positions": 40,
         "vocab_size": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1},
        16, 448, speech,
    ),
    "GPT-2 XL": Shape(
        "GPT2LMHeadModel",
        {"n_embd": 1600, "n_head": 25, "n_layer": 4, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
         "use_cache": False},
        {"n_embd": 64, "n_head": 4, "n_layer": 2, "vocab_size": 128, "bos_token_id": 1, "eos_token_id": 2},
        16, 1024, causal,
    ),
    "Qwen3": Shape(
        "Qwen3ForCausalLM",
        {"hidden_size": 2560, "intermediate_size": 9728, "num_attention_heads": 32, "num_key_value_heads": 8,
         "head_dim": 128, "num_hidden_layers": 4, "tie_word_embeddings": True, "use_cache": False},
        _TINY_DECODER, 2, 2048, causal,
    ),
    "Gemma 3": Shape(
        "Gemma3ForCausalLM",
        {"hidden_size": 2560, "intermediate_size": 10240, "num_attention_heads": 8, "num_key_value_heads": 4,
         "head_dim": 256, "num_hidden_layers": 6, "sliding_window": 1024, "use_cache": False},
        {**_TINY_DECODER, "sliding_window": 16}, 1, 4096, causal,
    ),
    "GPT-OSS": Shape(
        "GptOssForCausalLM",
        {"num_hidden_layers": 2, "num_local_experts": 32, "use_cache": False},
        {**_TINY_DECODER, "num_local_experts": 4, "sliding_window": 16, "pad_token_id": 0}, 1, 4096, causal,
    ),
    "T5": Shape(
        "T5ForConditionalGeneration",
        {"d_model": 2048, "d_kv": 64, "d_ff": 5120, "num_heads": 32, "num_layers": 2, "num_decoder_layers": 2,
         "feed_forward_proj": "gated-gelu", "dropout_rate": 0.0, "decoder_start_token_id": 0, "use_cache": False},
        {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_heads": 4, "vocab_size": 128}, 16, 512, translation,
    ),
    "Mamba-2": Shape(
        "Mamba2ForCausalLM",
        {"hidden_size": 2048, "num_heads": 64, "head_dim": 64, "state_size": 128, "n_groups": 1, "num_hidden_layers": 4,
         "vocab_size": 50288, "use_cache": False},
        {"hidden_size": 32, "num_heads": 4, "head_dim": 16, "state_size": 16, "vocab_size": 128, "chunk_size": 16,
         "num_hidden_layers": 2}, 2, 2048, causal,
    ),
    "Qwen3-MoE": Shape(
        "Qwen3MoeForCausalLM",
        {"hidden_size": 2048, "moe_intermediate_size": 768, "num_attention_heads": 32, "num_key_value_heads": 4,
         "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 2, "norm_topk_prob": True,
         "output_router_logits": True, "use_cache": False},
        {**_TINY_DECODER, "moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2}, 2, 4096, causal,
    ),
}  # fmt: skip


class Trainer(Steps):
    """A contender's model."""

    def __init__(self, name: str, contender: str, small: bool) -> None:
        begin, shape = time.perf_counter(), SHAPES[name]
        batch, seqlen = (2, 24) if small else (shape.batch, shape.seqlen)
        model = shape.build(small)
        inputs = shape.inputs(model.config, batch, seqlen, model.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=not small)
        self.about = {"model": name, "contender": contender, "batch": batch, "seqlen": seqlen}
        super().__init__(prepare(contender, model), inputs, optimizer, WARM_UP)
        self.warm_up = time.perf_counter() - begin

    def kernels(self, most: int) -> str:
        """The kernels of one step that take longest, a line each: microseconds, calls, name."""
        from torch.profiler import ProfilerActivity, profile

        device = self.device.type
        with profile(activities=[ProfilerActivity.CUDA if device == "cuda" else ProfilerActivity.CPU]) as seen:
            self.step()
            self.wait()
        key = f"self_{'device' if device == 'cuda' else 'cpu'}_time_total"
        events = sorted(seen.key_averages(), key=lambda each: -getattr(each, key))
        whole = sum(getattr(each, key) for each in events)
        head = f"{self.about['model']}, {self.about['contender']}: {whole:.0f} us of kernels in a step"
        lines = (f"  {getattr(each, key):8.0f} {each.count:5} {each.key[:70]}" for each in events[:most])
        return "\n".join([head, *lines])

    def row(self) -> dict[str, Any]:
        """Medians over the samples."""
        ms = spread(1e3 * each for each in self.times)
        return {
            **self.about, "ms": ms.median, "ms_min": ms.low, "ms_max": ms.high, **self.figures(),
            "warm_up_s": self.warm_up, "status": "ok",
        }  # fmt: skip


class Turns:
    """A contender's process from inside. Each line that comes is the name of a model, to build and warm up; or a number
    of steps, to take; or empty, for the model's row.
    """

    def __init__(self, contender: str, small: bool, profile: int = 0) -> None:
        self.contender, self.small, self.profile = contender, small, profile
        self.trainer: Trainer | None = None
        self.row: dict[str, Any] = {}

    def obey(self, line: str) -> dict[str, Any] | None:
        """Does it; returns a row where one is asked for. What fails is the row's status."""
        try:
            if line in SHAPES:
                self.row = {"model": line, "contender": self.contender}
                self.trainer = Trainer(line, self.contender, self.small)
            elif self.trainer is not None and line:
                self.trainer.sample(int(line))
            elif self.trainer is not None:
                self.row = self.trainer.row()
                if self.profile:
                    print(self.trainer.kernels(self.profile), file=sys.stderr)
                    self._report()
        except Exception as error:  # one model's failure is a row of the table
            traceback.print_exc()
            self.row["status"] = first_line(error)
            self._free()
        if line:
            return None
        self._free()
        return self.row

    def _report(self) -> None:
        if "graph pass" in self.contender:
            from cute_ops_torch import inductor

            print(inductor.report(), file=sys.stderr)

    def _free(self) -> None:
        self.trainer = None
        torch._dynamo.reset()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


class Contender(Worker):
    """Such a process from outside."""

    def tell(self, line: str) -> None:
        assert self._process.stdin
        with contextlib.suppress(BrokenPipeError):  # it has ended, which its row says
            print(line, file=self._process.stdin, flush=True)

    def kill(self) -> None:
        self._process.kill()

    def row(self, name: str) -> dict[str, Any]:
        """Its row of a model, the last that it was told of."""
        assert self._process.stdout
        self.tell("")
        row = self._process.stdout.readline()
        ended = {"model": name, "contender": self.contender, "status": "the process has ended"}
        return json.loads(row) if row else ended

    def end(self) -> str:
        """Ends it; returns what it has said."""
        self._process.communicate()
        self._errors.seek(0)
        return self._errors.read()


def warm_up(contenders: Mapping[str, list[Contender]], end: float) -> None:
    """Builds models and takes their first steps, in all processes at the same time; those that are not ready at a time
    of the clock are ended.
    """
    waiting = {}
    for name, several in contenders.items():
        for each in several:
            each.tell(name)
            waiting[each] = threading.Thread(target=each.ready)
            waiting[each].start()
    for each, thread in waiting.items():
        thread.join(max(0.0, min(end - time.monotonic(), threading.TIMEOUT_MAX)))
        if thread.is_alive():
            each.kill()
            thread.join()


def measure(name: str, contenders: list[Contender], steps: int, rounds: int) -> list[dict[str, Any]]:
    """A row of a model for each contender, which are warm and take turns."""
    for k in range(rounds):
        for each in in_drawn_order(contenders, k):
            each.tell(str(steps))
            each.ready()
    return [each.row(name) for each in contenders]


def show(path: Path, console: Console) -> None:
    rows = read(path)
    names = [*dict.fromkeys(row["contender"] for row in rows)]
    view = View("model", *names, title="ms per training step (peak GB)")
    for model in dict.fromkeys(row["model"] for row in rows):
        cells = {row["contender"]: row for row in rows if row["model"] == model}
        view.add_row(model, *(_cell(cells[name]) for name in names))
    console.print(view)


def _cell(row: Mapping[str, str]) -> str:
    return f"{row['ms']} ({row['peak_gb']})" if row["status"] == "ok" else row["status"]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/benchmarks"), help="folder for model_steps.csv")
    parser.add_argument("--models", nargs="+", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--contenders", nargs="+", default=list(CONTENDERS), choices=CONTENDERS)
    parser.add_argument("--steps", type=int, default=4, help="steps of one sample")
    parser.add_argument("--rounds", type=int, default=5, help="samples")
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="begin no model, and wait for none, after so many"
    )
    parser.add_argument("--together", action="store_true", help="warm up all models at once: memory for all of them")
    parser.add_argument("--append", action="store_true", help="keep the rows of an earlier run")
    parser.add_argument("--profile", type=int, default=0, help="kernels of a step that are listed, by their time")
    parser.add_argument("--one", choices=CONTENDERS, help=argparse.SUPPRESS)
    parser.add_argument("--in-turns", action="store_true", help=argparse.SUPPRESS)
    options = parse(parser, arguments, torch.cuda.is_available())
    if options.one:
        turns = Turns(options.one, options.cpu_smoke, options.profile)
        for line in sys.stdin:
            row = turns.obey(line.strip())
            print(READY if row is None else json.dumps(row), flush=True)
        return 0

    end, wrong = time.monotonic() + options.seconds, False
    console, path = Console(width=150), options.out / "model_steps.csv"
    table = Table(path, COLUMNS, append=options.append)
    passed_on = ["--profile", str(options.profile), *(["--cpu-smoke"] if options.cpu_smoke else [])]

    def start() -> list[Contender]:
        return [Contender(each, passed_on, __file__) for each in options.contenders]

    started = {name: start() for name in options.models} if options.together else dict.fromkeys(options.models, start())
    if options.together:
        warm_up(started, end)
    for name, contenders in started.items():
        if not options.together:
            if time.monotonic() > end:
                console.print(f"{name}: no time left")
                continue
            warm_up({name: contenders}, end)
        rows = measure(name, contenders, options.steps, options.rounds)
        for row in rows:
            table.add(row)
        told = (f"{row['contender']} {row['ms']:.4g} ms" for row in rows if row["status"] == "ok")
        console.print(f"{name}: {', '.join(told)}", highlight=False)
        losses = [row["loss_first"] for row in rows if row["status"] == "ok"]
        if losses and max(losses) - min(losses) > TOLERANCE + ULP * max(losses):
            console.print(f"[red]{name}: the first losses differ by {max(losses) - min(losses):.3g} nats[/red]")
            wrong = True
    show(path, console)
    said = dict.fromkeys(options.contenders, "")
    for each in dict.fromkeys(each for several in started.values() for each in several):
        said[each.contender] += each.end()
    for contender, text in said.items():
        (options.out / f"model_steps {contender}.txt").write_text(text)
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
