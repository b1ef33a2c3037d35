"""Kernels of :mod:`cute_ops.ops.parts`."""
