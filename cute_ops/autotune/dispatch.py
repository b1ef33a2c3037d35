"""Chooses the config of a call: the winner of its class, or the heuristic's.

A process decides once for each class of calls, so that the bits of a row stay the same while it runs.
``CUTE_OPS_TUNE=0`` uses the heuristics alone. With ``CUTE_OPS_TUNE=1`` the first call of a class without a winner is
measured. ``CUTE_OPS_RECORD`` names a manifest to which every new kind of call is added.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from cute_ops import env
from cute_ops.autotune import choices, winners
from cute_ops.autotune.winners import Winner
from cute_ops.declaration.binding import Binding
from cute_ops.declaration.config import Config
from cute_ops.declaration.messages import message
from cute_ops.declaration.program import Program
from cute_ops.declaration.shapes import Array
from cute_ops.files import file_lock
from cute_ops.hardware import sm
from cute_ops.jit import cache as kernels
from cute_ops.jit.layout import Memory, misplaced
from cute_ops.jit.plan import Plan, Signature, configured, signature
from cute_ops.jit.target import Target
from cute_ops.jit.variant import Variant
from cute_ops.ops.gemm import choice

# Every new size of a static dim costs a compile. After this many sizes of dims that are static while few, an op has one
# kernel in which they are dynamic.
STATIC_LIMIT = 64
NOT_SLOWER = "nothing says that it is slower"
log = logging.getLogger("cute_ops")

_lock = file_lock.between_threads(threading.RLock)
_static_seen: dict[str, set[tuple[int, ...]]] = {}
_decided: dict[winners.Key, Config] = {}
_planned: dict[str, set[winners.Key]] = {}  # by symbol: the classes of calls that run this kernel
_recorded: set[tuple[Path, str]] = set()  # by manifest and symbol


def choose(
    binding: Binding,
    memory: Mapping[str, Memory],
    target: Target,
    device: int | None = None,
    *,
    fixed: bool | None = None,
) -> Plan:
    """How a call of this program runs; records it where ``CUTE_OPS_RECORD`` asks for that.

    Args:
        binding: a checked call with concrete sizes.
        memory: of inputs, and of outputs that the caller gives; all others are compact and 16-byte aligned.
        target: what the kernel is compiled for.
        device: the GPU to measure on with ``CUTE_OPS_TUNE=1``; None if nothing can be measured.
        fixed: whether dims that are static while few are compile-time constants; by default as long as they are few.

    Raises:
        ValueError: an input's strides or alignment are not those that its declaration demands.
        NotImplementedError: the target is older than the op's kernels.
    """
    chosen = _plan(binding, memory, target, _specialize(binding) if fixed is None else fixed, device)
    if (path := env.RECORD.read()) is not None:
        _record(path, binding, memory, chosen.variant)
    return chosen


def fallback(
    binding: Binding, memory: Mapping[str, Memory], target: Target | None, pads: bool = False
) -> Program | None:
    """The program that runs a call in place of a kernel, if one does; see
    :class:`cute_ops.declaration.program.Fallback`.

    Args:
        binding: a checked call with concrete sizes.
        memory: as :func:`choose` takes it.
        target: the GPU; None if no kernel can run.
        pads: whether the framework multiplies copies of operands that begin off vectors, as XLA does.

    Raises:
        ValueError: a kernel is asked for, and none takes the call's dtypes.
    """
    op = binding.op
    if op.fallback is None or (target is None and binding.attrs["fused"] != "never"):
        return None
    asked, beyond = binding.attrs["fused"], binding.dtype_without_kernel
    if target is not None and asked == "always" and beyond is not None:
        problem = f"attribute `fused` is 'always', but no kernel takes {beyond}; 'auto' does."
        raise ValueError(message(op, problem, binding.inputs, binding.dims, binding.dtypes))
    reason = _reason_against(binding, memory, target)
    if not reason and pads and asked == "auto" and target is not None:
        reason = _padded_is_faster(signature(binding, memory, target))
    if not reason:
        said = "`fused` is 'always'" if asked == "always" else _expectation(binding, memory, target)
        _log_choice(binding, "our kernel", said)
        return None
    _log_choice(binding, "the framework's product", reason if isinstance(reason, str) else "it is faster")
    return op.fallback.program


def _reason_against(binding: Binding, memory: Mapping[str, Memory], target: Target | None) -> bool | str:
    """Why a call of an op with a fallback runs no kernel; True where the fallback is faster."""
    op, asked, beyond = binding.op, binding.attrs["fused"], binding.dtype_without_kernel
    assert op.fallback is not None
    if target is None or asked == "never":
        return "`fused` is 'never'"
    if beyond is not None:
        return f"no kernel takes {beyond}"
    if asked != "auto":
        return False
    if sm(target.arch) < op.least_sm:
        return f"no kernel runs on {target.arch}"
    return _out_of_reach(binding, memory) or _slower(binding, memory, target)


def realigned(
    binding: Binding, memory: Mapping[str, Memory], target: Target | None, reads: int = 1, measures: bool = False
) -> dict[str, tuple[int, ...]]:
    """The operands of a product that are copied first, with the strides of their copies, because our kernel gains more
    than the copies cost: where TMA cannot load them, cuBLAS is slow, too. Only for adapters that can pass strides, and
    only where ``fused`` is ``"auto"``. ``reads``: how many products read each copy; ``measures``: whether a call that
    :func:`to_measure` asks for is measured, with its copies; others as in :func:`fallback`.
    """
    if target is None or not _takes_copies(binding, target):
        return {}
    assert binding.op.fallback is not None
    found = _copies(binding, memory, binding.op.fallback.anywhere)
    copied = {**memory, **{n: Memory(s) for n, s in found.items()}}
    if not found or _out_of_reach(binding, copied):  # a copy of one operand does not help if the other has none
        return {}
    call = signature(binding, copied, target)
    if not choice.off_vector(call.problem):  # cuBLAS is as fast as ever, and what was measured of a class has no copies
        return {}
    if reads == 1 and _read_in_place(binding, memory, target, found, call):
        return {}
    if measures and to_measure(binding, copied, target):
        return found
    if choices.measured(binding.op, call) is None and not _pay(found, call, reads):
        return {}
    return found if fallback(binding, copied, target) is None else {}


def _takes_copies(binding: Binding, target: Target) -> bool:
    """Whether a call may run by a kernel that reads copies of its operands."""
    other = binding.op.fallback
    if other is None or not other.anywhere or sm(target.arch) != 90 or binding.attrs.get("fused") != "auto":
        return False
    return not (binding.empty or binding.dtype_without_kernel or "b" in binding.dims)


def _pay(copied: Iterable[str], call: Signature, reads: int) -> bool:
    """Whether copies of these inputs pay, by the model."""
    return choice.pays(_arrays(copied, call), call.problem, _expected(call), reads)


def _read_in_place(
    binding: Binding, memory: Mapping[str, Memory], target: Target, copied: Iterable[str], call: Signature
) -> bool:
    """Whether our kernel reads the operands of a call as they lie in less time than from copies of these, by the model;
    ``call`` is that with copies.
    """
    here = _expected(signature(binding, memory, target))
    there = choice.with_copies(_arrays(copied, call), call.problem, _expected(call), 1)[0]
    return here is not None and here[0] <= there


def _padded_is_faster(call: Signature) -> str:
    """Why the framework's product of copies of the operands is faster than our kernel, which reads them where they lie
    off vectors; empty where it is not.
    """
    here, operands = _expected(call), call.binding.op.fallback.anywhere if call.binding.op.fallback else ()
    if here is None or not choice.off_vector(call.problem):
        return ""
    whole = _expected(call._replace(problem=choice.padded(call.problem)))
    theirs = choice.with_copies(_arrays(operands, call), call.problem, whole and whole[::-1], 1)[0]
    return f"{theirs:.3g} us are expected with copies, {here[0]:.3g} of our kernel" if theirs < here[0] else ""


def _expected(call: Signature) -> tuple[float, float] | None:
    """The times that an op expects of our kernel and of its fallback; None for an op that predicts none."""
    other = call.binding.op.fallback
    return other.expected(call.problem) if other and other.expected else None


def _arrays(names: Iterable[str], call: Signature) -> list[Array]:
    return [array for name in names if (array := call.binding.inputs[name])]


def _copies(binding: Binding, memory: Mapping[str, Memory], names: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """The strides of copies of those of these inputs that TMA cannot load where they lie."""
    given = {n: a for n in names if (a := binding.inputs[n])}
    strides = choice.copies([(a, memory[n].strides, memory[n].address) for n, a in given.items()])
    return {n: s for n, s in zip(given, strides, strict=True) if s}


def _slower(binding: Binding, memory: Mapping[str, Memory], target: Target) -> bool | str:
    """Why the program that stands in for the kernel is faster, as it was measured, or else as the op expects."""
    op, call = binding.op, signature(binding, memory, target)
    assert op.fallback is not None
    known = choices.measured(op, call) if op.fallback.expected is not None else None
    if known is not None and choice.off_vector(call.problem) and _expected(call) is None:
        known = None  # of fewer rows, by the kernel that reads them in place
    return op.fallback.when(call.problem) if known is None else known.reason


def _expectation(binding: Binding, memory: Mapping[str, Memory], target: Target | None) -> str:
    """Why our kernel runs: what the op expects, where it expects something."""
    other = binding.op.fallback
    if target is None or other is None or other.expected is None:
        return NOT_SLOWER
    call = signature(binding, memory, target)
    known, times = choices.measured(binding.op, call), other.expected(call.problem)
    if known is not None:
        return f"{known.ours:.3g} us were measured, {known.theirs:.3g} of the framework's product"
    return f"{times[0]:.3g} us are expected, {times[1]:.3g} of the framework's product" if times else NOT_SLOWER


def to_measure(binding: Binding, memory: Mapping[str, Memory], target: Target | None) -> Signature | None:
    """A call to be measured by our kernel and by the program that stands in for it, before the choice between them:
    where :func:`choices.asked <cute_ops.autotune.choices.asked>` says so, once for each class, where both can run.
    """
    op = binding.op
    if op.fallback is None or op.fallback.expected is None or op.mutates or target is None or binding.empty:
        return None
    if binding.attrs["fused"] != "auto" or binding.dtype_without_kernel is not None or sm(target.arch) < op.least_sm:
        return None
    if not choices.asked(op) or _out_of_reach(binding, memory):
        return None
    call = signature(binding, memory, target)
    return call if choices.measured(op, call) is None else None


def _out_of_reach(binding: Binding, memory: Mapping[str, Memory]) -> str:
    """Why the kernel cannot read an input that its fallback takes anywhere; empty if it can."""
    other = binding.op.fallback
    problems = (misplaced(binding, name, memory.get(name)) for name in (other.anywhere if other else ()))
    return next(filter(None, problems), "")


def _log_choice(binding: Binding, what: str, reason: str) -> None:
    log.debug("%s%s runs by %s: %s", binding.op.name, dict(binding.dims), what, reason)


def kernel_is_faster(binding: Binding, memory: Mapping[str, Memory], target: Target | None) -> bool:
    """Whether the kernel of a product with an epilogue is at least as fast as the framework's product and our pass. For
    programs that have a better pass than :func:`fallback`. Arguments as in :func:`fallback`.
    """
    if target is None or binding.empty or binding.dtype_without_kernel or _out_of_reach(binding, memory):
        return False
    problem = signature(binding, memory, target).problem
    reason: bool | str = choice.fallback_reason(problem, binding.op.config(problem)["form"])
    if not reason and binding.op.fallback:
        reason = _slower(binding, memory, target)
    if reason:
        _log_choice(
            binding, "the framework's product and a pass", reason if isinstance(reason, str) else "it is faster"
        )
    else:
        _log_choice(binding, "our kernel", _expectation(binding, memory, target))
    return not reason


def foresee(binding: Binding, memory: Mapping[str, Memory], target: Target, fixed: bool = True) -> Plan:
    """The plan with which a program on this machine would run a call, to compile it ahead; nothing is measured or
    recorded.

    Takes and raises what :func:`choose` does; ``fixed`` says whether dims that are static while few are compile-time
    constants.
    """
    return _plan(binding, memory, target, fixed)


def limit_static(count: int) -> None:
    """From now on let each op have kernels for this many sizes of its dims that are static while few, and forget the
    sizes seen so far.
    """
    global STATIC_LIMIT
    STATIC_LIMIT = count
    _static_seen.clear()


def winners_of(symbols: Iterable[str]) -> list[Winner]:
    """The configs that this process chose for the calls that run these kernels. A bundle must bring them along, because
    another process would otherwise choose other kernels.
    """
    keys = sorted({key for symbol in symbols for key in _planned.get(symbol, ()) if key in _decided})
    return [Winner(call, dict(heuristic), _decided[call, heuristic]) for call, heuristic in keys]


@contextmanager
def as_shipped() -> Iterator[None]:
    """Within the block, use the winners of this package alone, as on a machine where nothing was measured."""
    global _decided
    with _lock, winners.only_shipped():
        before, _decided = _decided, {}
        try:
            yield
        finally:
            _decided = before


def forget() -> None:
    """Drop loaded kernels, opened bundles and decisions from this process's memory; files on disk stay."""
    kernels.forget()
    with _lock:
        winners.forget()
        choices.forget()
        _decided.clear()
        _planned.clear()


