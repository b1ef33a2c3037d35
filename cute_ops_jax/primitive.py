"""An op as a JAX primitive: one per declaration, the backward op included.

A primitive takes the inputs that are present, in declared order and with any leading dims, and gives the
outputs that exist. Its parameters are plain values: the names of those inputs and the attributes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp

from cute_ops.binding import bind
from cute_ops.errors import message
from cute_ops.op import Op
from cute_ops_jax import _compat, batching, lowering
from cute_ops_jax.arrays import specs

Attributes = tuple[tuple[str, Any], ...]


class Stage:
    """A declaration with its primitive.

    Calling it binds the primitive; arrays and results go by name, None where absent.
    """

    def __init__(self, op: Op) -> None:
        self.op = op
        self.primitive = _compat.new_primitive(
            f"cute_{op.name}", self._abstract, partial(batching.batch, self), self._differentiate
        )
        _compat.register_lowering(self.primitive, partial(lowering.reference, op))
        _compat.register_lowering(self.primitive, partial(lowering.kernel, op), platform="cuda")

    def __call__(
        self, inputs: Mapping[str, Any], attrs: Mapping[str, Any], inplace: bool = False
    ) -> dict[str, jax.Array | None]:
        """Check the call and bind the primitive. ``inplace``: outputs take the memory of the inputs that they reuse.

        Raises:
            TypeError: unknown or missing argument, wrong dtype.
            ValueError: shapes that do not fit together.
        """
        present = {name: a for name, a in inputs.items() if a is not None}
        for name, a in present.items():
            if not (hasattr(a, "shape") and hasattr(a, "dtype")):
                raise TypeError(message(self.op, f"argument `{name}` must be one array, got {type(a).__name__}."))
        binding = bind(self.op, specs(present), attrs)
        wanted = {name: out for name, out in binding.outputs.items() if out is not None}
        if binding.empty:
            # A kernel cannot launch on nothing; a sum over no rows is zero.
            results: Sequence[Any] = [jnp.zeros(out.shape, out.dtype) for out in wanted.values()]
        else:
            names = tuple(name for name in self.op.inputs if name in present)
            operands = [present[name] for name in names]
            results = self.primitive.bind(*operands, names=names, attrs=tuple(binding.attrs.items()), inplace=inplace)
        return dict.fromkeys(self.op.outputs) | dict(zip(wanted, results, strict=True))

    def _abstract(
        self, *avals: Any, names: tuple[str, ...], attrs: Attributes, inplace: bool
    ) -> list[_compat.ShapedArray]:
        axes = frozenset[str]().union(*map(_compat.varying_axes, avals))
        if axes:
            raise NotImplementedError(
                f"cute.{self.op.name}: no rule for the replication checks of shard_map (an argument varies over "
                f"{', '.join(sorted(axes))}); pass check_vma=False to jax.shard_map."
            )
        outputs = bind(self.op, specs(dict(zip(names, avals, strict=True))), dict(attrs)).outputs.values()
        return [_compat.ShapedArray(out.shape, jnp.dtype(out.dtype)) for out in outputs if out is not None]

    def _differentiate(self, primals: Any, tangents: Any, **params: Any) -> Any:
        """Reached by a second derivative, and by any derivative of an op without a gradient."""
        if self.op.inference_only:
            problem = f"is for inference only, it has no gradient; {self.op.inference_only}."
            raise NotImplementedError(
                message(self.op, problem, specs(dict(zip(params["names"], primals, strict=True))))
            )
        what = "only its first derivative exists, in reverse mode" if self.op.grad else "no gradient is declared for it"
        raise NotImplementedError(
            f"cute.{self.op.name}: {what}; for other derivatives differentiate its reference, "
            f"op.reference(jax.numpy, ...)."
        )


@cache
def stage(op: Op) -> Stage:
    """The one stage of a declaration in this process."""
    return Stage(op)
