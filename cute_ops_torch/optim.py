"""Optimizers over the functions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cache
from itertools import chain
from numbers import Real
from typing import TYPE_CHECKING, Any

import torch

from cute_ops.errors import no_attribute, shown, suggesting
from cute_ops.ops.checks import LARGEST
from cute_ops_torch.registry import family

Tensor = torch.Tensor
WHAT = "cute_ops_torch.optim.AdamW"
# Options of torch.optim.AdamW that change the result of a step, and why they are refused. `foreach` and `fused` do not.
REFUSED = {
    "amsgrad": "the largest second moment is not kept; take torch.optim.AdamW",
    "differentiable": "the step has no gradient; take torch.optim.AdamW",
}
UNCAPTURED = "steps are counted by the host, which a CUDA graph does not repeat; make it with capturable=True"
# Parameters whose size this divides are viewed as rows of so many elements, so that they share one compiled kernel.
ROW = 1024
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Parameters of at most so many elements take their step in PyTorch's kernel of many: it runs at 0.64 of the copy rate,
# ours at 0.87 to 0.99, but a launch for each takes the host longer than that saves.
SMALL = 1 << 22


class AdamW(torch.optim.Optimizer):
    """:class:`torch.optim.AdamW`, with :func:`cute_ops_torch.adamw` on every large parameter, in place.

    Each parameter and its moments are read once and written once, in the parameter's dtype; a step is computed in
    float32. State dicts load into ``torch.optim.AdamW`` and from it. Parameters of up to 2^22 elements share launches
    of PyTorch's fused kernel, since a launch for each would take longer than its step. Where the square of a gradient
    overflows float32, that kernel gives NaN, and ours leaves the parameter.

    Args:
        params: parameters or groups of them, float32, float16 or bfloat16.
        lr: learning rate.
        betas: decay rates of the two moments.
        eps: added to the root of the second moment.
        weight_decay: decoupled weight decay: each step subtracts ``lr * weight_decay`` times the parameter.
        maximize: ascend the gradient; copies it once to negate it.
        capturable: count steps on the device, so that a CUDA graph may hold a step. A learning rate that is a tensor on
            the device may then change between replays. The option of a group may change between steps, too.
        stochastic_rounding: round bfloat16 parameters up or down by chance, so that steps smaller than half a unit in
            their last place are not lost (:func:`cute_ops_torch.adamw_stochastic`). Torch's generator of the device
            gives the seeds.

    Groups may have values of their own, numbers or tensors. Their ``foreach`` and ``fused``, as in a state dict of
    PyTorch's, are ignored.

    Raises:
        TypeError: a rate, eps or decay that is no number, betas that are not two; in :meth:`step`, a parameter of
            another dtype.
        ValueError: a negative rate, eps or decay, betas outside of [0, 1), or ``amsgrad`` or ``differentiable``
            in a group or a loaded state dict.
        RuntimeError: in :meth:`step`, a sparse gradient, or a CUDA graph that is captured without ``capturable``.
    """

    @suggesting
    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        maximize: bool = False,
        capturable: bool = False,
        stochastic_rounding: bool = False,
    ) -> None:
        options = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize,
            "capturable": capturable, "stochastic_rounding": stochastic_rounding,
        }  # fmt: skip
        _check(options)
        super().__init__(params, options)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; raises ValueError for its options as the constructor does."""
        _check({**self.defaults, **param_group})
        super().add_param_group(param_group)

    @torch.compiler.disable(reason="kernels are launched, and steps counted, by the host")  # type: ignore[untyped-decorator]
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step on every parameter that has a gradient; ``closure`` computes gradients and returns the loss."""
        capturing = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
        if capturing and not all(group.get("capturable") for group in self.param_groups):
            raise RuntimeError(f"{WHAT}: {UNCAPTURED}.")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        given = [_gradients(group) for group in self.param_groups]  # of all, before the first changes
        for parameter in chain.from_iterable(given):
            if state := self.state.get(parameter):
                _check_state(parameter, state)
        for group, slopes in zip(self.param_groups, given, strict=True):
            self._step(group, slopes)
        return loss

    def _step(self, group: dict[str, Any], slopes: Mapping[Tensor, Tensor]) -> None:
        """One step on a group: small parameters by a launch for many, large ones by a launch for each."""
        capturable = bool(group.get("capturable"))
        states = [self.state[p] or self._init_state(p, capturable) for p in slopes]
        if not states:
            return
        for parameter, state in zip(slopes, states, strict=True):
            if state["step"].is_cpu is capturable:  # the option has changed since the step before
                state["step"] = state["step"].to(parameter.device if capturable else "cpu")
        counts = _count_on_device(states) if capturable else _count(states)
        seeds = _seeds([*slopes]) if group.get("stochastic_rounding") else {}
        small: dict[tuple[torch.device, torch.dtype], list[Row]] = {}
        large: list[tuple[Row, Tensor | None]] = []
        for (parameter, grad), state, count in zip(slopes.items(), states, counts, strict=True):
            tensors = [parameter, grad, state["exp_avg"], state["exp_avg_sq"]]
            if hasattr(parameter, "to_local"):
                tensors = _parts(tensors)
            seed = seeds.get(parameter) if seeds else None
            if seed is None and _is_small(*tensors):
                small.setdefault((tensors[0].device, tensors[0].dtype), []).append((*tensors, count))
            elif tensors[0].numel():
                large.append(((*tensors, count), seed))
        for (device, _), rows in small.items():
            _step_small(group, device, rows)
        _step_large(group, large)

    def _init_state(self, parameter: Tensor, capturable: bool) -> dict[str, Any]:
        state: dict[str, Any] = self.state[parameter]
        state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device if capturable else "cpu")
        state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        state["exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict, also that of any form of ``torch.optim.AdamW``."""
        for group in state_dict["param_groups"]:
            # As in PyTorch's AdamW, decay is decoupled even if the state dict is one of Adam.
            _check({**self.defaults, **group, "decoupled_weight_decay": True})
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            for name, value in self.defaults.items():  # what PyTorch's AdamW does not know stays as it was asked for
                group.setdefault(name, value)
            for parameter in group["params"]:
                state = self.state.get(parameter, {})
                if "step" in state:
                    # A fused optimizer counts steps on the GPU: each read of them would wait for it.
                    device = parameter.device if group.get("capturable") else "cpu"
                    state["step"] = torch.as_tensor(state["step"], dtype=torch.float32, device=device)
            if "decoupled_weight_decay" in group:
                group["decoupled_weight_decay"] = True


