"""The gated MLP of models such as Llama: two products forward, four backward, and no other kernel.

``h = activation(x @ gate.T) * (x @ up.T)`` and ``out = h @ w_down.T``. The epilogue of the first product combines both
halves. In the backward, the epilogue of the product that computes the gradient of ``h`` turns it into the gradients of
both halves and computes ``h`` again for the gradient of ``w_down``, so neither ``h`` nor its gradient is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, cached_property
from typing import Any, TypeAlias

from cute_ops.declaration.case import Case
from cute_ops.declaration.op import Op
from cute_ops.declaration.program import FUSED, Program
from cute_ops.declaration.shapes import FLOATS
from cute_ops.declaration.split import Sharding
from cute_ops.declaration.tensor import Tensor
from cute_ops.errors import shown
from cute_ops.ops.activation.glu import geglu, swiglu
from cute_ops.ops.batches import of_program
from cute_ops.ops.gemm.gated_dgrad import gated_dgrad, gated_dgrad_again, gated_linear_kn
from cute_ops.ops.gemm.halves import stack_halves
from cute_ops.ops.gemm.linear import linear, linear_dweight, linear_dx
from cute_ops.ops.gemm.named import ACTIVATIONS, gated_linear

DOC = """Args:
    x: ``T[*m k]``; bfloat16, float16 or float32; any leading shape.
    w_gate_up: ``T[2n k]``, ``[gate | up]``; ``T[k 2n]`` with ``transposed``. If both weights have leading dims, each
        matrix of x, ``T[*b m k]``, has weights of its own.
    w_down: ``T[p n]``, for an output of p columns; ``T[n p]`` with ``transposed``.
    activation: ``"silu"`` (SwiGLU), ``"gelu"`` (by the error function) or ``"gelu_tanh"`` (GeGLU).
    fused: as in :func:`linear`, for all products.
    save: what a call that is differentiated keeps for its gradient: ``"pre"``, the product ``[*m 2n]`` before the
        activation; or ``"none"``, and the backward computes that product again.
    transposed: weights are ``[k, 2n]`` and ``[n, p]``, as in JAX.
    halves: ``w_gate_up`` is ``[2, n, k]``, or ``[k, 2, n]``, the same memory. Devices that share n then each have rows
        of both halves, so nothing is gathered, and their outputs are partial sums: ``Shard(1)`` of both weights.

Returns:
    ``T[*m p]``. Products are summed in float32, and the hidden layer between them is rounded once.

Raises:
    TypeError: a dtype that is not listed.
    ValueError: shapes that do not fit together, another activation.
