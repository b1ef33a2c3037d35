"""An expression, computed in registers."""

from cutlass import Boolean, Float32

from cute_ops.expressions.text import parse
from cute_ops.kernels.emit.primitives import DEVICE


class Emitter:
    """Computes an expression's outputs from one element of each operand.

    A kernel makes one, ``Emitter(config.expression)``, and calls it for each element. Values that no output needs are
    not computed.
    """

    def __init__(self, text, device=DEVICE):
        self.expression, self.device = parse(text), device

    def __call__(self, *operands, length=None):
        """The outputs, fp32 or Boolean.

        Args:
            operands: an fp32 or Boolean element of each operand; of a packed one a pair, an element of each half.
            length: the number of elements of a row, for expressions that use it.
        """
        values = []
        for node in self.expression.nodes:
            args = [values[i] for i in node.args]
            if node.primitive == "operand":
                given = operands[node.operand]
                values.append(given[node.half == "[n:]"] if node.half else given)
            else:
                values.append(computed(node, args, length, self.device))
        return tuple(values[i] for i in self.expression.outputs)


def computed(node, args, length, device=DEVICE, column=None):
    """The value of a node that is neither an operand nor a reduction, by a table of device functions."""
    if node.primitive in ("n", "column"):
        return Float32(length if node.primitive == "n" else column)
    if node.primitive == "constant":
        bool_ = node.value in ("true", "false")
        return Boolean(node.value == "true") if bool_ else Float32(float(node.value))
    return device[node.primitive](*args, *([node.value] if node.primitive == "astype" else []))
