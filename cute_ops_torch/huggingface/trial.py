"""Calls of a module that ``patch`` makes to learn what it computes.

They run on fake or random tensors and change nothing: not the module, nor the state of random numbers. Nor do they
depend on where ``patch`` is called: under autocast, in inference mode, with another default device or dtype.
"""

from __future__ import annotations

import logging
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from cute_ops_torch.huggingface.bypass import read_globals
from cute_ops_torch.huggingface.read_names import Names, noted

log = logging.getLogger("cute_ops")
_HELD = ("_parameters", "_buffers", "_modules")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# Attributes that every module has.
_OWN = frozenset(vars(nn.Module()))
# Leading dims of inputs for which an op and a module are compared: of each number, one example too.
_ROWS = ((2, 3), (1, 3), (), (3,), (1,), (2, 3, 2), (2, 1, 3, 2))
# Types of attributes whose later values can be compared with earlier ones: nobody changes these in place.
_PLAIN = (int, float, str, type(None), torch.dtype, types.FunctionType, types.BuiltinFunctionType)
Watching = Callable[[], AbstractContextManager[None]]
Agrees = Callable[[tuple[int, ...], Watching], bool]


class Seen:
    """What the calls of a module and of those in it did.

    Attributes:
        more: whether they read an attribute that may change without a trace of it, such as a config, or changed one.
        modes: whether they read if the module is in training.
    """

    def __init__(self) -> None:
        self.more = self.modes = False

    def read(self, name: str, value: Any) -> None:
        """Note that the attribute of this name and value was read."""
        ours = name in _OWN or name.startswith("_cute")
        self.more = self.more or (not ours and not is_plain(value))
        self.modes = self.modes or name == "training"


@contextmanager
def same_everywhere() -> Iterator[None]:
    """A context that is the same wherever it is entered: float32 by default, on the CPU, without autocast or inference
    mode. At its end the program's random numbers go on where they were. A default dtype is one of the process: where it
    is another one, other threads have float32 meanwhile, too.
    """
    default = torch.get_default_dtype()
    if changes := default is not torch.float32:
        torch.set_default_dtype(torch.float32)
    try:
        with (
            torch.random.fork_rng(devices=()), torch.device("cpu"), torch.inference_mode(False),
            torch.autocast("cpu", enabled=False),
        ):  # fmt: skip
            yield
    finally:
        if changes:
            torch.set_default_dtype(default)


@contextmanager
def trial(module: nn.Module, watched: bool = True) -> Iterator[Seen]:
    """Let a module be called without its hooks, and see what it reads; then give it and its submodules back their
    classes and all that they held: a ``forward`` that puts a parametrization on one of them (peft's
    ``target_parameters``) takes the fake tensors for its weights. Lists, dicts and sets that they hold get back what
    they had, as do tensors that are neither parameters nor buffers.

    Args:
        watched: whether to see what it reads: its class is a derived one meanwhile.
    """
    seen = Seen()
    seen.more = any(map(_has_slots, module.modules()))
    before = [(m, type(m), dict(vars(m)), [dict(vars(m)[name]) for name in _HELD]) for m in module.modules()]
    undo = [*_undoing(module)]
    try:
        for each, cls, _, _ in before:
            vars(each).update((name, type(vars(each)[name])()) for name in _HOOKS)
            each.__class__ = _watched(cls, seen) if watched else cls
        called = {each: (type(each), dict(vars(each))) for each, *_ in before}
        yield seen
        for each, _, _, held in before:
            now = [vars(each)[name] for name in _HELD]
            same = _same((type(each), vars(each)), called[each]) and all(map(_same_values, now, held))
            seen.more = seen.more or not same
    finally:
        for each, cls, own, held in before:
            each.__class__ = cls
            for values, was in [(vars(each), own), *((own[name], was) for name, was in zip(_HELD, held, strict=True))]:
                values.clear()
                values.update(was)
        seen.more = True in [*(each() for each in undo), seen.more]


def agreeing_ranks(module: nn.Module, agrees: Agrees) -> frozenset[int]:
    """The numbers of dims of an input, up to five, for whose rows an op gives what a module gives, in training and in
    evaluation; empty if there is no agreement for three dims, or if the module has read more than what it is known by.
    A ``forward`` may normalise the second of four dims, refuse five, drop a first dim of one, or ask for its own class.

    Args:
        module: the module.
        agrees: whether both give the same for rows of these leading dims. It enters the second argument's context for
            the module's call and gradients, and leaves it for the op's: what an op runs is nothing that a module reads.
    """
    if sys.getprofile() is None:
        return _agreeing_ranks(module, agrees)
    with ThreadPoolExecutor(1) as thread:  # since a thread has one such hook, and that is a profiler's
        return thread.submit(_agreeing_ranks, module, agrees).result()


