"""What the command line runs on ops and machines: the command itself, doctor, verify, sweep, machine code."""
