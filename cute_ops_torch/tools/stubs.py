"""Make the stub file of the functions from the declarations: ``python -m cute_ops_torch.tools.stubs``."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from cute_ops.op import Op
from cute_ops.ops import OPS, PRODUCTS
from cute_ops_torch.library.schema import parameters

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
    return _HEADER.format(names=names) + "".join(_function(op) for op in ops)


def _function(op: Op) -> str:
    kinds = [(t, "list[Tensor]" if t.many else "Tensor") for t in op.outputs.values() if not t.hidden]
    outputs = [f"{kind}{' | None' if t.given else ''}" for t, kind in kinds]
    returns = "None" if not outputs else outputs[0] if len(outputs) == 1 else f"tuple[{', '.join(outputs)}]"
    arguments = parameters(op, annotated=True, options=True)
    head = f"def {op.name}({arguments}) -> {returns}: ...\n"
    if len(head) <= 120:
        return head
    return "\n".join([f"def {op.name}(", *(f"    {a}," for a in arguments.split(", ")), f") -> {returns}: ...\n"])


if __name__ == "__main__":
    PATH.write_text(text())
