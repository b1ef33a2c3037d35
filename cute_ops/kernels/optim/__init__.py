"""Kernels of :mod:`cute_ops.ops.optim`."""
