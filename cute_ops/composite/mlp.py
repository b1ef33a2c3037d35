"""An MLP without a gate, as BERT, ViT, Whisper, GPT-2 or Nemotron have it: two products forward, four backward.

``pre = x @ w_up.T + b_up``, ``hidden = activation(pre)`` and ``out = hidden @ w_down.T + b_down``. The epilogue of the
first product adds the bias and computes the activation. In the backward, the epilogue of the product that computes the
gradient of ``hidden`` turns it into that of ``pre`` and computes ``hidden`` again for the gradient of ``w_down``. So
the activation's gradient is no pass of its own, and of both ``[*m n]`` arrays only ``pre`` is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, cached_property
from typing import Any

from cute_ops.composite.gated_mlp import OVER_ROWS, Arrays, Attrs, Call, LayerDown, product
from cute_ops.declaration.case import Case
from cute_ops.declaration.op import Op
from cute_ops.declaration.program import FUSED, Program
from cute_ops.declaration.shapes import FLOATS
from cute_ops.declaration.split import Sharding
from cute_ops.declaration.tensor import Tensor
from cute_ops.errors import shown
from cute_ops.ops.batches import of_program
from cute_ops.ops.gemm import mlp_products
from cute_ops.ops.gemm.linear import linear_dx, product_gradients
from cute_ops.ops.gemm.mlp_products import ACTIVATIONS
from cute_ops.ops.gemm.sums import column_sum

DOC = """Args:
    x: ``T[*m k]``; bfloat16, float16 or float32; any leading shape.
    w_up: ``T[n k]``; ``T[k n]`` with ``transposed``. If both weights have leading dims, each matrix of x,
        ``T[*b m k]``, has weights and biases of its own.
    b_up: ``[n]``; float32, bfloat16 or float16; or None.
    w_down: ``T[p n]``, for an output of p columns; ``T[n p]`` with ``transposed``.
    b_down: ``[p]``; float32, bfloat16 or float16; or None.
    activation: ``"gelu"`` (by the error function), ``"gelu_tanh"``, ``"relu"``, ``"relu2"`` (``max(x, 0)^2``),
        ``"silu"``, or ``"quick_gelu"`` (``x * sigmoid(1.702 x)``).
    fused: as in :func:`linear`, for all products.
    save: what a call that is differentiated keeps for its gradient: ``"pre"``, what the activation is of, ``[*m n]``;
        or ``"none"``, and the backward computes that product again.
    transposed: weights are ``[k, n]`` and ``[n, p]``, as in JAX.

Returns:
    ``T[*m p]``. Products are summed in float32, and the hidden layer between them is rounded once. If devices share
    ``n``, each adds up its part of the output with the others' before ``b_down`` is added.

Raises:
    TypeError: a dtype that is not listed.
    ValueError: shapes that do not fit together, another activation.
