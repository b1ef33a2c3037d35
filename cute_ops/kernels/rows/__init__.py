"""Kernels of expressions: elements in one pass over ``[m, n]``, and rows by what an SM holds of one."""
