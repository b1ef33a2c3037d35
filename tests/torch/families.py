"""What is found by meaning in all families of an installed transformers: norms, rotary functions and MLPs.

``python tests/torch/families.py [--show] [PATTERN]`` makes each class of each ``modeling_*.py`` on the meta device,
with its family's default configuration, traces it on fake tensors and says what its graph equals. It prints one line
for each kind: how many there are, how many of them could be made and traced, how many are expressions as a whole, and
how many equal an op of ours. ``--show`` prints one line for each class, with the reason where it is no op.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import logging
import pkgutil
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from cute_ops.fusion.analyse import Analysis, analyse
from cute_ops_torch.inductor.front import Front
from cute_ops_torch.inductor.trace import traced

N = 64
_NORM = re.compile(r"(Norm|Norm1P|NormGated|NormDynamic|Norm2d|LayerNormChannelsFirst|NormSimple)$")
_MLP = re.compile(r"(MLP|Mlp|FeedForward|FFN|DenseActDense|DenseGatedActDense|FeedForwardNetwork|MLPBlock)$")
_ROTATION = re.compile(r"^apply_(multimodal_)?rotary|^apply_rotary_emb")
_OPS = ("rmsnorm", "layernorm", "add_rmsnorm")
_PARTS = ("silu_mul", "gelu_mul", "swiglu", "geglu", "silu", "gelu", "relu2")
# Of arguments of constructors, by name.
_ARGUMENTS = {
    "hidden_size": N, "dim": N, "normalized_shape": N, "num_channels": N, "n": N, "embed_dim": N, "d_model": N,
    "intermediate_size": 2 * N, "hidden_dim": 2 * N, "inner_dim": 2 * N, "mlp_dim": 2 * N, "n_state": 2 * N,
    "ffn_dim": 2 * N, "d_ff": 2 * N, "in_features": N, "hidden_features": 2 * N, "out_features": N, "eps": 1e-6,
    "input_dim": N, "output_dim": N, "num_layers": 2, "layer_idx": 0, "layer_id": 0, "hidden_act": "gelu",
    "activation": "gelu", "dropout": 0.0, "group_size": N, "in_dim": N, "out_dim": N, "bias": True, "layer_number": 0,
    "head_dim": N, "in_channels": N, "feat_dim": N, "num_features": N, "hidden_channels": 2 * N, "size": N,
}  # fmt: skip


class Seen(NamedTuple):
    """What became of one class or function.

    Attributes:
        made: whether it was made and traced.
        whole: whether expressions and products compute all of it.
        op: the ops that it equals; empty if it equals none.
        why: the reason if it equals none.
    """

    kind: str
    name: str
    made: bool = False
    whole: bool = False
    op: str = ""
    why: str = ""


def modules(pattern: str) -> Iterator[tuple[str, Any]]:
    """The families' modules."""
    import transformers.models as models

    for family in sorted(each.name for each in pkgutil.iter_modules(models.__path__) if each.ispkg):
        package = importlib.import_module(f"transformers.models.{family}")
        for each in sorted(each.name for each in pkgutil.iter_modules(package.__path__)):
            if each.startswith("modeling_") and re.search(pattern, each):
                try:
                    yield (
                        f"transformers.models.{family}.{each}",
                        importlib.import_module(f"transformers.models.{family}.{each}"),
                    )
                except Exception as error:  # a library that is not installed
                    print(f"{each}: {type(error).__name__}: {error}", file=sys.stderr)


def look(pattern: str = "") -> Iterator[Seen]:
    """What is found, one after the other."""
    for path, module in modules(pattern):
        for name, value in vars(module).items():
            if getattr(value, "__module__", "") != path:
                continue
            if inspect.isclass(value) and issubclass(value, nn.Module):
                if _NORM.search(name):
                    yield _of_class("norm", name, value, module)
                elif _MLP.search(name):
                    yield _of_class("mlp", name, value, module)
            elif inspect.isfunction(value) and _ROTATION.match(name):
                yield _of_rotation(f"{path.rpartition('.')[2]}.{name}", value)


def _of_class(kind: str, name: str, cls: type[nn.Module], module: Any) -> Seen:
    why = "no configuration makes it"
    for make in _makers(cls, module):
        try:
            with torch.device("meta"):
                made = make().eval()
        except Exception as error:
            why = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            continue
        return _of_module(kind, name, made)
    return Seen(kind, name, why=why)