# A parameter, its gradient, its moments, and its steps so far: on the device, where that counts them.
Row = tuple[Tensor, Tensor, Tensor, Tensor, Any]


def _count(states: list[dict[str, Any]]) -> list[float]:
    """Count a step of each parameter, and return how many there are.

    Counts of the host lie one after the other in one tensor, of which each is a view: to add to each of them takes the
    host as long as a small parameter's step.
    """
    steps = [state["step"] for state in states]
    size, first = len(steps), steps[0].data_ptr()
    places = range(first, first + size * steps[0].itemsize, steps[0].itemsize)
    one = steps[0].untyped_storage().data_ptr() == steps[-1].untyped_storage().data_ptr()
    if one and [step.data_ptr() for step in steps] == [*places]:
        every = steps[0].as_strided((size,), (1,))
    else:  # new ones, ones of a state dict, or not the ones of the step before
        every = torch.stack(steps)
        for state, step in zip(states, every.unbind(), strict=True):
            state["step"] = step
    return every.add_(1).tolist()  # type: ignore[no-any-return]


def _count_on_device(states: list[dict[str, Any]]) -> list[Tensor]:
    steps = [state["step"] for state in states]
    torch._foreach_add_(steps, 1.0)
    return steps


def _is_small(param: Tensor, grad: Tensor, mean: Tensor, square: Tensor) -> bool:
    """Whether PyTorch's fused kernel takes a parameter, its gradient and its moments, and they are few elements."""
    dtype = param.dtype
    return (
        0 < param.numel() <= SMALL and dtype in DTYPES
        and dtype is grad.dtype is mean.dtype is square.dtype
        and param.is_contiguous() and grad.is_contiguous() and mean.is_contiguous() and square.is_contiguous()
        and not grad.is_neg()
    )  # fmt: skip


def _step_small(group: dict[str, Any], device: torch.device, rows: list[Row]) -> None:
    """A step on small parameters of a device and dtype, by PyTorch's fused kernel."""
    params, grads, means, squares, counts = map(list, zip(*rows, strict=True))
    if not group.get("capturable"):
        made = {count: torch.full((), count, dtype=torch.float32, device=device) for count in {*counts}}
        counts = [made[count] for count in counts]
    rate = group["lr"]
    beta1, beta2 = map(float, group["betas"])
    torch._fused_adamw_(
        params, grads, means, squares, [], counts, beta1=beta1, beta2=beta2, eps=float(group["eps"]), amsgrad=False,
        lr=rate.to(device, torch.float32) if isinstance(rate, Tensor) and rate.is_cuda else float(rate),
        weight_decay=float(group["weight_decay"]), maximize=bool(group.get("maximize")),
    )  # fmt: skip
    _note_writes([*params, *means, *squares])  # the kernel does not


