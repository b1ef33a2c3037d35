"""Make the stub files of functions that the source does not spell out: ``python -m cute_ops_torch.tools.stubs``."""

from __future__ import annotations

from collections.abc import Iterable
from inspect import Parameter, Signature
from pathlib import Path

from cute_ops.composite.models import MODELS
from cute_ops.declaration.headers import header, module_stub, stub
from cute_ops.declaration.op import Op
from cute_ops.ops import ATTENTION, OPS, PRODUCTS
from cute_ops_torch.composite import attention, block, layouts, linear, training
from cute_ops_torch.library.schema import takes_out

ROOT = Path(__file__).parents[1]
COMMAND = "python -m cute_ops_torch.tools.stubs"
_IMPORTS = {
    "Any": "from typing import Any", "Sequence": "from collections.abc import Sequence",
    "Tensor": "from torch import Tensor",
    "Epilogue": "from cute_ops.ops.gemm.by_call import Epilogue",
    "Given": "from cute_ops.composite.attention import Function, Given",
}  # fmt: skip
MODULES = {"attention": attention, "block": block, "layouts": layouts, "linear": linear, "training": training}
_HEADER = '''"""Made by ``python -m cute_ops_torch.tools.stubs``; edit the declarations instead."""

from collections.abc import Sequence

from torch import Tensor

__all__ = [
{names}]

'''


def text(ops: Iterable[Op] = (*OPS, *PRODUCTS, *ATTENTION, *MODELS)) -> str:
    """The stub file of the functions of ops."""
    ops = tuple(ops)
    names = "".join(f'    "{name}",\n' for name in sorted(op.name for op in ops))
    return _HEADER.format(names=names) + "".join(stub(op.name, _signature(op)) for op in ops)


def _signature(op: Op) -> Signature:
    found = header(op, "Tensor", "Tensor", op.outputs)
    if not takes_out(op):
        return found
    kind = "Tensor" if len(op.shown) == 1 else "Sequence[Tensor | None]"
    out = Parameter("out", Parameter.KEYWORD_ONLY, default=None, annotation=f"{kind} | None")
    return found.replace(parameters=[*found.parameters.values(), out])


def files() -> dict[Path, str]:
    """The text of each stub file."""
    published = {f"composite/{name}.pyi": module for name, module in MODULES.items()}
    made = {path: module_stub(module, COMMAND, _IMPORTS) for path, module in published.items()}
    return {ROOT / path: content for path, content in {"functions.pyi": text(), **made}.items()}


if __name__ == "__main__":
    for path, content in files().items():
        path.write_text(content, encoding="utf-8")
