"""Pages made from the code and the committed results: ``python docs/make_pages.py``.

The reference names what is public; its text is read from docstrings when the site is built.
"""

from __future__ import annotations

import ast
import csv
import inspect
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import typer

import cute_ops
import cute_ops_jax
import cute_ops_torch
from cute_ops import env
from cute_ops.__main__ import app
from cute_ops.composite.models import MODELS
from cute_ops.hardware import ARCHES, GPUS
from cute_ops.ops import ATTENTION, OPS, PRODUCTS
from cute_ops_torch import inductor, nn

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "docs"
RESULTS = ROOT / "benchmarks" / "results"
_MADE = "Made by `python docs/make_pages.py`."
_OPS = {op.name for op in (*OPS, *PRODUCTS, *ATTENTION, *MODELS)}
_WRITTEN = [
    "module",
    "RMSNorm",
    "AddRMSNorm",
    "LayerNorm",
    "GroupNorm",
    "DropoutAddRMSNorm",
    "DropoutAddLayerNorm",
    "Linear",
    "LinearGELU",
    "LinearSiLU",
    "LinearAdd",
    "LinearAddRMSNorm",
    "RMSNormLinear",
    "QKVRoPE",
    "GatedLinear",
    "GatedMLP",
    "MLP",
    "LinearCrossEntropy",
]  # of `nn`: not made of declarations


# Variables of others that this package reads or sets.
_OTHERS = {
    "CUDA_VISIBLE_DEVICES": "which GPUs there are; JAX lowers for the first of them",
    "CUTE_DSL_*": "settings of NVIDIA's compiler; all but those of its log belong to a kernel's name: "
    "another setting compiles it anew",
    "CUTE_DSL_ARCH": "set in processes that compile, unless you set it; each compile names its own target",
    "CUTE_DSL_DISABLE_FILE_CACHING": "set in processes that compile: kernels are in our own cache folder",
    "TMPDIR": "where kernels are linked, if the cache folder has no room",
    "XDG_CACHE_HOME": "holds the cache folder, `cute_ops`, unless `CUTE_OPS_CACHE_DIR` is set",
    "XLA_PYTHON_CLIENT_PREALLOCATE": "set to false by `verify`, unless you set it: both frameworks use the GPU",
}


def core() -> str:
    values = [name for name in cute_ops.__all__ if not callable(getattr(cute_ops, name))]
    return "\n".join(
        [
            "# `cute_ops`\n",
            "The core: what an op is declared with. It imports neither framework.\n",
            *_shown("cute_ops", (name for name in cute_ops.__all__ if name not in values)),
            *_shown("cute_ops", values),
            "## Programs\n",
            *_shown("cute_ops.declaration.program", ["Framework"], level=3),
            "## Testing\n",
            *_shown("cute_ops.testing", ["inputs", "check"], level=3),
        ]
    )


def torch() -> str:
    ops = {nn.class_name(op): op.name for op in (*OPS, *ATTENTION, *MODELS)}
    made = [name for name in nn.__all__ if name not in _WRITTEN]
    return "\n".join(
        [
            "# `cute_ops_torch`\n",
            "The adapter for PyTorch. [PyTorch](../pytorch.md) says how it works.\n",
            *_shown("cute_ops_torch", _own(cute_ops_torch, "nn")),
            "## Ops\n",
            "What each computes, takes, returns and raises is in [the ops](../ops.md).\n",
            *_shown("cute_ops_torch.functions", _declared(cute_ops_torch), level=3),
            "## Modules\n",
            "`cute_ops_torch.nn` has a module for every op that is a layer. These are made of the declarations:\n",
            *(
                f"- `{name}{inspect.signature(getattr(nn, name))}`: [`{ops[name]}`](../ops.md#{ops[name]})"
                for name in made
            ),
            "",
            *_shown("cute_ops_torch.nn", _WRITTEN, level=3),
            "## Optimizers\n",
            *_shown("cute_ops_torch.optim", ["AdamW"], level=3),
            "## torch.compile\n",
            *_shown("cute_ops_torch.inductor", inductor.__all__, level=3),
        ]
    )


def jax() -> str:
    parts = [
        "# `cute_ops_jax`\n",
        "The adapter for JAX. [JAX](../jax.md) says how it works.\n",
        *_shown("cute_ops_jax", _own(cute_ops_jax)),
        "## Ops of your own in fuse\n",
        *_shown("cute_ops_jax.fusion", ["Own"], level=3),
        "## Ops\n",
        "What each computes, takes, returns and raises is in [the ops](../ops.md).\n",
        *_shown("cute_ops_jax", _declared(cute_ops_jax), level=3),
    ]
    for title, file in {"flax.nnx": "nnx", "equinox": "equinox"}.items():
        parts += [f"## Modules for {title}\n", *_shown(f"cute_ops_jax.{file}", _classes(f"cute_ops_jax/{file}.py"), 3)]
    return "\n".join(parts)


