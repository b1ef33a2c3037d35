"""Recognition by meaning: what a program computes, whatever it is written with, as expressions and ops of ours.

Front ends translate fx graphs and jaxprs into the twelve operations of ``graph``. ``region`` finds neighbouring nodes
that one expression can compute, between products and what is opaque; ``express`` says what they compute, of which
operands; ``canonical`` gives equal meanings one text; ``match`` finds the op that has it; ``choose`` decides whether
to replace; ``report`` tells. ``analyse`` is all of it.
"""

from cute_ops.fusion.analyse import Found as Found
from cute_ops.fusion.analyse import analyse as analyse
from cute_ops.fusion.graph import Graph as Graph
