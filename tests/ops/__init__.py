"""Ops, expressions and calls that tests of the core and of both adapters share, with their kernels."""
