"""What compiled kernels are, seen without a GPU: PTX that runs on the CPU, and machine code that is read."""
