"""Variants: everything that identifies one compiled kernel.

The digest of a variant names the exported symbol, the cache file and the JAX target, so that a name never means two
kernels. Variants hold Python ints and strings, no tensors, and are stored as JSON.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import cached_property
from typing import Any, Literal, NamedTuple

from cute_ops.declaration.shapes import ITEMSIZE
from cute_ops.errors import Fields
from cute_ops.files import json_schema


class TensorKey(NamedTuple):
    """The properties of one tensor that a kernel knows at compile time.

    Attributes:
        name: the argument's name.
        dtype: dtype name.
        shape: one entry per dim as passed: an int where static, None where dynamic.
        layout: ``flat``: compact, row-major but for the contiguous dim; ``strided``: free strides on all dims but the
            contiguous one; ``scattered``: no dim is contiguous, free strides on all; ``number``: not a tensor but a
            number that is passed by value.
        align: bytes that divide the base address, at most 16.
        row_align: bytes that divide every stride but the contiguous dim's, at most 16.
        order: the dims in the order in which the compiled function takes them, the contiguous one last; empty if that
            is the declared order.
    """

    name: str
    dtype: str
    shape: tuple[int | None, ...]
    layout: Literal["flat", "strided", "scattered", "number"]
    align: int
    row_align: int
    order: tuple[int, ...] = ()

    @property
    def contiguous(self) -> int:
        """The contiguous dim, counted from the end: -1 is the last."""
        return self.order[-1] - self.rank if self.order else -1

    @property
    def passed(self) -> tuple[int, ...]:
        """The dims in the order in which the compiled function takes them."""
        return self.order or tuple(range(self.rank))

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def itemsize(self) -> int:
        return ITEMSIZE[self.dtype]


class _Fields(NamedTuple):
    op: str
    kernel: str
    arch: str
    names: tuple[str, ...]
    args: tuple[TensorKey | None, ...]
    static: tuple[tuple[str, int | None], ...]
    attributes: tuple[tuple[str, Any], ...]
    settings: tuple[tuple[str, int | str], ...]
    toolchain: tuple[str, str]
    sources: str
    declared: tuple[str, ...] = ()


# As JSON, for :mod:`cute_ops.files.json_schema`.
TENSOR_SHAPE = {
    "name": str, "dtype": frozenset(ITEMSIZE), "shape": [json_schema.Either(int, None)],
    "layout": frozenset({"flat", "strided", "scattered", "number"}), "align": int, "row_align": int,
    "order": [int],
}  # fmt: skip
SHAPE = {
    "op": str, "kernel": str, "arch": str, "names": [str], "args": [json_schema.Either(TENSOR_SHAPE, None)],
    "static": [(str, json_schema.Either(int, None))],
    "attributes": [(str, json_schema.Either(str, int, float, bool, None))],
    "settings": [(str, json_schema.Either(int, str))], "toolchain": (str, str), "sources": str, "declared": [str],
}  # fmt: skip


class Variant(_Fields):
    """One compiled kernel.

    Attributes:
        op: the op's name.
        kernel: ``module:Class``.
        arch: SM target, ``sm_90a``.
        args: what the exported function takes, in order: inputs, outputs, workspaces, None for absent ones; then again
            the inputs that the kernel writes, which XLA passes as results, too; then numbers.
        names: their names, absent ones included.
        static: compile-time dims, None for a dynamic one.
        attributes: compile-time attributes.
        settings: the kernel's config, sorted by name.
        toolchain: versions of the DSL and TVM-FFI.
        sources: digest of the kernel's sources, and of what compiles it.
        declared: the sources that the op declares besides the kernel's imports.
    """

    @cached_property
    def tensors(self) -> Mapping[str, TensorKey | None]:
        return Fields(self.op, "tensors have", zip(self.names, self.args, strict=True))

    @cached_property
    def dims(self) -> Mapping[str, int | None]:
        return Fields(self.op, "dims have", self.static)

    @cached_property
    def attrs(self) -> Mapping[str, Any]:
        return Fields(self.op, "attributes have", self.attributes)

    @cached_property
    def config(self) -> Mapping[str, Any]:
        return Fields(self.op, "config has", self.settings)

    @cached_property
    def digest(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()

    @cached_property
    def symbol(self) -> str:
        """The exported symbol, the stem of the cache file and the JAX target's name."""
        return f"cute_{self.op}_{self.digest[:24]}"

    @cached_property
    def text(self) -> str:
        """The variant as JSON."""
        raw = self._asdict() | {"args": [key and key._asdict() for key in self.args]}
        return json.dumps(raw, sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes) -> Variant:
        """The variant of this :attr:`text`; raises as :meth:`from_raw`."""
        return cls.from_raw(json_schema.parse(text, object))

    @classmethod
    def from_raw(cls, raw: Any) -> Variant:
        """The variant of a :attr:`text` as ``json.loads`` reads it.

        Raises:
            ValueError: it does not describe a variant; says where it differs.
        """
        json_schema.check(raw, SHAPE)
        args = tuple(
            a and TensorKey(**{k: a[k] for k in TENSOR_SHAPE} | {k: tuple(a[k]) for k in ("shape", "order")})
            for a in raw["args"]
        )
        pairs = {k: tuple(tuple(p) for p in raw[k]) for k in ("static", "attributes", "settings")}
        rest = {k: tuple(raw[k]) for k in ("names", "toolchain", "declared")}
        return cls(**{k: raw[k] for k in SHAPE} | pairs | rest | {"args": args})

    def describe(self) -> str:
        """One line for people: ``rmsnorm sm_90a x:bfloat16[?,4096] weight:float32[4096]``."""
        texts = [
            f"{a.name}:{a.dtype}[{','.join('?' if s is None else str(s) for s in a.shape)}]" for a in self.args if a
        ]
        return f"{self.op} {self.arch} " + " ".join(texts)
