"""The pieces that kernels are written with."""
