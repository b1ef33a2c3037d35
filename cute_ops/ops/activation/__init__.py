"""Activations and gated activations."""
