"""Compiling ahead of time: manifests of calls, bundles of kernels."""
