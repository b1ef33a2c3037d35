"""What the command line runs on ops and machines: doctor, verify, sweep, machine code."""
