"""The version of this package, which kernels and bundles are kept under."""

__version__ = "0.2.0"
