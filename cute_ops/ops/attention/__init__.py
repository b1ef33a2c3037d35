"""Attention, and its caches of keys and values."""
