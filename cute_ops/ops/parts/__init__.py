"""Ops that our own functions are made of, without functions of their own."""
