"""The JAX side of the command line: doctor, runner, stubs."""
