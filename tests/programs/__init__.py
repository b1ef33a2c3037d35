"""Modules that programs and compile processes which tests start import by name, from their search path."""