def _agreeing_ranks(module: nn.Module, agrees: Agrees) -> frozenset[int]:
    found: set[int] = set()
    refused: set[int] = set()
    shared = (attributes_of_class(type(each)).items() for each in module.modules())
    unknown = {name for own in shared for name, value in own if not is_plain(value)}
    names = Names(module, read_globals(type(module).forward), unknown)
    with trial(module) as seen:
        for training in (True, False):
            set_training(module, training)
            for rows in _ROWS:
                (found if _holds(agrees, rows, names) else refused).add(len(rows) + 1)
                if 3 in refused:
                    return frozenset()
            if not seen.modes:
                break
    with trial(module, watched=False):
        alike = _holds(agrees, (2, 3), names)
    if names.unseen:
        log.debug("%s reads %s, which may change unseen", type(module).__name__, ", ".join(sorted({*names.unseen})))
    return frozenset(found - refused) if alike and not (seen.more or names.unseen) else frozenset()


def set_training(module: nn.Module, training: bool) -> None:
    """What ``train`` does, which a class may have of its own, with more effects."""
    for each in module.modules():
        each.training = training


def _holds(agrees: Agrees, rows: tuple[int, ...], names: Names) -> bool:
    try:
        return agrees(rows, partial(noted, names))
    except Exception as error:
        log.debug("a module refuses rows of %s: %s: %s", rows, type(error).__name__, error)
        return False


def all_close(pairs: Iterable[tuple[torch.Tensor | None, torch.Tensor | None]]) -> bool:
    """Whether results and gradients of an op are those of a module, or None as those are."""
    return all(
        (a is None and b is None) or (a is not None and b is not None and torch.allclose(a, b, rtol=1e-3, atol=1e-4))
        for a, b in pairs
    )


def names_of(module: nn.Module) -> tuple[tuple[str, ...], ...]:
    """The names of what a module and each of those in it have: attributes, parameters and buffers."""
    return tuple(
        (
            name,
            *sorted(key for key in vars(child) if key not in _OWN and not key.startswith(("_cute", "_is_hf"))),
            *sorted(key for held in _HELD[:2] for key, value in vars(child)[held].items() if value is not None),
        )
        for name, child in module.named_modules()
    )


def is_plain(value: Any) -> bool:
    """Whether an attribute's value can be compared with what it was."""
    # NumPy's float64 is a float, yet a tensor in a graph.
    return (isinstance(value, _PLAIN) and type(value).__module__ != "numpy") or is_shape(value)


def is_shape(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) > 0 and all(type(size) is int for size in value)


def _watched(cls: Any, seen: Seen) -> Any:
    """A class derived from a module's that notes which attributes of the module are read."""
    shared = attributes_of_class(cls)

    def getattribute(self: Any, name: str) -> Any:
        value = cls.__getattribute__(self, name)
        if name in object.__getattribute__(self, "__dict__") or name in shared:
            seen.read(name, value)
        return value

    names = {name: getattr(cls, name) for name in ("__module__", "__qualname__")}
    return type(cls)(cls.__name__, (cls,), {**names, "__getattribute__": getattribute})


def attributes_of_class(cls: type) -> dict[str, Any]:
    """The attributes that a module's classes, but for PyTorch's, have for all of their instances, without methods."""
    found: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        if base.__module__.partition(".")[0] not in ("torch", "builtins", "typing"):
            found.update(vars(base))
    return {
        name: value for name, value in found.items()
        if not (name.startswith(("__", "_cute", "_abc_")) or name in _OWN or hasattr(type(value), "__get__"))
    }  # fmt: skip


def _undoing(module: nn.Module) -> Iterator[Callable[[], bool]]:
    """Functions that let the lists, dicts, sets and tensors of a module, also those within others, hold what they do
    now; each returns whether that had changed.
    """
    waiting = [value for each in module.modules() for key, value in vars(each).items() if key not in _OWN]
    known = set[int]()
    while waiting:
        value = waiting.pop()
        if type(value) is torch.Tensor and not value.is_inference():
            yield partial(_write_back, value, value._version, value.detach().clone())
        if isinstance(value, tuple):
            waiting += value
        if isinstance(value, list | dict | set | deque) and id(value) not in known:
            known.add(id(value))
            yield partial(_give_back, value, value.copy())
            waiting += value.values() if isinstance(value, dict) else value


def _give_back(container: Any, was: Any) -> bool:
    """Let a container hold what it did; returns whether it had changed."""
    now, then = _items(container), _items(was)
    if len(now) == len(then) and all(a is b for a, b in zip(now, then, strict=True)):
        return False
    container.clear()
    (container.extend if hasattr(container, "extend") else container.update)(was)
    return True


def _write_back(tensor: torch.Tensor, version: int, was: torch.Tensor) -> bool:
    """Let a tensor hold what it did; returns whether it was written to."""
    if tensor._version == version:
        return False
    with torch.no_grad():
        tensor.copy_(was)
    return True


def _items(container: Any) -> list[Any]:
    return [*container, *(container.values() if isinstance(container, dict) else ())]


def _has_slots(module: nn.Module) -> bool:
    """Whether a module has attributes that :func:`vars` does not name."""
    return any(vars(cls).get("__slots__") for cls in type(module).__mro__)


def _same(now: tuple[type, dict[str, Any]], before: tuple[type, dict[str, Any]]) -> bool:
    return now[0] is before[0] and _same_values(*({**own, "training": None} for _, own in (now, before)))


def _same_values(now: dict[str, Any], before: dict[str, Any]) -> bool:
    return now.keys() == before.keys() and all(value is before[name] for name, value in now.items())
