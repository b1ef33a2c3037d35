"""Kernels of matrix products. :mod:`cute_ops.kernels.tensor_core` has the map of layers.

``linear`` takes a call apart and chooses a form: ``sm90`` (:class:`Mainloop` of ``mainloop``, :class:`Store` of ``store``
with the ``parts`` of an epilogue) or ``sm80``. ``epilogue`` loads operands and evaluates the expression; ``rows`` and
``split_k`` are second kernels, for outputs without columns and for small m. ``scheduler`` orders tiles, ``tiles`` gives a
CTA those that it takes, ``views`` makes matrices of tensors.
"""
