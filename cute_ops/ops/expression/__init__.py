"""Ops of expressions: declared with shapes, or found by the operands of a call."""
