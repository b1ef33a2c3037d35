"""Softmax, sums and losses of rows."""
