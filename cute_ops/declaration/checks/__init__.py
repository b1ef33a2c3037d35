"""Mistakes of a declaration. They are reported when the op is declared; a framework would refuse it later, in other
words.

Each of these functions yields problems, basic mistakes first.
"""

from cute_ops.declaration.checks import dims, gradient, lists, names, tensors

# An op with lists is checked again without them, once it is unrolled.
OF_LISTS = (lists.problems,)
ALL = (*OF_LISTS, names.problems, tensors.problems, dims.problems, gradient.problems)
