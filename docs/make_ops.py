"""``docs/ops.md`` and the README's list of ops, from the declarations: ``python docs/make_ops.py``."""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path

from cute_ops.composite.models import MODELS
from cute_ops.declaration.op import Op
from cute_ops.ops import ATTENTION, OPS, PRODUCTS

ROOT = Path(__file__).parents[1]
PAGE, README = ROOT / "docs" / "ops.md", ROOT / "README.md"
ROOMS = "cute_ops.ops.", "cute_ops.composite."
BEGIN, END = "<!-- ops: begin (made by docs/make_ops.py) -->", "<!-- ops: end -->"
PUBLIC = (*OPS, *PRODUCTS, *ATTENTION, *MODELS)
# By room of the kernel.
FAMILIES = {
    "norm": "norms", "rows": "activations, gated products", "rotary": "rotary embeddings", "conv": "convolutions",
    "gemm": "matrix products", "attention": "attention, caches of keys and values",
    "reduction": "losses, softmax, sums", "quantize": "float8 with scales, for inference", "optim": "optimizer",
    "routing": "routing to experts", "composite": "programs of training",
}  # fmt: skip
_INTRODUCTION = """# The ops

Made from the declarations by `python docs/make_ops.py`. Every op below is `torch.ops.cute.<name>`,
`cute_ops_torch.<name>` and `cute_ops_jax.<name>`; `*m` stands for any leading dims.
"""


def page() -> str:
    """The documentation of every op and its gradient."""
    parts = [_INTRODUCTION, table()]
    for op in PUBLIC:
        parts.append(f"## {op.name}\n\n```text\n{signature(op)}\n\n{inspect.cleandoc(op.doc)}\n```\n")
        tensors = [*op.inputs.items(), *op.outputs.items()]
        parts.append(
            "Declared: " + ", ".join(f"`{name}: {t.declared}`" for name, t in tensors) + f". Source: {source(op)}.\n"
        )
        parts += [f"Gradient: `{signature(each)}`\n\n```text\n{inspect.cleandoc(each.doc)}\n```\n" for each in op.steps]
    return "\n".join(parts)


def readme() -> str:
    """The README with its list made anew."""
    before, _, rest = README.read_text(encoding="utf-8").partition(BEGIN)
    return f"{before}{BEGIN}\n{families()}\n{END}{rest.partition(END)[2]}"


def table() -> str:
    """One line per op."""
    lines = [f"| [`{op.name}`](#{op.name}) | {summary(op)} |" for op in PUBLIC]
    return "\n".join(["| op | computes |", "|---|---|", *lines, ""])


def families() -> str:
    """One line per family."""
    links: dict[str, list[str]] = {family: [] for family in FAMILIES}
    for op in PUBLIC:
        family = op.kernel.split(".")[2] if op.kernel else source(op).split("/")[3 if "/ops/" in source(op) else 2]
        links[family].append(f"[`{op.name}`](docs/ops.md#{op.name})")
    lines = [f"| {title} | {', '.join(links[family])} |" for family, title in FAMILIES.items()]
    return "\n".join(["| family | ops |", "|---|---|", *lines])


def source(op: Op) -> str:
    """Links to the files of an op's declaration and of its kernel."""
    modules = [m for name, m in sorted(sys.modules.items()) if name.startswith(ROOMS) and m.__file__]
    holders = [m for m in modules if any(value is op for value in vars(m).values())]
    texts = {path: path.read_text(encoding="utf-8") for path in (Path(str(m.__file__)) for m in holders)}
    names_it = re.compile(rf'(\bname=|\(\s*)"{op.name}"')
    (declared,) = (path for path, text in texts.items() if names_it.search(text))
    if not op.kernel:
        return f"[program](../{declared.relative_to(ROOT).as_posix()})"
    kernel = op.kernel.partition(":")[0].replace(".", "/") + ".py"
    return f"[declaration](../{declared.relative_to(ROOT).as_posix()}), [kernel](../{kernel})"


def summary(op: Op) -> str:
    return re.sub(r":func:(`\w+`)", r"\1", inspect.cleandoc(op.doc).partition("\n")[0])


def signature(op: Op) -> str:
    inputs = [f"{name}=None" if t.optional else name for name, t in op.inputs.items()]
    arguments = ", ".join([*inputs, *(f"{name}={value!r}" for name, value in {**op.attrs, **op.options}.items())])
    return f"{op.name}({arguments})"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    README.write_text(readme(), encoding="utf-8")