def _specialize(binding: Binding) -> bool:
    """Whether dims that are static while few are compile-time constants in this call: until an op has been called with
    too many of their sizes.
    """
    op = binding.op
    values, seen = tuple(binding.dims[d] for d in op.few), _static_seen.setdefault(op.name, set())
    if values not in seen and len(seen) >= STATIC_LIMIT:
        return False
    seen.add(values)
    return True


def _plan(
    binding: Binding, memory: Mapping[str, Memory], target: Target, fixed: bool, device: int | None = None
) -> Plan:
    """The plan of a call with the config that this process runs it with.

    That is the config that was chosen before, else a winner, else what measuring on ``device`` finds now if the user
    asks for it, else the heuristic's.
    """
    mode, op, call = env.TUNE.read(), binding.op, signature(binding, memory, target, fixed)
    heuristic = op.config(call.problem)
    if not call.tunable:
        return configured(call, heuristic)
    key = winners.key_of(op, call.problem, heuristic)
    if key not in _decided:
        with _lock:
            if key not in _decided:
                found = None if mode == "0" else winners.remembered(op, call.problem, heuristic, key)
                if found is None and mode == "1" and device is not None:
                    from cute_ops.autotune import tuner  # start-up time: few programs measure

                    found = tuner.now(call, memory, target, device)
                _decided[key] = dict(heuristic if found is None else found)
    chosen = configured(call, _decided[key])
    _planned.setdefault(chosen.variant.symbol, set()).add(key)
    return chosen


def _record(path: Path, binding: Binding, memory: Mapping[str, Memory], variant: Variant) -> None:
    """Add a call to a manifest as soon as it is planned, so that a crash loses none; once for each kernel."""
    if (path, variant.symbol) in _recorded:
        return
    _recorded.add((path, variant.symbol))
    from cute_ops.calls import manifest  # start-up time: few programs record

    call = manifest.call_of(binding, memory, dynamic=None in variant.dims.values())
    if call is None:
        log.warning("not recorded: no module holds the declaration of %s", binding.op.name)
        return
    try:
        manifest.append(path, call)
    except OSError as error:
        log.warning("cannot record into %s: %s", path, error)
