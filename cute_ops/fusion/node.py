"""A value of a program."""

from __future__ import annotations

from typing import Any

Size = int | str  # a name, or an object of JAX, of a size that is not known
Shape = tuple[Size, ...]


class Node:
    """A value of the program.

    Attributes:
        op: an operation.
        args: what it is computed from.
        attr: as the module's table has it.
        shape: its sizes.
        dtype: the name of its dtype, ``bfloat16``.
        index: its place among the graph's nodes; arguments come first.
        users: the nodes that read it.
    """

    __slots__ = ("args", "attr", "dtype", "index", "op", "shape", "users")

    def __init__(self, op: str, args: tuple[Node, ...], attr: Any, shape: Shape, dtype: str) -> None:
        self.op, self.args, self.attr, self.shape, self.dtype = op, args, attr, shape, dtype
        self.index = -1
        self.users: list[Node] = []

    def become(self, other: Node) -> None:
        """Let all that read this node read another one, which comes before them."""
        for user in dict.fromkeys(self.users):
            user.args = tuple(other if arg is self else arg for arg in user.args)
            if user not in other.users:
                other.users.append(user)
        self.users.clear()

    def __repr__(self) -> str:
        said = "" if self.attr is None else f" {self.attr}"
        return f"<{self.index} {self.op}{said} {self.dtype}{list(self.shape)}>"
