"""Ops as JAX primitives: lowering, gradients, vmap, the FFI."""
