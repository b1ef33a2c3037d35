"""CuTe DSL device code: imports only cutlass and its siblings. Imported only where kernels are compiled."""
