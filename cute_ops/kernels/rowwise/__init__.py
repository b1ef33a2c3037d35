"""Kernels of any row function: one pass, two passes, elementwise."""
