"""Guards: whether a call is like an earlier one.

Binding and planning depend on types, dtypes, devices, shapes, strides and alignment. To build a key of these and look
it up takes longer than the rest of a warm call. Dynamo's guard for tensors compares them all in one C++ call, with
``requires_grad`` and the dispatch keys, which modes and transforms add to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import copysign
from typing import Any

import torch

from cute_ops.constants import make_room
from cute_ops.declaration.op import Op
from cute_ops.declaration.tensor import Tensor as Declared
from cute_ops_torch.host import codegen
from cute_ops_torch.library.mutation import apart

Call = Callable[..., Any]
# A call without its successor: `link(_otherwise=f)` is a function that hands calls which do not fit on to f.
Link = Callable[..., Call]
Kinds = tuple[tuple[type, bool, int], ...]
# Guarded calls per shape. Each that does not fit costs a call 0.5 us, but one that was dropped is planned again, for
# 20 us and more. Layers are called with gradients and without, with frozen weights, by several values of `fused`.
CHAIN = 8
_TensorGuards = torch._C._dynamo.guards.TensorGuards


def guarded(
    op: Op, tensors: Sequence[torch.Tensor | None], attrs: Sequence[Any], conditions: Sequence[str],
    values: Mapping[str, Any], by_torch: bool = False, **texts: str,
) -> Link:  # fmt: skip
    """A function of calls like this one.

    Args:
        op, tensors, attrs: the call; ``attrs`` are attributes and scalars.
        conditions: source of what else must hold.
        values: what the texts use.
        by_torch: whether torch's function runs the call: then it also runs those whose tensors are aligned to less.
        texts: ``parameters``, ``arguments`` and ``result`` of the template.
    """
    every = {name: t for name, t in zip(op.inputs, tensors, strict=True) if t is not None}
    # Dynamo's guard refuses one tensor that is two arguments: it sees the first of them.
    first = {id(t): name for name, t in reversed(every.items())}
    given = {name: t for name, t in every.items() if first[id(t)] == name}
    sizes: Any = [list(t.shape) for t in given.values()]
    strides: Any = [list(t.stride()) for t in given.values()]
    guard = _TensorGuards(*given.values(), dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
    same = [f"{name} is None" for name in op.inputs if name not in every]
    same += [f"{name} is {first[id(t)]}" for name, t in every.items() if name not in given]
    named = dict(zip(op.keywords, attrs, strict=True))
    same += [f"{name} == _given_{name}" for name in op.attrs]
    same += (signs := _signs(op, named))
    same += [f"type({name}) is _type_{name}" for name in op.scalars]
    addresses = {name: t.data_ptr() for name, t in given.items()}
    # Dynamo's guard compares types first, then asks for strides: those of a nested tensor end the process. A call looks
    # its first input's shape up, which such a tensor does not have.
    later = {name: type(t) for name, t in [*given.items()][1:]}
    same += [f"type({name}) is _{kind.__name__} and not {name}.is_nested" for name, kind in later.items()]
    same += [f"_same({', '.join(given)})", *conditions]
    if not by_torch or any(address & 15 for address in addresses.values()):
        same.append(aligned(addresses))
    distances, numbers = apart(op, tensors)
    same += distances
    values = {"_same": guard.check, **numbers, **values}
    values |= {f"_given_{name}": named[name] for name in op.attrs}
    values |= {"_sign": copysign} if signs else {}
    values |= {f"_{kind.__name__}": kind for kind in later.values()}
    values |= {f"_type_{name}": type(named[name]) for name in op.scalars}
    make = codegen.maker(
        codegen.GUARDED, f"{op.name}.guarded", values, name=op.name, condition=" and ".join(same), **texts
    )
    return partial(make, **values)


def _signs(op: Op, named: Mapping[str, Any]) -> list[str]:
    """Source: whether attributes that are zero have the signs of these. Zeros are equal, but have a sign."""
    zeros = [name for name in op.attrs if isinstance(named[name], float) and not named[name]]
    return [f"({name} is _given_{name} or _sign(1.0, {name}) == {copysign(1.0, named[name])})" for name in zeros]


def aligned(addresses: Mapping[str, int]) -> str:
    """Source: whether tensors lie at addresses like these. Kernels are compiled for at most 16-byte alignment."""
    if any(address & 15 for address in addresses.values()):
        return " and ".join(f"{name}.data_ptr() & 15 == {address & 15}" for name, address in addresses.items())
    return f"not ({' | '.join(f'{name}.data_ptr()' for name in addresses)}) & 15"


def kinds(tensors: Sequence[torch.Tensor | None]) -> Kinds:
    """The facts that tell guards of one kernel apart: ``requires_grad``, exact types (Parameter is not Tensor to a
    guard), and which arguments are one tensor, by the place of the first of them.
    """
    first = {id(t): place for place, t in reversed([*enumerate(tensors)])}
    return tuple((type(t), t is not None and t.requires_grad, first[id(t)]) for t in tensors)


class GuardedCalls:
    """Guarded calls of an op, found by the shape of their first input; where weights of several shapes meet one x, then
    by the weight's.

    Attributes:
        table: the first guarded call of each shape. It hands on what does not fit it, at last to ``otherwise``.
    """

    def __init__(self, op: Op, otherwise: Call) -> None:
        self.table: dict[Any, Call] = {}
        self._otherwise, self._second = otherwise, _second(op)
        self._links: dict[Any, Link] = {}
        self._chains: dict[Any, list[Link]] = {}
        self._branches: dict[Any, dict[Any, Call]] = {}

    def call(self) -> Call:
        """``call(*args)`` goes to the guarded calls."""
        get, otherwise = self.table.get, self._otherwise

        def call(*args: Any) -> Any:
            return get(args[0].shape, otherwise)(*args)

        return call

    def put(self, tensors: Sequence[Any], key: Any, make: Callable[[], Link]) -> Call:
        """Put a guarded call before the others of its shapes; ``make`` makes it where the key is new."""
        shape = tensors[0].shape
        second = None if self._second is None else tensors[self._second].shape
        link = self._links.get(key)
        if link is None:
            make_room(self.table, self._links, self._chains, self._branches)
            link = self._links[key] = make()
        before = self._chains.get((shape, second), ())
        chain = self._chains[shape, second] = [link, *(k for k in before if k is not link)][:CHAIN]
        call = self._otherwise
        for one in reversed(chain):
            call = one(_otherwise=call)
        branches = self._branches.setdefault(shape, {})
        make_room(branches)
        branches[second] = call
        self.table[shape] = call if len(branches) == 1 else self._branching(branches)
        return call

    def _branching(self, branches: dict[Any, Call]) -> Call:
        get, otherwise, place = branches.get, self._otherwise, self._second
        assert place is not None

        def call(*args: Any) -> Any:
            try:
                known = get(args[place].shape, otherwise)
            except (AttributeError, TypeError):  # no tensor; a symbolic shape, which has no hash
                known = otherwise
            return known(*args)

        return call


def _second(op: Op) -> int | None:
    """The place of the input whose shape tells calls with one x apart: it must be given and has sizes that the first
    one lacks, as a weight ``n k`` has. By the shape of x alone, layers of a model would share a chain.
    """
    first, *others = op.inputs.values()
    for place, tensor in enumerate(others, 1):
        if not (tensor.optional or tensor.many or _sizes(tensor) <= _sizes(first)):
            return place
    return None


def _sizes(tensor: Declared) -> set[str]:
    return {name for dim in tensor.dims for name in dim.names}
