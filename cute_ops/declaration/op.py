"""The declaration of an op: :class:`Op`.

A declaration is a plain value. Everything else is derived from it: the torch schema, fake kernel and autograd, the JAX
abstract evaluation, batching and gradient, the compiled variant, error messages, tests, benchmarks and documentation.
"""

from __future__ import annotations

from collections.abc import Mapping

from cute_ops.declaration import lists
from cute_ops.declaration.gradient import Differentiable, once
from cute_ops.declaration.messages import renamed


class Op(Differentiable):
    """The declaration of one operation.

    How to write one, in this order:

    1. The reference, ``reference(xp, x, *, eps)``: the formula in array-API style, with :func:`cute_ops.widen` before
       sums. It is the specification, and what runs on a CPU.
    2. ``inputs`` and ``outputs``: a :class:`Tensor` by name, ``Tensor("*m n", "T")``; ``dtypes``, the values of ``T``;
       ``attrs``, the defaults of what the formula takes by keyword.
    3. A ``Case`` or two: the sizes that tests, tuning and benchmarks run.
    4. The kernel, a class in a module of its own, which the compiler's process imports: ``kernel="module:Class"``.
       ``python -m cute_ops verify`` compares it with the reference in all dtypes, layouts and odd sizes.
    5. The gradient, one more op with ``dout`` among its inputs and ``dx`` among its outputs: ``grad=``. An op without
       one says so: ``inference_only=``.
    6. What a measurement asks for: ``tuning`` with a heuristic and a search space; ``flops`` for ``bench``.
    7. What several devices may share besides rows: ``sharding``.

    ``cute_ops_torch.register(op)`` and ``cute_ops_jax.register(op)`` make functions of it.

    Args:
        name: the op's name; it becomes ``torch.ops.cute.<name>`` and ``cute_ops_jax.<name>``.
        inputs: tensors by argument name, in call order. Optional ones come last.
        outputs: tensors by name, in return order.
        mutates: inputs that the kernel writes. In PyTorch a call changes them in place; in JAX it returns the new
            arrays before the outputs. Such an op may have no outputs, and has no gradient.
        dtypes: the dtype names that each dtype variable may take.
        attrs: default by attribute name: ``float``, ``int``, ``bool`` or ``str``; or the values that an attribute
            may take, ``OneOf("tanh", "none")``. A default is finite, because torch's schemas cannot say others.
        scalars: default by name of numbers that a kernel takes at run time, so that one serves all values: a ``float``,
            float32 in the kernel, or an ``int`` of 64 bits. They follow the attributes; references get both by name.
        static: dims that are compile-time constants, always (each size has a kernel of its own) or ``WhileFew``; all
            others are dynamic. By default ``WhileFew("n")`` if there is an ``n``. Attributes are always constants. A
            kernel knows a dim of an optional input if the call gives that input.
        sharding: which dims several devices may share.
        reference: ``reference(xp, *inputs, **attrs)`` in array-API style, one body for NumPy, torch and
            jax.numpy; it returns one array or a tuple, ``None`` for an absent output. It writes no input: the new
            values of inputs that the op mutates come before the outputs. A composite needs none, because its program
            runs on every device.
        kernel: ``"module:Class"``, a :class:`Kernel` that says more, or the :class:`Program` of a composite.
        fallback: a program that may run in place of the kernel.
        tuning: how the kernel is configured: ``Tuning(heuristic, space=vary(threads=(64, 128)))``.
        grad: the backward op. It is wired by argument names: an input of the backward op that is named
            like an input or output of this one gets that array, ``d<output>`` the cotangent; its outputs
            ``d<input>`` are the gradients; attributes pass by name. Or several such ops, run in this order, each of
            which may read outputs of earlier ones by name: ``grad=(linear_dx, linear_dweight)``. Only those run whose
            gradients are wanted or whose outputs such an op reads.
        handed_on: inputs whose gradient is an output's cotangent, unchanged but for the input's dtype, so that no step
            computes it: ``{"residual": "out"}``.
        scaled: inputs whose gradient the forward computes for a cotangent of one: ``{"x": "x_gradient"}``, an output
            of ``saving`` or of this op. The backward multiplies it by the cotangent of the first output, a scalar.
        saving: the op that runs in place of this one if its gradient is wanted and reads more than inputs and outputs.
            It has the same inputs and attributes, and the same outputs followed by others. Of its skippable outputs
            those are computed that the gradient reads.
        narrow: ``narrow(name, outputs)`` makes the op with these outputs alone, for an op that then reads fewer inputs,
            too. By default the same kernel runs and gets None for the other outputs.
        batched: makes the op for a batch of examples in which other inputs than rows are batched, too. It has the same
            names, ``*b n k`` in place of ``n k``, and one dim for each example's rows, ``*b m n`` in place of ``*m n``.
            ``vmap`` calls it once; without it, ``vmap`` calls this op for each example.
        no_gradient: floating inputs without a gradient, and attributes on which ``grad`` does not depend.
        derived: dims of outputs that no input binds, ``{"blocks": f}`` with ``f(dims, attrs) -> size``; sizes may be
            symbolic.
        inference_only: for an op that has no gradient on purpose: what to do instead, for the error message.
        called: the function that messages name if it is not this op: ``linear`` for ``linear_batched``.
        finish: what the Python functions do after the op; it adds keyword arguments to them.
        check: ``check(binding)``: what is wrong with a call that the declaration cannot express; None if nothing is.
        cases: named problems.
        arrange: ``arrange(xp, arrays)`` changes random inputs of tests and ``verify`` in place, NumPy arrays, so that
            they fit together: sorted indices, the statistics of a row.
        flops: ``flops(dims, attrs)``: the operations of a call, with which ``bench`` shows TFLOPS. ``dims`` has the
            sizes by name, of leading dims their product.
        bytes: ``bytes(dims, attrs)``: the least bytes that a call moves. By default every input is read once and every
            output written once.
        doc: the public docstring: formula first.
    """

    def validate(self) -> None:
        """Raise ValueError for the first thing that is wrong with the declaration."""
        from cute_ops.declaration import checks  # start-up time: a program of our own ops needs none

        for problems in checks.OF_LISTS if self.numbers else checks.ALL:
            for problem in problems(self):
                raise ValueError(renamed(f"op {self.name}: {problem}", self.aliases))
        if self.numbers:
            self.unrolled(dict.fromkeys(self.numbers, 2))

    @property
    def batched(self) -> Op | None:
        """The op of a batch of examples, the same object every time; None if it has none."""
        return once(self, "batched", self.make_batched) if self.make_batched else None

    def unrolled(self, counts: Mapping[str, int]) -> Op:
        """The op without lists for these numbers of tensors; the same object every time.

        Raises:
            ValueError: the declaration is wrong for them.
        """
        return lists.unrolled(self, counts)

    @property
    def instances(self) -> tuple[Op, ...]:
        """The ops that the cases call: of an op with lists one for each number of tensors, for two without a case."""
        asked = [{name: case.dims[name] for name in self.numbers} for case in self.cases]
        ops = [self.unrolled(counts) for counts in asked or [dict.fromkeys(self.numbers, 2)]]
        return tuple(dict.fromkeys(ops))
