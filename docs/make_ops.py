"""``docs/ops.md`` and the README's list of ops, from the declarations: ``python docs/make_ops.py``."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from cute_ops.composite.models import MODELS
from cute_ops.declaration.op import Op
from cute_ops.ops import ATTENTION, OPS, PRODUCTS

ROOT = Path(__file__).parents[1]
PAGE, README = ROOT / "docs" / "ops.md", ROOT / "README.md"
ROOMS = "cute_ops.ops.", "cute_ops.composite."
BEGIN, END = "<!-- ops: begin (made by docs/make_ops.py) -->", "<!-- ops: end -->"
PUBLIC = (*OPS, *PRODUCTS, *ATTENTION, *MODELS)
# By room of the declaration, cute_ops/ops/<room>.
FAMILIES = {
    "norm": "Norms", "activation": "Activations, gated products", "rotary": "Rotary embeddings", "conv": "Convolutions",
    "gemm": "Matrix products", "attention": "Attention, caches of keys and values",
    "reduction": "Losses, softmax, sums", "routing": "Routing to experts",
    "quantize": "float8 with scales, for inference", "optim": "Optimizer",
}  # fmt: skip
# Programs of several ops, which are declared in cute_ops/composite.
PROGRAMS = {
    "rope_at": "rotary", "causal_conv1d_packed": "conv", "causal_conv1d_states": "conv",
    "linear_cross_entropy_metrics": "reduction",
}  # fmt: skip
_INTRODUCTION = """# The ops

Made from the declarations by `python docs/make_ops.py`. Every op below is `torch.ops.cute.<name>`,
`cute_ops_torch.<name>` and `cute_ops_jax.<name>`; `*m` stands for any leading dims.
"""


def page() -> str:
    """The documentation of every op and its gradient."""
    parts = [_INTRODUCTION]
    for title, ops in families().items():
        parts += [f"## {title}\n", table(ops), *map(description, ops)]
    return "\n".join(parts)


def description(op: Op) -> str:
    """An op's signature and documentation, its declared tensors, its files and its gradient."""
    tensors = [*op.inputs.items(), *op.outputs.items()]
    declared = ", ".join(f"`{name}: {t.declared}`" for name, t in tensors)
    parts = [
        f"### {op.name}\n\n```text\n{signature(op)}\n\n{inspect.cleandoc(op.doc)}\n```\n",
        f"Declared: {declared}. Source: {source(op)}.\n",
        *(f"Gradient: `{signature(each)}`\n\n```text\n{inspect.cleandoc(each.doc)}\n```\n" for each in op.steps),
    ]
    return "\n".join(parts)


def readme() -> str:
    """The README with its list made anew."""
    before, _, rest = README.read_text(encoding="utf-8").partition(BEGIN)
    return f"{before}{BEGIN}\n{links()}\n{END}{rest.partition(END)[2]}"


def table(ops: Sequence[Op]) -> str:
    """One line per op."""
    lines = [f"| [`{op.name}`](#{op.name}) | {summary(op)} |" for op in ops]
    return "\n".join(["| op | computes |", "|---|---|", *lines, ""])


def links() -> str:
    """One line per family."""
    lines = [
        f"| {title} | {', '.join(f'[`{op.name}`](docs/ops.md#{op.name})' for op in ops)} |"
        for title, ops in families().items()
    ]
    return "\n".join(["| family | ops |", "|---|---|", *lines])


def families() -> dict[str, list[Op]]:
    """The ops by title of their family, each family in the order of its declarations."""
    found: dict[str, list[Op]] = {title: [] for title in FAMILIES.values()}
    for op in PUBLIC:
        found[FAMILIES[PROGRAMS.get(op.name) or declaration(op).parent.name]].append(op)
    return found


def declaration(op: Op) -> Path:
    """The file that declares an op, relative to the repository."""
    modules = [m for name, m in sorted(sys.modules.items()) if name.startswith(ROOMS) and m.__file__]
    holders = [m for m in modules if any(value is op for value in vars(m).values())]
    texts = {path: path.read_text(encoding="utf-8") for path in (Path(str(m.__file__)) for m in holders)}
    names_it = re.compile(rf'(\bname=|\(\s*)"{op.name}"')
    (declared,) = (path for path, text in texts.items() if names_it.search(text))
    return declared.relative_to(ROOT)


def source(op: Op) -> str:
    """Links to the files of an op's declaration and of its kernel."""
    declared = declaration(op).as_posix()
    if not op.kernel:
        return f"[program](../{declared})"
    kernel = op.kernel.partition(":")[0].replace(".", "/") + ".py"
    return f"[declaration](../{declared}), [kernel](../{kernel})"


def summary(op: Op) -> str:
    return re.sub(r":func:(`\w+`)", r"\1", inspect.cleandoc(op.doc).partition("\n")[0])


def signature(op: Op) -> str:
    inputs = [f"{name}=None" if t.optional else name for name, t in op.inputs.items()]
    arguments = ", ".join([*inputs, *(f"{name}={value!r}" for name, value in {**op.attrs, **op.options}.items())])
    return f"{op.name}({arguments})"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    README.write_text(readme(), encoding="utf-8")