def _makers(cls: type[nn.Module], module: Any) -> Iterator[Callable[[], nn.Module]]:
    """Ways to make a class: with arguments by name, and with each configuration of its family."""
    parameters = [*inspect.signature(cls.__init__).parameters.values()][1:]
    needed = [p for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    configs: list[Any] = [None]
    if any("config" in p.name for p in needed):
        path = cls.__module__.replace("modeling_", "configuration_")
        try:
            classes = [v for k, v in vars(importlib.import_module(path)).items() if k.endswith("Config")]
        except ImportError:
            classes = []
        classes += [v for k, v in vars(module).items() if k.endswith("Config") and inspect.isclass(v)]
        stem = cls.__name__[:6]
        classes = [c for c in dict.fromkeys(classes) if c.__name__ not in ("PreTrainedConfig", "PretrainedConfig")]
        configs = sorted(classes, key=lambda c: (c.__name__[:6] != stem, "Vision" in c.__name__, len(c.__name__)))[:8]
    for config in configs:

        def make(config: Any = config) -> nn.Module:
            made = None if config is None else config()
            given = {p.name: made if "config" in p.name else _argument(p.name, made) for p in needed}
            if not needed and not parameters:
                return cls()
            if config is None and not needed:
                given = {p.name: _ARGUMENTS[p.name] for p in parameters[:1] if p.name in ("dim", "hidden_size")}
            return cls(**given)

        yield make


def _argument(name: str, config: Any) -> Any:
    if config is not None and isinstance(getattr(config, name, None), (int, float, str)):
        return getattr(config, name)
    return _ARGUMENTS[name]


def _of_module(kind: str, name: str, module: nn.Module) -> Seen:
    n = _width(module)
    wanted = [p for p in [*inspect.signature(module.forward).parameters.values()] if p.default is p.empty]
    gated = "gate" in inspect.signature(module.forward).parameters
    count = len([p for p in wanted if p.kind is p.POSITIONAL_OR_KEYWORD]) + gated
    why = ""
    for rank in (3, 4, 2):
        shape = {3: (2, 6, n), 4: (2, n, 3, 5), 2: (6, n)}[rank]
        with torch.device("meta"):
            args = tuple(torch.empty(shape, dtype=torch.bfloat16) for _ in range(max(count, 1)))
        try:
            graph, _ = traced(module, args, dtype=torch.bfloat16)
        except Exception as error:
            why = why or f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            continue
        front = Front(graph)
        return _judged(kind, name, analyse(front.graph), front)
    return Seen(kind, name, why=why)


def _width(module: nn.Module) -> int:
    layers = [child for child in module.modules() if isinstance(child, (nn.Linear, nn.LayerNorm))]
    if layers:
        return layers[0].in_features if isinstance(layers[0], nn.Linear) else layers[0].normalized_shape[0]
    for child in module.modules():
        if type(child).__name__ == "Conv1D":  # of GPT-2
            return int(child.weight.shape[0])
        if isinstance(child, (nn.Conv1d, nn.Conv2d)):
            return child.in_channels
    return next((int(t.shape[0]) for t in (*module.parameters(), *module.buffers()) if t.ndim == 1), N)


def _judged(kind: str, name: str, analysis: Analysis, front: Front) -> Seen:
    reasons = {_said(node, why) for node, why in analysis.reasons.items() if node.dtype in ("bfloat16", "float32")}
    whole = not reasons
    meanings = [found.meaning.op if found.meaning is not None else "" for found in analysis.found]
    texts = "; ".join(found.text for found, op in zip(analysis.found, meanings, strict=True) if not op)
    if kind == "norm":
        op = meanings[0] if whole and len(meanings) == 1 and meanings[0] in _OPS else ""
    else:
        # Products with what follows them: an activation or a gate of ours, or a bias, is an epilogue.
        linear = any(node.op == "contract" for node in front.graph.nodes)
        op = "+".join(["linear", *(op or "epilogue" for op in meanings)]) if whole and linear else ""
    return Seen(kind, name, True, whole, op, "" if op else "; ".join(sorted(reasons)) or texts[:160])


def _said(node: Any, why: str) -> str:
    return why or node.op


def _of_rotation(name: str, function: Any) -> Seen:
    class Rotated(nn.Module):
        def forward(self, *args: torch.Tensor) -> Any:
            return function(*args)

    count = len([p for p in inspect.signature(function).parameters.values() if p.default is p.empty])
    why = ""
    for shapes in _rotations(count):
        try:
            with torch.device("meta"):
                args = tuple(torch.empty(shape, dtype=torch.bfloat16) for shape in shapes)
            front = Front(traced(Rotated(), args, dtype=torch.bfloat16)[0])
        except Exception as error:
            why = why or f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            continue
        analysis = analyse(front.graph)
        meanings = [found.meaning.op if found.meaning is not None else "" for found in analysis.found]
        meanings += [call.named.op for call in analysis.calls]
        reasons = {_said(node, why) for node, why in analysis.reasons.items()} - {"concat", "slice", "rope"}
        reasons -= {"slice of other columns than a half", "reshape within rows", "slice of one half", "transpose"}
        turned = meanings.count("rope")
        op = "rope" if turned and turned == len(front.graph.outputs) else ""
        texts = "; ".join(found.text for found in analysis.found if found.meaning is None)
        return Seen("rotation", name, True, not reasons, op, "" if op else "; ".join(sorted(reasons)) or texts[:160])
    return Seen("rotation", name, why=why)


def _rotations(count: int) -> Iterator[tuple[tuple[int, ...], ...]]:
    q, k = (2, 4, 6, 8), (2, 2, 6, 8)
    tables = [(2, 6, 8), (6, 8), (2, 6, 4), (6, 4), (1, 6, 8), (2, 6, 1, 8), (2, 1, 6, 8), (3, 2, 6, 8), (6, 2)]
    for table in tables:
        if count >= 4:
            yield (q, k, table, table)
            yield ((6, 4, 8), (6, 2, 8), table, table)
            yield ((2, 6, 4, 8), (2, 6, 2, 8), table, table)
        elif count == 3:
            yield (q, table, table)
            yield ((2, 6, 4, 8), table, table)
            yield ((6, 4, 8), table, table)
            yield (q, k, table)
        else:
            yield (q, table)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("pattern", nargs="?", default="")
    parser.add_argument("--show", action="store_true")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable()
    import transformers

    counts: dict[str, Counter[str]] = {}
    for seen in look(args.pattern):
        count = counts.setdefault(seen.kind, Counter())
        count.update(all=1, made=seen.made, whole=seen.whole, op=bool(seen.op))
        if args.show:
            print(f"{seen.kind:9s} {seen.name:50s} {seen.op or '-':30s} {seen.why}", flush=True)
    print(f"transformers {transformers.__version__}")
    for kind, count in sorted(counts.items()):
        print(f"{kind:9s} {count['all']:4d}: {count['made']} traced, {count['whole']} whole, {count['op']} ops of ours")


if __name__ == "__main__":
    main()
