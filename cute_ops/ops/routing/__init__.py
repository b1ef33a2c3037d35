"""Ops of mixtures of experts: the largest numbers of rows, tokens by expert."""
