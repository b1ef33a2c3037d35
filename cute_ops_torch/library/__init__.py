"""Declarations as ops of ``torch.library``: schema, fake and reference kernels, autograd, vmap."""
