"""The loops of :func:`linear_cross_entropy`: loss and gradients of one chunk of rows after another.

The logits of a chunk are a matrix product. Our kernel computes their loss and overwrites them with their gradient, from
which two more products compute the gradients of the hidden states and of the weight.

Where devices share the classes, each has the logits of its own. An op on them then gives what it gives for those of all
devices, which exchange a few numbers per row; gradients of the hidden states are terms of a sum over devices.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple, Protocol, TypeVar

from cute_ops.op import Op, Sharding, Tensor
from cute_ops.ops.reduction.cross_entropy import cross_entropy, cross_entropy_bwd, cross_entropy_step

State = TypeVar("State")
Arrays = Mapping[str, Any]


class Chunks(Protocol):
    """The chunks of a call, as a framework cuts them. Arrays have one leading dim, that of the rows. A function that
    gets an array and returns it may have changed it in place.

    Attributes:
        inputs: hidden, weight, target and what else a loop takes, by name.
        classes_shared: whether devices share the classes.
    """

    inputs: Arrays

    @property
    def classes_shared(self) -> bool: ...

    def each(self, state: State, body: Callable[[State, Any], State]) -> State:
        """``state = body(state, at)`` for every chunk."""

    def call(self, op: Op, inputs: Arrays, *, inplace: bool = False, into: Arrays = ...) -> Arrays:
        """Run an op on the logits of a chunk.

        Args:
            op: the op.
            inputs: by name.
            inplace: outputs take the memory of inputs that are donated to them.
            into: memory that outputs may take, by name.
        """

    def new_rows(self) -> Any:
        """A float32 number for each row."""

    def cut(self, array: Any, at: Any) -> Any:
        """The rows of a chunk."""

    def put(self, array: Any, at: Any, part: Any) -> Any:
        """The array with these as the rows of a chunk."""

    def logits(self, at: Any) -> Any:
        """``hidden @ weight.T + bias`` of a chunk."""

    def sums(self) -> dict[str, Any]:
        """The gradients that are wanted, by name, which chunks fill or add to."""

    def put_product(self, array: Any, at: Any, a: Any, b: Any) -> Any:
        """``put(array, at, a @ b)``."""

    def add_product(self, total: Any, at: Any, a: Any, b: Any) -> Any:
        """``total + a @ b``, rounded to the dtype of the total only."""

    def add_rows(self, total: Any, rows: Any) -> Any:
        """The total with these rows added, in float32."""

    def rounded(self, sums: dict[str, Any]) -> Arrays:
        """The gradients in the dtypes of what they are of."""


def rows(chunks: Chunks) -> Arrays:
    """Loss of each row, and its log-sum-exp in two parts."""

    def body(found: Arrays, at: Any) -> Arrays:
        made = chunks.call(cross_entropy, {"logits": chunks.logits(at), **_cut(chunks, at, "target")})
        return {name: chunks.put(array, at, made[name]) for name, array in found.items()}

    start: Arrays = {name: chunks.new_rows() for name in cross_entropy.outputs}
    return chunks.each(start, body)


def step(chunks: Chunks) -> Arrays:
    """Loss of each row, and the gradients for cotangents that are known beforehand."""

    def body(state: tuple[Any, dict[str, Any]], at: Any) -> tuple[Any, dict[str, Any]]:
        loss, sums = state
        given = {"logits": chunks.logits(at), **_cut(chunks, at, "target", "dloss")}
        if chunks.classes_shared:  # devices exchange losses before each computes its gradient
            found = chunks.call(cross_entropy, {name: given[name] for name in cross_entropy.inputs})
            given |= {name: found[name] for name in ("row_max", "log_sum")}
            found = {**found, **chunks.call(cross_entropy_bwd, given, inplace=True)}
        else:
            found = chunks.call(cross_entropy_step, given, inplace=True, into={"loss": chunks.cut(loss, at)})
        return chunks.put(loss, at, found["loss"]), _add(chunks, sums, at, found["dlogits"])

    loss, sums = chunks.each((chunks.new_rows(), chunks.sums()), body)
    return {"loss": loss, **chunks.rounded(sums)}


def rows_bwd(chunks: Chunks) -> Arrays:
    """The gradients for a cotangent of each row's loss, from logits that are computed again."""

    def body(sums: dict[str, Any], at: Any) -> dict[str, Any]:
        given = {"logits": chunks.logits(at), **_cut(chunks, at, "target", *_SAVED)}
        found = chunks.call(cross_entropy_bwd, given, inplace=True)
        return _add(chunks, sums, at, found["dlogits"])

    return chunks.rounded(chunks.each(chunks.sums(), body))


def _cut(chunks: Chunks, at: Any, *names: str) -> dict[str, Any]:
    return {name: chunks.cut(chunks.inputs[name], at) for name in names}


def _add(chunks: Chunks, sums: dict[str, Any], at: Any, dlogits: Any) -> dict[str, Any]:
    """The gradients with those of one more chunk."""
    found = dict(sums)
    if "dhidden" in sums:
        found["dhidden"] = chunks.put_product(sums["dhidden"], at, dlogits, chunks.inputs["weight"])
    if "dweight" in sums:
        hidden = chunks.cut(chunks.inputs["hidden"], at)
        found["dweight"] = chunks.add_product(sums["dweight"], at, dlogits.T, hidden)
    if "dbias" in sums:
        found["dbias"] = chunks.add_rows(sums["dbias"], dlogits)
    return found


class Loop(NamedTuple):
    """One of the loops.

    Attributes:
        run: the function.
        inputs: what it takes beside the layer and the target.
        outputs: what it returns, by name; of gradients those that are wanted.
    """

    run: Callable[[Chunks], Arrays]
    inputs: Mapping[str, Tensor]
    outputs: Mapping[str, Tensor]

    def declared(self, name: str, outputs: Collection[str], run: Callable[..., Arrays] | None = None) -> Op:
        """The loop as an op of this name with these outputs: from it follows what devices may share."""
        hidden, weight, bias = LAYER.items()
        return Op(
            name, inputs=dict([hidden, weight, ("target", Tensor("*m", "I")), *self.inputs.items(), bias]),
            outputs={n: tensor for n, tensor in self.outputs.items() if n in outputs}, dtypes=cross_entropy.dtypes,
            attrs={n: cross_entropy.attrs[n] for n in ("ignore_index", "label_smoothing", "z_loss")},
            static=("n", "h"),
            reference=run or self.run, kernel=cross_entropy.kernel,  # every Op names one; this one's is not run
            # Losses of slices are merged; gradients of what slices share add up.
            sharding=Sharding(split=(cross_entropy if "loss" in outputs else cross_entropy_bwd).split),
        )  # fmt: skip


_ROW, _SAVED = Tensor("*m", "float32"), ("row_max", "log_sum", "dloss")
LAYER = {"hidden": Tensor("*m h", "T"), "weight": Tensor("n h", "T"), "bias": Tensor("n", "T", optional=True)}
GRADIENTS = {"dhidden": LAYER["hidden"], "dweight": LAYER["weight"], "dbias": Tensor("n", "T", given="bias")}
LOOPS = {
    "rows": Loop(rows, {}, dict.fromkeys(cross_entropy.outputs, _ROW)),
    "step": Loop(step, {"dloss": _ROW}, {"loss": _ROW, **GRADIENTS}),
    "rows_bwd": Loop(rows_bwd, dict.fromkeys(_SAVED, _ROW), GRADIENTS),
}
