"""What the command line runs for PyTorch: doctor, runner, measurer, stubs."""