def _step_large(group: dict[str, Any], rows: list[tuple[Row, Tensor | None]]) -> None:
    """A step on parameters, each with its seed, by a launch of our kernel for each.

    Host time counts: the kernel of a million elements takes about as long as its launch.
    """
    if not rows:
        return
    counted = bool(group.get("capturable"))

    @cache
    def expanded(step: int, device: torch.device, lead: torch.Size) -> tuple[Tensor, ...]:
        return tuple(factor.expand(lead) for factor in factors(step, device))

    @cache
    def factors(step: int, device: torch.device) -> tuple[Tensor, ...]:
        return _rates(group, device) if counted else _factors(group, step, device)

    constants = *map(float, group["betas"]), float(group["eps"]), counted
    ops = {rounds: family("cute", "adamw_stochastic" if rounds else "adamw") for rounds in (False, True)}
    changed: list[Tensor] = []
    for (*tensors, count), seed in rows:
        param, grad, mean, square = _rows(tensors)
        # The kernel is launched without the dispatcher, which would resolve a negated view.
        grad = -grad if group.get("maximize") else grad.resolve_neg()
        lead = param.shape[:-1]
        numbers = expanded(0 if counted else int(count), param.device, lead)
        if counted:
            numbers = *numbers, count.float().expand(lead)
        _, run, into = ops[seed is not None]
        inputs = param, grad, mean, square, *(() if seed is None else (seed,)), *numbers, *constants
        _update(run, into, inputs, (param, mean, square), changed)
    _note_writes(changed)


def _note_writes(changed: list[Tensor]) -> None:
    """Count writes of a kernel: a backward that has saved these tensors raises instead of reading the new values."""
    if changed:
        torch.autograd.graph.increment_version(changed)


def _update(run: Any, into: Any, inputs: tuple[Any, ...], results: tuple[Tensor, ...], changed: list[Tensor]) -> None:
    """Write a parameter and its moments: in place where the kernel can, which ``changed`` then says, else by a copy."""
    param, mean, square = results
    # No loop, which would take the host a tenth of a step.
    aligned = param.is_cuda and not (param.data_ptr() | mean.data_ptr() | square.data_ptr()) & 15
    if aligned and param.is_contiguous() and mean.is_contiguous() and square.is_contiguous():
        into(*inputs, *results)
        changed += results
    else:
        for result, value in zip(results, run(*inputs), strict=True):
            result.copy_(value)


def _seeds(parameters: list[Tensor]) -> dict[Tensor, Tensor]:
    """A seed for each bfloat16 parameter, drawn on its device at once."""
    found: dict[Tensor, Tensor] = {}
    wanted = [p for p in parameters if p.dtype is torch.bfloat16]
    for device in {p.device for p in wanted}:
        own = [p for p in wanted if p.device == device]
        found |= dict(zip(own, torch.randint(2**31, (len(own),), device=device).unbind(), strict=True))
    return found


def _parts(given: list[Any]) -> list[Tensor]:
    """This rank's parts of a parameter, its gradient and its moments, which are DTensors: a step is elementwise.

    Under tensor parallelism gradients may lie otherwise than their parameters: that of a norm whose rows ranks share is
    a sum over ranks.
    """
    placements = given[0].placements
    return [(t if t.placements == placements else t.redistribute(placements=placements)).to_local() for t in given]


def _check(group: Mapping[str, Any]) -> None:
    """Raise ValueError for options of a group that a step does not support."""
    for name in ("lr", "eps", "weight_decay"):
        if not isinstance(group[name], Real | Tensor):
            came = type(group[name]).__name__
            raise TypeError(f"{WHAT}: argument `{name}` must be a number or a tensor of one, got {came}.")
        # To read a tensor on the device would wait for it, and end a capture.
        if not (isinstance(group[name], Tensor) and group[name].is_cuda) and not 0 <= group[name] <= LARGEST:
            came = shown(group[name]) if isinstance(group[name], int) else group[name]
            raise ValueError(f"{WHAT}: argument `{name}` is {came}, expected a finite number of at least 0.")
    if not isinstance(group["betas"], tuple | list) or len(group["betas"]) != 2:
        raise TypeError(f"{WHAT}: argument `betas` is {group['betas']!r}, expected two numbers.")
    if not all(0 <= beta < 1 for beta in group["betas"]):
        raise ValueError(f"{WHAT}: argument `betas` is {group['betas']}, expected both in [0, 1).")
    for name, reason in REFUSED.items():
        if group.get(name):
            raise ValueError(f"{WHAT}: option `{name}` is {group[name]}, expected False: {reason}.")
    if not group.get("decoupled_weight_decay", True):
        raise ValueError(f"{WHAT}: option `decoupled_weight_decay` is False; take torch.optim.Adam.")


