"""The one format of messages on a call of an op.

Every message names the op and the argument, says what came and what was expected, and lists what had been bound so far.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from cute_ops.declaration.fields import Declaration
from cute_ops.declaration.shapes import Array
from cute_ops.errors import is_array, shown


def message(
    op: Declaration,
    problem: str,
    inputs: Mapping[str, Array | None] | None = None,
    dims: Mapping[str, object] | None = None,
    dtypes: Mapping[str, str] | None = None,
) -> str:
    """The one message format: a headline, the arguments as they came, what was bound so far."""
    lines = [f"cute.{op.name}: {problem}"]
    if inputs:
        shown = ((n, a) for n, a in inputs.items() if a is not None)
        texts = [(f"{n}:", f"{a.dtype}{list(a.shape)}", op.inputs[n].declared) for n, a in shown]
        name_width = max((len(t[0]) for t in texts), default=0)
        text_width = max((len(t[1]) for t in texts), default=0)
        lines += [f"  {n:<{name_width}} {t:<{text_width}}   declared {d}" for n, t, d in texts]
    bound = bound_text(dims or {}, dtypes or {})
    if bound:
        lines.append(f"  bound so far: {bound}")
    return renamed("\n".join(lines), op.aliases)


def bound_text(dims: Mapping[str, object], dtypes: Mapping[str, str]) -> str:
    """The bound dims and dtype variables as text: ``*m=(3, 5), n=64, T=float32``."""
    texts = [
        f"*{name}={tuple(value)}" if isinstance(value, tuple) else f"{name}={value}" for name, value in dims.items()
    ]
    texts += [f"{name}={value}" for name, value in dtypes.items()]
    return ", ".join(texts)


def renamed(text: str, aliases: Mapping[str, str]) -> str:
    """A text with names replaced by their aliases: ``xs[2]`` for ``xs_2``."""
    return re.sub(r"\w+", lambda word: aliases.get(word[0], word[0]), text) if aliases else text


@contextmanager
def naming(
    op: Declaration, inputs: Mapping[str, Array | None], dims: Mapping[str, object], dtypes: Mapping[str, str]
) -> Iterator[None]:
    """Add the call, as :func:`message` does, to an error for a GPU that no kernel is built for."""
    try:
        yield
    except NotImplementedError as error:
        problem = f"{str(error).removeprefix('cute_ops: ')}."
        raise NotImplementedError(message(op, problem, inputs, dims, dtypes)) from None


def wrong_attribute(op: Declaration, name: str, value: Any) -> str:
    """The error text for the value of an attribute or a scalar; empty if its type is the declared one.

    An array is most often meant for an input that the op does not have, such as a bias.
    """
    default = op.keywords[name]
    what, kind = "scalar" if name in op.scalars else "attribute", type(default).__name__
    # bool is an int in Python, but `eps=True` is a mistake.
    if isinstance(value, bool) == isinstance(default, bool) and isinstance(
        value, (int, float) if isinstance(default, float) else type(default)
    ):
        return ""
    takes = without_bias(op) if is_array(value) else ""
    return f"{what} `{name}` must be {kind}, got {shown(value)}{takes}."


def without_bias(op: Declaration) -> str:
    """The end of a message on one array too many, if the op has no bias; empty for other ops."""
    listed = ", ".join(f"`{name}`" for name in op.inputs)
    return "" if "bias" in op.inputs else f"; its arrays are {listed}, and no bias"
