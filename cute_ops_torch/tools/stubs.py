"""Make the stub file of the functions from the declarations: ``python -m cute_ops_torch.tools.stubs``."""

from __future__ import annotations

from collections.abc import Iterable
from inspect import Parameter, Signature
from pathlib import Path

from cute_ops.declaration.headers import header, stub
from cute_ops.declaration.op import Op
from cute_ops.ops import OPS, PRODUCTS
from cute_ops_torch.library.schema import takes_out

PATH = Path(__file__).parents[1] / "functions.pyi"
_HEADER = '''"""Made by ``python -m cute_ops_torch.tools.stubs``; edit the declarations instead."""

from collections.abc import Sequence

from torch import Tensor

__all__ = [
{names}]

'''


def text(ops: Iterable[Op] = (*OPS, *PRODUCTS)) -> str:
    """The text of the stub file."""
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


if __name__ == "__main__":
    PATH.write_text(text(), encoding="utf-8")
