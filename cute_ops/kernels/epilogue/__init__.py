"""What an expression becomes in a kernel."""