"""
CASES = (
    Case("odd", {"m": (3, 5), "k": 24, "n": 33, "p": 20}),
    Case("bert-large", {"m": (16, 512), "k": 1024, "n": 4096, "p": 1024}),
    Case("vit-huge", {"m": (32, 257), "k": 1280, "n": 5120, "p": 1280}),
    Case("gpt2-xl", {"m": (8, 1024), "k": 1600, "n": 6400, "p": 1600}, attrs={"activation": "gelu_tanh"}),
    Case("nemotron-4b", {"m": (4096,), "k": 3072, "n": 9216, "p": 3072}, attrs={"activation": "relu2"}),
)
X, OUT, HIDDEN = Tensor("*m k", "T"), Tensor("*m p", "T"), Tensor("*m n", "T")
B_UP, B_DOWN = Tensor("n", "B_up", optional=True), Tensor("p", "B_down", optional=True)
DTYPES = {"T": FLOATS, "B_up": FLOATS, "B_down": FLOATS}


class MLPOps(LayerDown):
    """The ops of the MLP for one layout of its weights; ``transposed``: they are ``[k, n]`` and ``[n, p]``."""

    def __init__(self, transposed: bool) -> None:
        super().__init__(transposed)
        self.name = f"mlp{'_kn' if transposed else ''}"
        self.w_up = Tensor("k n" if transposed else "n k", "T")
        self.inputs = {"x": X, "w_up": self.w_up, "w_down": self.w_down, "b_up": B_UP, "b_down": B_DOWN}
        # By whether there is a bias.
        self.up = [mlp_products.up(transposed, biased, False) for biased in (False, True)]
        self.up_saving = [mlp_products.up(transposed, biased, True) for biased in (False, True)]
        self.biased = mlp_products.biased(transposed)
        self.dgrad, self.dgrad_again = (mlp_products.dgrad(transposed, again) for again in (False, True))
        # The product with w_down, in which the dim that is summed over is called n.
        self.of_shared = linear_dx if transposed else product_gradients("dout", across=True)[0]

    # --- programs --------------------------------------------------------------------------------------------------

    def forward(self, xp: Any, call: Call, inputs: Arrays, attrs: Attrs) -> Arrays:
        hidden = call(self.up[inputs["b_up"] is not None], self._up_inputs(inputs), attrs)["out"]
        return {"out": self._down(xp, call, hidden, inputs, attrs)}

    def forward_saving(self, xp: Any, call: Call, inputs: Arrays, attrs: Attrs) -> Arrays:
        found = call(self.up_saving[inputs["b_up"] is not None], self._up_inputs(inputs), attrs)
        return {"out": self._down(xp, call, found["out"], inputs, attrs), "pre": found["pre"]}

    def again(self, xp: Any, call: Call, inputs: Arrays, attrs: Attrs) -> Arrays:
        return {"pre": self._layer(call, inputs["x"], inputs["w_up"], inputs["b_up"], attrs)}

    def _up_inputs(self, inputs: Arrays) -> Arrays:
        bias = {} if inputs["b_up"] is None else {"bias": inputs["b_up"]}
        return {"x": inputs["x"], "weight": inputs["w_up"], **bias}

    def _down(self, xp: Any, call: Call, hidden: Any, inputs: Arrays, attrs: Attrs) -> Any:
        weight, bias = inputs["w_down"], inputs["b_down"]
        if not xp.shared:
            return self._layer(call, hidden, weight, bias, attrs)
        out = product(call, self.of_shared, hidden, weight, attrs)  # each device has a part of the sum
        return out if bias is None else call(mlp_products.plus_bias(), {"x": out, "bias": bias}, {})["out"]

    def _layer(self, call: Call, x: Any, weight: Any, bias: Any, attrs: Attrs) -> Any:
        if bias is None:
            return product(call, self.linear, x, weight, attrs)
        return call(self.biased, {"x": x, "weight": weight, "bias": bias}, {"fused": attrs["fused"]})["out"]

    def backward_only_hidden(self, xp: Any, call: Call, inputs: Arrays, attrs: Attrs) -> Arrays:
        found = call(mlp_products.activation(), {"x": inputs["pre"]}, {"activation": attrs["activation"]})
        return {"hidden": found["out"]}

    def dx(self, xp: Any, call: Call, inputs: Arrays, attrs: Attrs) -> Arrays:
        return {"dx": product(call, self.linear_dx, inputs["dpre"], inputs["w_up"], attrs)}

    def dw_up(self, xp: Any, call: Call, inputs: Arrays, attrs: Attrs) -> Arrays:
        return {"dw_up": self._dweight(call, inputs["dpre"], inputs["x"], attrs)}

    def db_up(self, xp: Any, call: Call, inputs: Arrays, attrs: Attrs) -> Arrays:
        return {"db_up": call(column_sum(), {"x": inputs["dpre"], "bias": inputs["b_up"]}, {})["dbias"]}

    def db_down(self, xp: Any, call: Call, inputs: Arrays, attrs: Attrs) -> Arrays:
        return {"db_down": call(column_sum(), {"x": inputs["dout"], "bias": inputs["b_down"]}, {})["dbias"]}

    # --- declarations ----------------------------------------------------------------------------------------------

    def op(self, save: str) -> Op:
        """The MLP."""
        return self._declare(
            f"{self.name}{'' if save == 'pre' else '_again'}", self.forward, (*self.up, *self._of_layer), self.inputs,
            {"out": OUT}, cases=CASES, called="mlp", sharding=Sharding(inner=("n",)),
            grad=(*(() if save == "pre" else (self._again(),)), *self._steps),
            saving=self._saving() if save == "pre" else None, doc=DOC,
        )  # fmt: skip

    @property
    def _of_layer(self) -> tuple[Op, ...]:
        return (*self.products, self.biased, self.of_shared, mlp_products.plus_bias())

    def _saving(self) -> Op:
        outputs, ops = {"out": OUT, "pre": HIDDEN._replace(hidden=True)}, (*self.up_saving, *self._of_layer)
        return self._declare(
            f"{self.name}_saving", self.forward_saving, ops, self.inputs, outputs, called="mlp",
            sharding=Sharding(inner=("n",)),
        )  # fmt: skip

    def _again(self) -> Op:
        inputs, over_n = {"x": X, "w_up": self.w_up, "b_up": B_UP}, Sharding(parallel=("n",))
        return self._declare(
            f"{self.name}_pre", self.again, (*self.products, self.biased), inputs, {"pre": HIDDEN}, sharding=over_n
        )

    @cached_property
    def _steps(self) -> tuple[Op, ...]:
        """The ops of the gradient. The first gives the gradient of ``pre`` and, for that of ``w_down``, ``hidden``."""
        both, over_n = {"dout": OUT, "w_down": self.w_down, "pre": HIDDEN}, Sharding(parallel=("n",))

        def narrow(name: str, outputs: tuple[str, ...]) -> Op:
            if outputs == ("dpre",):
                return self._declare(
                    name, self.backward_only_dpre, (self.dgrad,), both, {"dpre": HIDDEN}, sharding=over_n
                )
            return self._declare(
                name, self.backward_only_hidden, (mlp_products.activation(),), {"pre": HIDDEN}, {"hidden": HIDDEN},
                sharding=over_n,
            )  # fmt: skip

        skippable = {"dpre": HIDDEN._replace(skippable=True), "hidden": HIDDEN._replace(skippable=True)}
        over_rows = Sharding(parallel=("n",), contracted=("m",))
        return (
            self._declare(
                f"{self.name}_bwd", self.backward, (self.dgrad_again,), both, skippable, narrow=narrow, sharding=over_n
            ),
            self._declare(
                f"{self.name}_dx", self.dx, self.products, {"dpre": HIDDEN, "w_up": self.w_up}, {"dx": X},
                sharding=Sharding(contracted=("n",)),
            ),
            self._declare(
                f"{self.name}_dw_up", self.dw_up, self.products, {"dpre": HIDDEN, "x": X}, {"dw_up": self.w_up},
                sharding=over_rows,
            ),
            self._declare(
                f"{self.name}_dw_down", self.dw_down, self.products, {"dout": OUT, "hidden": HIDDEN},
                {"dw_down": self.w_down}, sharding=over_rows,
            ),
            self._bias(f"{self.name}_db_up", self.db_up, {"dpre": HIDDEN}, "b_up", B_UP, over_rows),
            self._bias(f"{self.name}_db_down", self.db_down, {"dout": OUT}, "b_down", B_DOWN, OVER_ROWS),
        )  # fmt: skip

    def _bias(
        self, name: str, run: Callable[..., Arrays], rows: Mapping[str, Tensor], key: str, bias: Tensor, over: Sharding
    ) -> Op:
        """The op of a bias's gradient."""
        inputs = {**rows, key: bias._replace(unread=True)}
        outputs = {f"d{key}": bias._replace(optional=False, given=key)}
        return self._declare(name, run, (column_sum(),), inputs, outputs, sharding=over)

    def _declare(
        self, name: str, run: Callable[..., Arrays], ops: tuple[Op, ...], inputs: Mapping[str, Tensor],
        outputs: Mapping[str, Tensor], **more: Any,
    ) -> Op:  # fmt: skip
        used = {t.dtype for t in (*inputs.values(), *outputs.values())}
        op = Op(
            name, inputs=inputs, outputs=outputs, kernel=Program(run, ops), static=(),
            dtypes={key: names for key, names in DTYPES.items() if key in used},
            attrs={"activation": ACTIVATIONS, "fused": FUSED}, batched=lambda: of_program(op), **more,
        )  # fmt: skip
        return op


mlp_ops = cache(MLPOps)


def mlp(save: str, transposed: bool, batched: bool = False) -> Op:
    """The op: see :data:`DOC`. ``batched``: the weights and biases have leading dims.

    Raises:
        ValueError: another value of ``save``.
    """
    if save not in ("pre", "none"):
        raise ValueError(f"cute.mlp: option `save` is {shown(save)}, expected 'pre' or 'none'.")
    op = _one(save, bool(transposed))
    return (batched and op.batched) or op


@cache
def _one(save: str, transposed: bool) -> Op:
    return mlp_ops(transposed).op(save)
