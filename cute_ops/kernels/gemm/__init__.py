"""Kernels of matrix products. :mod:`cute_ops.kernels.tensor_core` has the map of layers.

``linear`` takes a call apart and chooses a form, ``sm90`` or ``sm80``. ``sm90`` has the roles of warps: ``mainloop``
loads and multiplies, ``store`` computes and stores the epilogue by ``subtiles``, with its ``parts``. ``epilogue`` loads
operands and evaluates the expression. ``cluster_sums`` adds up what the CTAs of a cluster have of one tile, ``rows`` is
a second kernel, for outputs without columns. ``scheduler`` orders tiles, ``tiles`` gives a CTA those that it takes,
``views`` makes matrices of tensors. ``in_place`` is of few rows whose operands begin off vectors.
"""
