"""What the command line runs for JAX: doctor, runner, stubs."""
