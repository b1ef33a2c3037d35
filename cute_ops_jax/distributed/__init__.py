"""Ops in programs on several devices."""