def _gradients(group: Mapping[str, Any]) -> dict[Tensor, Tensor]:
    """The parameters of a group that have a gradient, and that; raises errors for a group that no step is made on."""
    _check(group)
    slopes = {p: grad for p in group["params"] if (grad := p.grad) is not None}
    for parameter, grad in slopes.items():
        if grad.is_sparse:
            raise RuntimeError(f"{WHAT}: sparse gradients are not supported.")
        if parameter.dtype not in DTYPES:
            raise TypeError(
                f"{WHAT}: a parameter is {_kind(parameter)}, expected "
                "float32, float16 or bfloat16; take torch.optim.AdamW for it."
            )
    return slopes


def _check_state(parameter: Tensor, state: Mapping[str, Any]) -> None:
    """Raise an error for a state that no step is made on, such as one that a program has changed."""
    mean, square = state.get("exp_avg"), state.get("exp_avg_sq")
    if isinstance(mean, Tensor) and isinstance(square, Tensor) and isinstance(state.get("step"), Tensor):
        dtype = mean.dtype
        if dtype is square.dtype and dtype in DTYPES and mean.shape == parameter.shape == square.shape:
            return
    came = ", ".join(f"`{name}` {_kind(state.get(name))}" for name in ("step", "exp_avg", "exp_avg_sq"))
    raise TypeError(
        f"{WHAT}: the state of a parameter {_kind(parameter)} is {came}; expected tensors, and both moments float32, "
        "float16 or bfloat16, of one dtype, with the parameter's shape."
    )


def _kind(value: Any) -> str:
    """A tensor's dtype, shape and device, for a message."""
    if not isinstance(value, Tensor):
        return shown(value)
    return f"{str(value.dtype).removeprefix('torch.')}{[*value.shape]} on {value.device}"


def _factors(group: dict[str, Any], step: int, device: torch.device) -> tuple[Tensor, ...]:
    """Factors of a step, as scalars on the device: of the weights, of the update, and of the second moment's root.

    They are filled in by kernels: a copy from host memory that is not pinned would wait for the device.
    """
    lr, decay, (beta1, beta2) = float(group["lr"]), float(group["weight_decay"]), map(float, group["betas"])
    values = (1 - lr * decay, lr / (1 - beta1**step), 1 / math.sqrt(1 - beta2**step))
    return tuple(torch.full((), value, dtype=torch.float32, device=device) for value in values)


def _rates(group: dict[str, Any], device: torch.device) -> tuple[Tensor, Tensor]:
    """The first factor of a step and the learning rate, of which the kernel computes the others where the device counts
    steps.
    """
    lr, decay = group["lr"], float(group["weight_decay"])
    if isinstance(lr, Tensor):
        rate = lr.to(device, torch.float32)
        return 1 - rate * decay, rate
    ends = 1 - float(lr) * decay, float(lr)
    keep, rate = torch.linspace(*ends, 2, dtype=torch.float32, device=device).unbind()  # one launch fills in both
    return keep, rate


def _rows(tensors: list[Tensor]) -> list[Tensor]:
    """Views as rows, of ``ROW`` elements for most parameters."""
    param, grad, mean, square = tensors
    if (
        param.numel() % ROW == 0
        and param.is_contiguous() and grad.is_contiguous() and mean.is_contiguous() and square.is_contiguous()
    ):  # fmt: skip
        return [param.view(-1, ROW), grad.view(-1, ROW), mean.view(-1, ROW), square.view(-1, ROW)]
    if all(t.ndim and t.stride(-1) == 1 for t in tensors):
        return tensors
    return [t.reshape(-1, 1) if t.ndim == 0 else t.unsqueeze(-1) for t in tensors]


if not TYPE_CHECKING:  # for which each name would exist

    def __getattr__(name: str) -> Any:
        own = [each for each, value in globals().items() if getattr(value, "__module__", "") == __name__]
        raise no_attribute(__name__, name, own)
