"""A contender's JAX program: one call per buffer set, one after another. Made for prewarm.py and device_time.py.

CUDA graphs inside XLA close most of the gaps between launches. An optimization barrier keeps XLA from merging calls.

Two more calls, before the first and after the last one, record events on XLA's own stream. The driver's trace would not
do: it slows some kernels, whoever launches them, by up to 6%.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from contenders import as_tuple
from problems import Buffers, Problem

from cute_ops_torch.host.sampler import WAIT_CYCLES

MAX_CALLS = 128
START, END = "bench_start", "bench_end"


@dataclass(frozen=True)
class Program:
    """A compiled program and its arguments.

    Attributes:
        compiled: returns one tuple of outputs per call, and a token.
        arguments: what it is called with.
        calls: how many calls one run makes.
        returned: which of the contender's outputs, or gradients, a call returns first; more may follow.
    """

    compiled: Callable[..., Any]
    arguments: Any
    calls: int
    returned: list[int]

    def run(self) -> Any:
        import jax

        return jax.block_until_ready(self.compiled(self.arguments))[0]

    def sample(self) -> float:
        """Microseconds of a call."""
        self.run()
        torch.cuda.synchronize()
        return events()[START].elapsed_time(events()[END]) * 1e3 / self.calls


@cache
def events() -> dict[str, torch.cuda.Event]:
    """The events that :func:`_marked` records, their calls made known to XLA."""
    import jax_tvm_ffi

    from cute_ops.jit import loader

    tvm_ffi = loader.tvm_ffi()
    made = {name: torch.cuda.Event(enable_timing=True) for name in (START, END)}

    def record(name: str, token: Any, out: Any) -> None:
        stream = torch.cuda.ExternalStream(tvm_ffi.get_raw_stream(tvm_ffi.device("cuda", torch.cuda.current_device())))
        with torch.cuda.stream(stream):
            if name == START:  # the host enqueues the program meanwhile
                torch.cuda._sleep(WAIT_CYCLES)
            made[name].record(stream)

    for name in made:
        called = tvm_ffi.convert(lambda token, out, name=name: record(name, token, out))
        jax_tvm_ffi.register_ffi_target(name, called, arg_spec=["args", "rets"], platform="gpu")
    return made


def _marked(name: str, token: Any) -> Any:
    """A call that records an event; what depends on its token comes after it."""
    import jax

    if jax.default_backend() != "gpu":
        return token
    events()
    return jax.ffi.ffi_call(name, jax.ShapeDtypeStruct(token.shape, token.dtype), has_side_effect=True)(token)


def build(
    function: Callable[..., Any], problem: Problem, direction: str, sets: Sequence[Buffers], like: Program | None = None
) -> Program:
    """Compile, or take what was compiled of as many other sets. A backward call takes what the forward call, made here,
    has saved; a call of both makes its own. A gradient that serves two inputs is returned once, and one that is an
    output's cotangent not at all, since XLA copies what a program returns twice, or as it was given. A buffer that
    passes two barriers would be copied: hence one call per set.
    """
    import jax

    sets = sets[:MAX_CALLS]
    # A set that is given several times is imported once.
    imported = {id(s): tuple(tuple(map(to_jax, part)) for part in s) for s in sets}
    if direction == "fwd":
        returned = list(range(problem.results))

        def call(inputs: Any, cotangents: Any) -> Any:
            return as_tuple(function(*inputs))

    elif direction == "both":
        returned = list(range(sum(problem.wanted)))

        def call(inputs: Any, cotangents: Any) -> Any:
            of_wanted, some = only(function, inputs, problem.wanted)
            out, pull = jax.vjp(of_wanted, *some)
            # XLA would leave out a product whose result nobody reads.
            return *pull(cotangents if len(cotangents) > 1 else cotangents[0]), *as_tuple(out)

    else:
        made = problem.binding("bwd").outputs
        names = [name for name, w in zip(problem.arrays(), problem.wanted, strict=True) if w]
        returned = [i for i, name in enumerate(names) if made.get(f"d{name}") is not None]

        def pull_of(inputs: Any) -> Any:
            of_wanted, some = only(function, inputs, problem.wanted)
            return jax.vjp(of_wanted, *some)[1]

        pull_back = jax.jit(pull_of)
        imported = {k: (pull_back(inputs), cotangents) for k, (inputs, cotangents) in imported.items()}

        def call(pull: Any, cotangents: Any) -> Any:
            gradients = pull(cotangents if len(cotangents) > 1 else cotangents[0])
            return [gradients[i] for i in returned]

    arguments = [imported[id(s)] for s in sets]
    return replace(like, arguments=arguments) if like else of_calls(call, arguments, returned)


def of_calls(call: Callable[..., Any], arguments: Sequence[Any], returned: list[int]) -> Program:
    """Compile one call for each set of arguments, each after the one before it.

    Args:
        call: takes a set's arrays, and gives a tuple or a list of arrays.
        arguments: the sets.
        returned: which of the contender's outputs a call returns.
    """
    import jax

    def program(sets: Any) -> Any:
        outputs: list[Any] = []
        token = _marked(START, jax.numpy.zeros(1))
        for arguments in sets:  # a call waits for the one before it
            if outputs:
                arguments, outputs[-1] = jax.lax.optimization_barrier((arguments, outputs[-1]))
            else:
                arguments, token = jax.lax.optimization_barrier((arguments, token))
            outputs.append(call(*arguments))
        outputs[-1], token = jax.lax.optimization_barrier((outputs[-1], token))
        return outputs, _marked(END, token)

    arguments = list(arguments)
    return Program(jax.jit(program).lower(arguments).compile(), arguments, len(arguments), returned)


def sample(programs: Sequence[Program], rounds: int) -> list[list[float]]:
    """Microseconds per call of every program, in turns: who comes first in a round comes last in the next."""
    found: list[list[float]] = [[] for _ in programs]
    order = list(range(len(programs)))
    for _ in range(rounds):
        for k in order:
            found[k].append(programs[k].sample())
        order.reverse()
    return found


def only(function: Callable[..., Any], inputs: Sequence[Any], wanted: Sequence[bool]) -> tuple[Any, list[Any]]:
    """A function of those inputs that have a gradient, and these inputs."""

    def of_wanted(*some: Any) -> Any:
        given = iter(some)
        return function(*(next(given) if w else a for a, w in zip(inputs, wanted, strict=True)))

    return of_wanted, [a for a, w in zip(inputs, wanted, strict=True) if w]


class _Handed:
    """A tensor to be imported, and the capsule that was made of it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.capsule = tensor, None

    def __dlpack_device__(self) -> Any:
        return self.tensor.__dlpack_device__()

    def __dlpack__(self, **options: Any) -> Any:
        self.capsule = self.tensor.__dlpack__(**options)
        return self.capsule


def to_jax(tensor: torch.Tensor) -> Any:
    """A JAX array on a tensor's memory.

    On a GPU, XLA takes a capsule's tensor over before it records an event, and frees the tensor if that fails, as after
    a fault of the GPU. JAX raises then without marking the capsule as used, so that PyTorch's destructor of the capsule
    frees the tensor a second time: a segmentation fault in place of the error. Hence a capsule that was refused has no
    destructor. If XLA had not taken it over, its memory stays until the process ends.
    """
    import jax

    handed = _Handed(tensor)
    try:
        return jax.dlpack.from_dlpack(handed)
    except BaseException:
        if handed.capsule is not None:
            release = ctypes.pythonapi.PyCapsule_SetDestructor
            release.argtypes = (ctypes.py_object, ctypes.c_void_p)
            release(handed.capsule, None)
        raise


def to_torch(array: Any) -> torch.Tensor:
    """A JAX array without a copy; DLPack between the two has no 8-bit floats."""
    import jax

    if array.dtype.itemsize > 1:
        return torch.from_dlpack(array)
    return torch.from_dlpack(jax.lax.bitcast_convert_type(array, "uint8")).view(getattr(torch, array.dtype.name))
