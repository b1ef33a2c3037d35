"""Tools of the command line for ops and machines: the command itself, doctor, verify, sweep, machine code."""
