"""Tools of the command line for PyTorch: doctor, runner, measurer, stubs."""
