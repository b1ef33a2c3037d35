"""Parts of kernels that multiply by Hopper's tensor cores: what products, attention, fp8 and grouped products share."""
