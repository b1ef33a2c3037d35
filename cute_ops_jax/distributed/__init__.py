"""Sharded programs."""
