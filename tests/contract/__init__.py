"""What every adapter promises: each contract stands once and runs in both frameworks."""