def commands() -> str:
    """The command line: each command's help, arguments and options."""
    parts = [
        "# Commands\n",
        f"{_MADE} `cute-ops` is `python -m cute_ops` by a shorter name; `COMMAND --help` says the same.\n",
    ]
    for name, command in _commands(typer.main.get_command(app), ()):
        parts.append(f"## {name}\n")
        # A line that begins with `Example:` is a command to type.
        help_text = inspect.cleandoc(command.help or "")
        parts.append(re.sub(r"^Example: (.*)$", r"`\1`", help_text, flags=re.MULTILINE) + "\n")
        rows = [f"| {_named(p)} | {(p.help or '').replace('|', chr(92) + '|')} |" for p in command.params if p.help]
        parts += ["| argument | meaning |\n|---|---|", *rows, ""] if rows else []
    return "\n".join(parts)


def environment() -> str:
    rows = [f"| `{v.name}` | {v.meaning} |" for v in env.VARIABLES]
    return "\n".join(
        [
            "# Environment variables\n",
            f"{_MADE} A value that a variable may not have raises `ValueError` with its name.\n",
            "| variable | meaning |\n|---|---|",
            *rows,
            "",
            "`python -m cute_ops doctor` names variables that begin like these and are none, and values that they may "
            "not have.\n",
            "## Variables of others\n",
            "| variable | what it does here |\n|---|---|",
            *(f"| `{name}` | {meaning} |" for name, meaning in _OTHERS.items()),
            "",
        ]
    )


def gpus() -> str:
    """Which architectures kernels are built for, and which of them the committed results were measured on."""
    measured: dict[str, set[str]] = defaultdict(set)
    for path in RESULTS.glob("*.csv"):
        with path.open() as file:
            for row in csv.DictReader(file):
                measured[row.get("gpu", "")].add(path.name)
    run = {arch: [gpu for gpu in sorted(measured) if _is(gpu, arch)] for arch in ARCHES}
    rows = [
        f"| `{arch}` | {GPUS[arch]} | {has.number} | {has.shared_per_cta // 1024} KiB | "
        f"{', '.join(run[arch]) or 'built only'} |"
        for arch, has in ARCHES.items()
    ]
    needs = defaultdict(list)
    for op in (*OPS, *ATTENTION):
        needs[op.least_sm].append(f"`{op.name}`")
    later = [
        f"From SM {least // 10}.{least % 10} on: {', '.join(names)}.\n" for least, names in needs.items() if least > 80
    ]
    return "\n".join(
        [
            "# Which GPUs were run\n",
            f'{_MADE} Kernels compile for every architecture below, without a GPU. "Built only" means that nothing was '
            "run there: the tests compile for it, configs are those of heuristics, and no figure exists.\n",
            "| architecture | GPUs | SMs assumed | shared memory of a CTA | run on |\n|---|---|---|---|---|",
            *rows,
            "",
            *later,
            "Figures of what was run are in [the benchmarks](../benchmarks/results/README.md). Persistent kernels are "
            "built for a number of SMs: `sm_90a` is an H100 or H200 SXM, `sm_90a:114` a PCIe card. `make bench` "
            "measures another GPU, and `python -m cute_ops verify` checks an op on it.\n",
        ]
    )


MADE: dict[str, Callable[[], str]] = {
    "reference/core.md": core, "reference/torch.md": torch, "reference/jax.md": jax, "commands.md": commands,
    "environment.md": environment, "gpus.md": gpus,
}  # fmt: skip


def _shown(module: str, names: Iterable[str], level: int = 2) -> list[str]:
    options = "" if level == 2 else f"    options: {{heading_level: {level}, show_root_full_path: false}}\n"
    return [f"::: {module}.{name}\n{options}" for name in names]


def _own(package: ModuleType, *others: str) -> list[str]:
    return [name for name in package.__all__ if name not in {*_declared(package), *others}]


def _declared(package: ModuleType) -> list[str]:
    """Functions of ops, but for those that stand for several."""
    names = [name for name in package.__all__ if name in _OPS]
    return [name for name in names if ".composite." not in getattr(package, name).__module__]


def _classes(path: str) -> list[str]:
    """Public classes of a module, which its library need not be installed for."""
    return [
        node.name
        for node in ast.parse((ROOT / path).read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    ]


def _commands(group: Any, above: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _commands(command, (*above, name))
        else:
            yield " ".join((*above, name)), command


def _named(parameter: Any) -> str:
    """``--out``, ``-o``; of an argument, what stands for it in the usage."""
    names = parameter.opts if parameter.param_type_name == "option" else [parameter.metavar or parameter.name.upper()]
    return ", ".join(f"`{name}`" for name in names)


def _is(gpu: str, arch: str) -> bool:
    return any(part in gpu.split() for part in GPUS[arch].split(", "))


if __name__ == "__main__":
    for page, text in MADE.items():
        (PAGES / page).write_text(text(), encoding="utf-8")