"""
CASES = (
    Case("odd", {"m": (3, 5), "k": 24, "n": 33, "p": 20}),
    Case("llama3-1b", {"m": (4, 4096), "k": 2048, "n": 8192, "p": 2048}),
    Case("llama3-8b", {"m": (2, 4096), "k": 4096, "n": 14336, "p": 4096}),
    Case("gemma-2b", {"m": (4096,), "k": 2048, "n": 16384, "p": 2048}, attrs={"activation": "gelu_tanh"}),
)
X, OUT, PRE, HIDDEN = Tensor("*m k", "T"), Tensor("*m p", "T"), Tensor("*m 2n", "T"), Tensor("*m n", "T")
OVER_ROWS = Sharding(contracted=("m",))
# The ops that compute h from both halves.
POINTWISE: dict[str, tuple[Op, dict[str, Any]]] = {
    "silu": (swiglu, {}), "gelu": (geglu, {"approximate": "none"}), "gelu_tanh": (geglu, {"approximate": "tanh"}),
}  # fmt: skip
Arrays: TypeAlias = Mapping[str, Any]
Call: TypeAlias = Callable[..., Arrays]
Attrs: TypeAlias = Mapping[str, Any]


def product(call: Call, op: Op, a: Any, b: Any, attrs: Attrs) -> Any:
    """The output of one of the products, of its two inputs in order."""
    (first, second), (out,) = op.inputs, op.outputs
    return call(op, {first: a, second: b}, {"fused": attrs["fused"]})[out]


class LayerDown:
    """The ops of an MLP's product with ``w_down`` and of its gradients, with a gate or without.

    Attributes:
        transposed: whether weights are ``[k, n]`` and ``[n, p]``.
        dgrad, dgrad_again: the gradient of what the activation is of; the second gives the hidden layer again, too.
    """

    dgrad: Op
    dgrad_again: Op

    def __init__(self, transposed: bool) -> None:
        self.transposed = transposed
        self.w_down = Tensor("n p" if transposed else "p n", "T")
        self.products = (linear, linear_dx, linear_dweight)
        self.linear, self.linear_dx = (linear_dx, linear) if transposed else (linear, linear_dx)

    def backward(self, xp: Any, call: Call, inputs: Arrays, attrs: Attrs) -> Arrays:
        return call(self.dgrad_again, self._dgrad_inputs(inputs), attrs)

    def backward_only_dpre(self, xp: Any, call: Call, inputs: Arrays, attrs: Attrs) -> Arrays:
        return call(self.dgrad, self._dgrad_inputs(inputs), attrs)

    def _dgrad_inputs(self, inputs: Arrays) -> Arrays:
        return {"x": inputs["dout"], "weight": inputs["w_down"], "pre": inputs["pre"]}

    def dw_down(self, xp: Any, call: Call, inputs: Arrays, attrs: Attrs) -> Arrays:
        return {"dw_down": self._dweight(call, inputs["dout"], inputs["hidden"], attrs)}

    def _dweight(self, call: Call, dout: Any, x: Any, attrs: Attrs) -> Any:
        return product(call, linear_dweight, *((x, dout) if self.transposed else (dout, x)), attrs)


class MLPOps(LayerDown):
    """The ops of the MLP for one layout of its weights.

    Args:
        transposed: they are ``[k, 2n]`` and ``[n, p]``.
        apart: the weights of gate and up are two inputs, as a model's two linear layers have them. The products read
            one array of both: a view where they are neighbours in memory, else a copy that no call keeps.
    """

    def __init__(self, transposed: bool, apart: bool = False) -> None:
        super().__init__(transposed)
        self.suffix = f"{'_kn' if transposed else ''}{'_apart' if apart else ''}"
        rows = "n" if apart else "2n"
        names = ("w_gate", "w_up") if apart else ("w_gate_up",)
        self.halves = dict.fromkeys(names, Tensor(f"k {rows}" if transposed else f"{rows} k", "T"))
        self.inputs = {"x": X, **self.halves, "w_down": self.w_down}
        self.gated = gated_linear_kn() if transposed else gated_linear
        assert self.gated.saving is not None
        self.gated_saving = self.gated.saving
        self.dgrad, self.dgrad_again = gated_dgrad(transposed), gated_dgrad_again(transposed)

    # --- programs --------------------------------------------------------------------------------------------------

    def _gate_up(self, xp: Any, inputs: Arrays) -> Any:
        """``[gate | up]``."""
        first, *more = (inputs[name] for name in self.halves)
        return xp.joined((first, *more), self._axis(first)) if more else first

    def _axis(self, weight: Any) -> int:
        """The axis of n; weights may have leading dims."""
        return int(weight.ndim) - (1 if self.transposed else 2)

    def forward(self, xp: Any, call: Call, inputs: Arrays, attrs: Attrs) -> Arrays:
        h = call(self.gated, {"x": inputs["x"], "weight": self._gate_up(xp, inputs)}, attrs)["out"]
        return {"out": product(call, self.linear, h, inputs["w_down"], attrs)}

    def forward_saving(self, xp: Any, call: Call, inputs: Arrays, attrs: Attrs) -> Arrays:
        found = call(self.gated_saving, {"x": inputs["x"], "weight": self._gate_up(xp, inputs)}, attrs)
        return {"out": product(call, self.linear, found["out"], inputs["w_down"], attrs), "pre": found["acc"]}

    def again(self, xp: Any, call: Call, inputs: Arrays, attrs: Attrs) -> Arrays:
        return {"pre": product(call, self.linear, inputs["x"], self._gate_up(xp, inputs), attrs)}

    def backward_only_hidden(self, xp: Any, call: Call, inputs: Arrays, attrs: Attrs) -> Arrays:
        op, given = POINTWISE[attrs["activation"]]
        return {"hidden": call(op, {"x": inputs["pre"]}, given)["out"]}

    def dx(self, xp: Any, call: Call, inputs: Arrays, attrs: Attrs) -> Arrays:
        return {"dx": product(call, self.linear_dx, inputs["dpre"], self._gate_up(xp, inputs), attrs)}

    def dw_gate_up(self, xp: Any, call: Call, inputs: Arrays, attrs: Attrs) -> Arrays:
        made = self._dweight(call, inputs["dpre"], inputs["x"], attrs)
        if len(self.halves) == 1:
            return {"dw_gate_up": made}
        n = made.shape[self._axis(made)] // 2
        gate, up = (made[..., :n], made[..., n:]) if self.transposed else (made[..., :n, :], made[..., n:, :])
        return {"dw_gate": gate, "dw_up": up}

    # --- declarations ----------------------------------------------------------------------------------------------

    def op(self, save: str) -> Op:
        """The MLP."""
        name = f"gated_mlp{self.suffix}{'' if save == 'pre' else '_again'}"
        return self._declare(
            name, self.forward, (self.gated, *self.products), self.inputs, {"out": OUT}, cases=CASES,
            called="gated_mlp", grad=(*(() if save == "pre" else (self._again(),)), *self._steps),
            saving=self._saving() if save == "pre" else None,
        )  # fmt: skip

    def _saving(self) -> Op:
        outputs = {"out": OUT, "pre": PRE._replace(hidden=True)}
        ops, name = (self.gated_saving, *self.products), f"gated_mlp{self.suffix}_saving"
        return self._declare(name, self.forward_saving, ops, self.inputs, outputs, called="gated_mlp")

    def _again(self) -> Op:
        inputs = {"x": X, **self.halves}
        return self._declare(f"gated_mlp{self.suffix}_pre", self.again, self.products, inputs, {"pre": PRE})

    @cached_property
    def _steps(self) -> tuple[Op, ...]:
        """The ops of the gradient. The first gives the gradients of both halves and, for that of ``w_down``, ``h``."""
        name = f"gated_mlp{self.suffix}"
        both = {"dout": OUT, "w_down": self.w_down, "pre": PRE}

        def narrow(name: str, outputs: tuple[str, ...]) -> Op:
            if outputs == ("dpre",):
                return self._declare(name, self.backward_only_dpre, (self.dgrad,), both, {"dpre": PRE})
            return self._declare(name, self.backward_only_hidden, (swiglu, geglu), {"pre": PRE}, {"hidden": HIDDEN})

        skippable = {"dpre": PRE._replace(skippable=True), "hidden": HIDDEN._replace(skippable=True)}
        return (
            self._declare(f"{name}_bwd", self.backward, (self.dgrad_again,), both, skippable, narrow=narrow),
            self._declare(f"{name}_dx", self.dx, self.products, {"dpre": PRE, **self.halves}, {"dx": X}),
            self._declare(
                f"{name}_dw_gate_up", self.dw_gate_up, self.products, {"dpre": PRE, "x": X},
                {f"d{half}": t for half, t in self.halves.items()}, sharding=OVER_ROWS,
            ),
            self._declare(
                f"{name}_dw_down", self.dw_down, self.products, {"dout": OUT, "hidden": HIDDEN},
                {"dw_down": self.w_down}, sharding=OVER_ROWS,
            ),
        )  # fmt: skip

    def _declare(
        self, name: str, run: Callable[..., Arrays], ops: tuple[Op, ...], inputs: Mapping[str, Tensor],
        outputs: Mapping[str, Tensor], **more: Any,
    ) -> Op:  # fmt: skip
        op = Op(
            name, inputs=inputs, outputs=outputs, kernel=Program(run, ops), dtypes={"T": FLOATS},
            attrs={"activation": ACTIVATIONS, "fused": FUSED}, static=(), batched=lambda: of_program(op), **more,
        )  # fmt: skip
        return op


mlp_ops = cache(MLPOps)


def gated_mlp(save: str, transposed: bool, batched: bool = False, halves: bool = False) -> Op:
    """The op: see :data:`DOC`. ``batched``: the weights have leading dims; not with ``halves``.

    Raises:
        ValueError: another value of ``save``.
    """
    if save not in ("pre", "none"):
        raise ValueError(f"cute.gated_mlp: option `save` is {shown(save)}, expected 'pre' or 'none'.")
    op = _one(save, bool(transposed), bool(halves))
    return (batched and op.batched) or op


@cache
def gated_mlp_apart(transposed: bool) -> Op:
    """The op of weights that are apart: inputs ``w_gate`` and ``w_up``, ``[n, k]`` each, in place of ``w_gate_up``."""
    return mlp_ops(transposed, apart=True).op("pre")


@cache
def _one(save: str, transposed: bool, halves: bool) -> Op:
    op = mlp_ops(transposed).op(save)
    return stack_halves(op) if halves else op
