"""Gradients of embedding tables."""
