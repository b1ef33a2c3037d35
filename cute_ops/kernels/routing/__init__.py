"""Kernels of :mod:`cute_ops.ops.routing`."""
