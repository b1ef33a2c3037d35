"""What the command line runs beside the ops: doctor, verify, sweep, machine code."""
