"""Rows to float8 with scales."""
