"""The products of a linear layer and of its gradients, each with an epilogue."""

from dataclasses import replace
from functools import partial

import cutlass.cute as cute
from cutlass import Int32, const_expr

from cute_ops.kernels.gemm.add_parts import AddParts
from cute_ops.kernels.gemm.config import K_PARTS, ROW_PARTIALS, GemmConfig
from cute_ops.kernels.gemm.epilogue import Epilogue
from cute_ops.kernels.gemm.in_place import GemmInPlace
from cute_ops.kernels.gemm.sm80 import GemmSm80
from cute_ops.kernels.gemm.sm90 import GemmSm90
from cute_ops.kernels.gemm.views import by_column, by_row, each_by_column, each_by_row, half


class GemmKernel:
    """The product of a call's first two tensors, with or without TMA, and its epilogue.

    Args:
        views: the functions that turn both into matrices whose rows are multiplied with each other.
        batched: whether they are batches of matrices.
        parts: what else the epilogue does, see :class:`cute_ops.kernels.gemm.parts.EpiloguePart`; on Hopper alone.
    """

    def __init__(self, variant, views, batched=False, parts=()):
        self.keys, self.names, self.views = variant.args, tuple(dict.fromkeys(variant.names)), views
        config = GemmConfig.of(variant.config)
        self.epilogue, self.add = Epilogue(variant, config, batched), None
        if config.parts > 1:
            self.add = AddParts(variant, self.epilogue, config.parts)
            stored = replace(config, expression="e1(t) -> 0", reads="", writes=K_PARTS)
            self.epilogue = Epilogue(variant, stored, batched=True)
        form = {"mma_sync": GemmSm80, "in_place": GemmInPlace}.get(config.form, GemmSm90)
        self.form, self.transposed = form(variant, self.epilogue, parts), config.transposed

    @cute.jit
    def __call__(self, *arguments):
        first, second = (view(m, key) for view, m, key in zip(self.views, arguments, self.keys))
        halves = self._halves(second)
        tensors = dict(zip(self.names, arguments))
        operands = tuple([tensors[tensor.key.name] for tensor in self.epilogue.operands])
        outputs = tuple([tensors[tensor.key.name] for tensor in self.epilogue.outputs])
        mPartials, stream = tensors.get(ROW_PARTIALS), arguments[-1]
        parts = tuple([tuple([tensors[name] for name in part.names]) for part in self.form.parts])
        product = (halves, (first,)) if const_expr(self.transposed) else ((first,), halves)
        self.form.launch(product, (operands, outputs, parts), stream)
        finish = self.epilogue.finish
        if const_expr(finish is not None):
            read, made = (
                tuple([tensors[tensor.key.name] for tensor in group])
                for group in (finish.operands.values(), finish.outputs)
            )
            finish(mPartials, read, made, Int32(halves[0].shape[0]), stream)
        if const_expr(self.add is not None):
            read, made = (
                tuple([tensors[tensor.key.name] for tensor in group])
                for group in (self.add.epilogue.operands, self.add.epilogue.outputs)
            )
            self.add(tensors[K_PARTS], read, made, stream)

    def _halves(self, mB):
        """The second operand whole, or the gate's weights and the up projection's."""
        if self.epilogue.halves == 1:
            return (mB,)
        by_rows = self.views[1] in (by_row, each_by_row)
        align = self.keys[1].row_align if by_rows else self.epilogue.half_align
        return tuple(half(mB, i, 0, min(self.keys[1].align, align)) for i in range(2))


# out[m, n] = x[m, k] @ weight[n, k].T
Linear = partial(GemmKernel, views=(by_row, by_row))
# dx[m, k] = dout[m, n] @ weight[n, k]
LinearDx = partial(GemmKernel, views=(by_row, by_column))
# dweight[n, k] = dout[m, n].T @ x[m, k]
LinearDweight = partial(GemmKernel, views=(by_column, by_column))
# The same for each matrix of a batch.
BatchedLinear = partial(GemmKernel, views=(each_by_row, each_by_row), batched=True)
BatchedLinearDx = partial(GemmKernel, views=(each_by_row, each_by_column), batched=True)
BatchedLinearDweight = partial(GemmKernel, views=(each_by_column, each_by_column), batched=True)
