"""AdamW against PyTorch's."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter

from cute_ops_torch import optim
from cute_ops_torch.optim import AdamW

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(autouse=True, params=["a launch for many", "a launch for each"])
def small(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small parameters take PyTorch's kernel of many, and ours where none counts as small."""
    if request.param == "a launch for each":
        monkeypatch.setattr(optim, "SMALL", 0)


def model(device: str, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(32, 64), nn.Conv2d(3, 5, 3, bias=False), nn.Linear(7, 3), nn.LayerNorm(2048))
    made.scale = nn.Parameter(torch.tensor(2.0))
    made.turned = nn.Parameter(torch.randn(6, 5).t())
    return made.to(device, dtype)


def steps(made: nn.Module, optimizer: torch.optim.Optimizer, count: int = 4, first: int = 0) -> None:
    for i in range(first, first + count):
        torch.manual_seed(100 + i)
        for p in made.parameters():
            p.grad = torch.randn(p.shape, dtype=p.dtype).to(p.device)
        optimizer.step()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_as_torch_and_from_its_state(dtype: torch.dtype, device: str) -> None:
    ours, theirs = model(device, dtype), model(device, dtype)
    options = {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}
    one, other = AdamW(ours.parameters(), **options), torch.optim.AdamW(theirs.parameters(), **options)
    limits = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    places = [p.data_ptr() for p in ours.parameters()]
    steps(ours, one)
    steps(theirs, other)
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, **limits)
    assert places == [p.data_ptr() for p in ours.parameters()]
    # Both go on from the other's state.
    state, others = copy.deepcopy(one.state_dict()), copy.deepcopy(other.state_dict())
    assert state["state"].keys() == others["state"].keys()
    one.load_state_dict({**state, "state": others["state"]})
    other.load_state_dict({**others, "state": state["state"]})
    steps(ours, one, 2, 4)
    steps(theirs, other, 2, 4)
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, **limits)


@pytest.mark.parametrize("device", DEVICES)
def test_from_a_fused_optimizers_state(device: str) -> None:
    """Fused AdamW counts steps on the GPU; reading the count at each step would wait for it."""
    ours, theirs = nn.Linear(32, 64, device=device), nn.Linear(32, 64, device=device)
    one, other = AdamW(ours.parameters(), lr=1e-2), torch.optim.AdamW(theirs.parameters(), lr=1e-2, fused=True)
    steps(theirs, other)
    ours.load_state_dict(theirs.state_dict())
    one.load_state_dict(copy.deepcopy(other.state_dict()))
    assert {state["step"].device.type for state in one.state.values()} == {"cpu"}
    steps(ours, one, 2, 4)
    steps(theirs, other, 2, 4)
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def test_parameters_without_gradients() -> None:
    """Each parameter counts its own steps."""
    weights = [nn.Parameter(torch.ones(3, 4)) for _ in range(2)]
    optimizer = AdamW(weights, lr=0.1, weight_decay=0.0)
    optimizer.step()
    assert not optimizer.state
    for given in (weights, weights[:1], weights):
        optimizer.zero_grad()
        for weight in given:
            weight.grad = torch.ones(3, 4)
        optimizer.step()
    assert [int(optimizer.state[weight]["step"]) for weight in weights] == [3, 2]
    for weight, count in zip(weights, (3, 2), strict=True):  # with a constant gradient each step is the learning rate
        torch.testing.assert_close(weight.detach(), torch.full((3, 4), 1 - 0.1 * count), rtol=1e-5, atol=1e-5)


def test_step_counts_that_lie_one_after_the_other_in_memory_of_their_own() -> None:
    """As an allocator without headers may place them: to write to them at once, they must be of one storage."""
    params = [nn.Parameter(torch.ones(2)) for _ in range(3)]
    optimizer, counts = AdamW(params), bytearray(torch.tensor([1.0, 2.0, 3.0]).numpy().tobytes())
    for k, p in enumerate(params):
        step = torch.frombuffer(counts, dtype=torch.float32, count=1, offset=4 * k)[0]
        optimizer.state[p] = {"step": step, "exp_avg": torch.zeros(2), "exp_avg_sq": torch.zeros(2)}
        p.grad = torch.ones(2)
    for taken in (1, 2):
        optimizer.step()
        assert [optimizer.state[p]["step"].item() for p in params] == [1 + taken, 2 + taken, 3 + taken]


def test_closures_groups_and_schedules() -> None:
    weights = [nn.Parameter(torch.ones(3, 4)) for _ in range(3)]
    optimizer = AdamW([{"params": weights[:1], "lr": 0.0}, {"params": weights[1:], "weight_decay": 0.0}], lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda _: 1.0, lambda step: 1.0 / (1 + step)])

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = weights[0].sum() + weights[1].sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) == 24
    schedule.step()
    optimizer.step(closure)
    assert (weights[0] == 1).all() and (weights[2] == 1).all()  # a learning rate of zero, and no gradient
    torch.testing.assert_close(weights[1], torch.full((3, 4), 1 - 0.1 - 0.05), rtol=1e-5, atol=1e-5)


def test_errors() -> None:
    weight = nn.Parameter(torch.ones(3, 4))
    with pytest.raises(ValueError, match=r"optim\.AdamW: argument `lr` is -1, expected a finite number of at least 0"):
        AdamW([weight], lr=-1)
    with pytest.raises(ValueError, match=r"argument `betas` is \(0\.9, 1\.0\), expected both in \[0, 1\)"):
        AdamW([weight], betas=(0.9, 1.0))
    weight.grad = torch.eye(3, 4).to_sparse()
    with pytest.raises(RuntimeError, match="sparse gradients are not supported"):
        AdamW([weight]).step()
    with pytest.raises(ValueError, match=r"argument `lr` is -1, expected a finite number of at least 0"):
        AdamW([{"params": [weight], "lr": -1}])
    with pytest.raises(ValueError, match=r"option `decoupled_weight_decay` is False; take torch\.optim\.Adam\."):
        AdamW([{"params": [weight], "decoupled_weight_decay": False}])
    for wrong in (10**400, float("inf"), float("nan")):
        with pytest.raises(ValueError, match=r"argument `eps` is .*, expected a finite number"):
            AdamW([weight], eps=wrong)


def test_the_host_counts_steps_under_another_default_device() -> None:
    weight = nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)
    optimizer = AdamW([weight])
    with torch.device("meta"):
        optimizer.step()
    assert float(optimizer.state[weight]["step"]) == 1 and (weight < 1).all()


@pytest.mark.parametrize("kind", ["float64", "sparse"])
def test_a_step_that_is_refused_changes_nothing(kind: str) -> None:
    dtype = torch.float64 if kind == "float64" else torch.float32
    first, other = nn.Parameter(torch.ones(3, 4)), nn.Parameter(torch.ones(5, dtype=dtype))
    first.grad, ones = torch.ones(3, 4), torch.ones(5, dtype=dtype)
    other.grad = ones.to_sparse() if kind == "sparse" else ones
    optimizer = AdamW([{"params": [first]}, {"params": [other]}])
    with pytest.raises((TypeError, RuntimeError), match=rf"optim\.AdamW: .*{kind}.*"):
        optimizer.step()
    assert (first == 1).all() and not optimizer.state


@pytest.mark.parametrize("name", ["step", "exp_avg", "exp_avg_sq"])
@pytest.mark.parametrize("wrong", [lambda t: t.double().to("meta"), lambda t: None, lambda t: t.half()[..., None]])
def test_a_step_on_a_state_of_another_kind_changes_nothing(name: str, wrong: Callable[[torch.Tensor], Any]) -> None:
    """A later parameter's state that a program has changed, in a group of its own or with the first one."""
    for groups in (2, 1):
        first, other = (nn.Parameter(torch.ones(3, 4)) for _ in range(2))
        both = [{"params": [first]}, {"params": [other]}] if groups == 2 else [first, other]
        optimizer = AdamW(both)
        first.grad = other.grad = torch.ones(3, 4)
        optimizer.step()
        before = first.clone(), float(optimizer.state[first]["step"])
        optimizer.state[other][name] = wrong(optimizer.state[other][name])
        if name == "step":
            optimizer.state[other][name] = None
        with pytest.raises(TypeError, match=rf"optim\.AdamW: the state of a parameter float32\[3, 4\].*`{name}`"):
            optimizer.step()
        assert torch.equal(first, before[0]) and float(optimizer.state[first]["step"]) == before[1]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("of", ["argument", "group", "state dict"])
def test_maximize(of: str, device: str) -> None:
    ours, theirs = nn.Linear(32, 64, device=device), nn.Linear(32, 64, device=device)
    ours.load_state_dict(theirs.state_dict())
    other = torch.optim.AdamW(theirs.parameters(), lr=1e-2, maximize=True)
    if of == "argument":
        one = AdamW(ours.parameters(), lr=1e-2, maximize=True)
    else:
        one = AdamW([{"params": list(ours.parameters()), "maximize": of == "group"}], lr=1e-2)
    if of == "state dict":
        one.load_state_dict(copy.deepcopy(other.state_dict()))
    steps(ours, one)
    steps(theirs, other)
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(one.state[p]["exp_avg"], other.state[q]["exp_avg"], rtol=1e-5, atol=1e-6)


@pytest.mark.fault(
    "AdamW gets amsgrad or differentiable: in a group, in one added later, or in PyTorch's state dict",
    "an error says which option it is and what to use instead; neither parameters nor state change", "nothing",
)  # fmt: skip
@pytest.mark.parametrize("name", ["amsgrad", "differentiable"])
def test_options_that_a_step_could_not_do_are_refused(name: str) -> None:
    weight = nn.Parameter(torch.ones(3, 4))
    weight.grad = torch.ones(3, 4)
    problem = rf"^cute_ops_torch\.optim\.AdamW: option `{name}` is True, expected False: .*; take torch\.optim\.AdamW"
    with pytest.raises(ValueError, match=problem):
        AdamW([{"params": [weight], name: True}])
    optimizer = AdamW([weight])
    with pytest.raises(ValueError, match=problem):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))], name: True})
    assert len(optimizer.param_groups) == 1
    theirs = torch.optim.AdamW([nn.Parameter(torch.ones(3, 4))])
    theirs.param_groups[0][name] = True
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match=problem):
        optimizer.load_state_dict(theirs.state_dict())
    assert optimizer.state_dict() == before
    optimizer.param_groups[0][name] = True
    with pytest.raises(ValueError, match=problem):
        optimizer.step()
    assert (weight == 1).all() and not optimizer.state


def test_numbers_of_groups_may_be_tensors() -> None:
    ours, theirs = nn.Linear(8, 4), nn.Linear(8, 4)
    ours.load_state_dict(theirs.state_dict())
    options = {"lr": torch.tensor(1e-2), "betas": (torch.tensor(0.8), torch.tensor(0.95)), "weight_decay": 0.1}
    one = AdamW(ours.parameters(), **options)
    other = torch.optim.AdamW(theirs.parameters(), lr=1e-2, betas=(0.8, 0.95), weight_decay=0.1)
    steps(ours, one)
    steps(theirs, other)
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def test_decay_stays_decoupled_with_a_state_dict_of_adam() -> None:
    """As PyTorch's AdamW does."""
    weight, other = nn.Parameter(torch.ones(3, 4)), nn.Parameter(torch.ones(3, 4))
    optimizer = AdamW([weight])
    optimizer.load_state_dict(torch.optim.Adam([other], weight_decay=0.5).state_dict())
    theirs = torch.optim.AdamW([other])
    theirs.load_state_dict(torch.optim.Adam([other], weight_decay=0.5).state_dict())
    for p, o in ((weight, optimizer), (other, theirs)):
        p.grad = torch.ones(3, 4)
        o.step()
    torch.testing.assert_close(weight, other)


@pytest.mark.gpu
def test_a_captured_step_is_refused() -> None:
    """A replay would repeat the learning rate and the bias corrections of the captured step."""
    weight = nn.Parameter(torch.ones(64, device="cuda"))
    weight.grad = torch.ones(64, device="cuda")
    optimizer = AdamW([weight])
    optimizer.step()
    with pytest.raises(RuntimeError, match="steps are counted by the host"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        optimizer.step()


@pytest.mark.parametrize("device", DEVICES)
def test_steps_counted_on_the_device_are_those_of_the_host(device: str) -> None:
    """Bit by bit, through a state dict, and with a rate that is a tensor."""
    results = []
    for capturable in (False, True):
        made = model(device, torch.float32)
        lr = torch.tensor(1e-2, dtype=torch.float64, device=device) if capturable else 1e-2
        optimizer = AdamW(made.parameters(), lr=lr, capturable=capturable)
        steps(made, optimizer, 3)
        again = AdamW(made.parameters(), lr=lr, capturable=capturable)
        again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        counted = {state["step"].device.type for state in again.state.values()}
        assert counted == {device if capturable else "cpu"}
        steps(made, again, 2, 3)
        results.append([p.detach() for p in made.parameters()])
    for p, q in zip(*results, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("device", [*DEVICES, "meta"])
def test_counts_follow_their_option_to_the_device(device: str) -> None:
    """Also those of parameters whose steps begin when the host counts. A CPU stands beside ``meta`` as beside a GPU."""
    made = [nn.Linear(32, 64, device=device) for _ in range(2)]
    plain = [copy.deepcopy(each).double() for each in made]
    optimizer, right = (
        kind(each[0].parameters(), lr=0.1) for kind, each in ((AdamW, made), (torch.optim.AdamW, plain))
    )
    for i, counted in enumerate([False, True] if device == "meta" else [False, True, False, True]):
        optimizer.param_groups[0]["capturable"] = counted
        if i == 2:
            for own, each in ((optimizer, made), (right, plain)):
                own.add_param_group({"params": [*each[1].parameters()], "capturable": False})
                own.param_groups[0]["params"] += own.param_groups.pop()["params"]
        for p, q in zip(nn.ModuleList(made).parameters(), nn.ModuleList(plain).parameters(), strict=True):
            p.grad = torch.randn(p.shape).to(device)
            q.grad = p.grad.double()
        optimizer.step()
        assert {each["step"].device.type for each in optimizer.state.values()} == {device if counted else "cpu"}
        if device != "meta":
            right.step()
    for p, q in zip(nn.ModuleList(made).parameters(), nn.ModuleList(plain).parameters(), strict=True):
        if device != "meta":
            torch.testing.assert_close(p.double(), q, rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
def test_a_step_in_a_graph() -> None:
    """Replays go on counting, and follow the rate."""
    made, eager = nn.Linear(64, 64, device="cuda"), nn.Linear(64, 64, device="cuda")
    eager.load_state_dict(made.state_dict())
    rates = [torch.tensor(1e-2, device="cuda") for _ in "ab"]
    optimizers = [AdamW(m.parameters(), lr=r, capturable=True) for m, r in zip((made, eager), rates, strict=True)]
    for m in (made, eager):
        for p in m.parameters():
            p.grad = torch.ones_like(p)
    for optimizer in optimizers:
        optimizer.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizers[0].step()
    for rate in (1e-2, 3e-3, 1e-3):
        for r in rates:
            r.fill_(rate)
        graph.replay()
        optimizers[1].step()
    for p, q in zip(made.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=0)


@pytest.mark.parametrize("device", DEVICES)
def test_stochastic_rounding_keeps_the_mean_of_small_steps(device: str) -> None:
    """Steps of an eighth of half a unit in the last place are lost by rounding to nearest."""
    size, count = 1 << 16, 8
    results = []
    for seed, stochastic in ((0, True), (0, True), (1, True), (0, False)):
        torch.manual_seed(seed)
        weight = nn.Parameter(torch.ones(size, dtype=torch.bfloat16, device=device))
        optimizer = AdamW([weight], lr=2**-11, eps=0.0, weight_decay=0.0, stochastic_rounding=stochastic)
        for _ in range(count):
            weight.grad = torch.full_like(weight, -1.0)
            optimizer.step()
        results.append(weight.detach().double().cpu())
    first, again, other, nearest = results
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert nearest.eq(1).all()
    unit = 2**-7  # of bfloat16 numbers from 1 on
    deviation = unit * (count * (1 / 16) * (15 / 16)) ** 0.5
    assert abs(first.mean() - (1 + count * 2**-11)) < 5 * deviation / size**0.5
    assert set(first.unique().tolist()) <= {1 + k * unit for k in range(count + 1)}


def test_stochastic_rounding_leaves_other_dtypes_alone() -> None:
    ours, theirs = model("cpu", torch.float32), model("cpu", torch.float32)
    steps(ours, AdamW(ours.parameters(), stochastic_rounding=True))
    steps(theirs, AdamW(theirs.parameters()))
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("device", DEVICES)
def test_parameters_that_change_between_steps(device: str) -> None:
    """Other memory, other strides, other moments: views that a step keeps are those of what is there now."""
    torch.manual_seed(0)
    start = torch.randn(64, 64, device=device)
    pair = [nn.Parameter(start.clone()) for _ in range(2)]
    found, wanted = AdamW([pair[0]], lr=0.1), torch.optim.AdamW([pair[1]], lr=0.1)
    changes: list[Callable[[nn.Parameter], Any]] = [
        lambda p: None,
        lambda p: setattr(p, "data", p.data + 1),
        lambda p: setattr(p, "data", p.data.t()),
        lambda p: None,
        lambda p: setattr(p, "data", p.data.contiguous()),
    ]
    for change in (*changes, lambda p: found.load_state_dict(found.state_dict()) if p is pair[0] else None, changes[0]):
        slope = torch.randn(64, 64, device=device)
        for parameter, optimizer in zip(pair, (found, wanted), strict=True):
            change(parameter)
            parameter.grad = slope.clone() if change is not changes[3] else slope.t()
            optimizer.step()
        torch.testing.assert_close(*pair, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_moments_whose_data_is_replaced(device: str) -> None:
    """``state["exp_avg"].data = ...``, by which trainers move moments, leaves the tensor and changes its memory."""
    pair = [nn.Parameter(torch.ones(64, 64, device=device)) for _ in range(2)]
    optimizers = AdamW([pair[0]], lr=0.1), torch.optim.AdamW([pair[1]], lr=0.1)
    for step in range(3):
        for parameter, optimizer in zip(pair, optimizers, strict=True):
            parameter.grad = torch.full_like(parameter, 0.5 - step)
            optimizer.step()
            for name in ("exp_avg", "exp_avg_sq"):
                moment = optimizer.state[parameter][name]
                moment.data = moment.data.clone() * 2
    torch.testing.assert_close(*pair, rtol=1e-5, atol=1e-5)


def test_a_parameter_leaves_its_memory() -> None:
    """A model that is moved between steps frees what it leaves, though its optimizer is alive."""
    parameter = nn.Parameter(torch.ones(64, 1024))
    optimizer = AdamW([parameter], lr=0.1)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    left = parameter.untyped_storage()._weak_ref()
    parameter.data = parameter.data.clone()
    assert torch.UntypedStorage._expired(left)
    torch.UntypedStorage._free_weak_ref(left)


@pytest.mark.parametrize("device", DEVICES)
def test_a_backward_from_before_a_step_raises(device: str) -> None:
    """It would read weights that the step has changed."""
    parameter = nn.Parameter(torch.ones(64, 1024, device=device))
    optimizer = AdamW([parameter], lr=0.1)
    out = torch.ones(1, 64, device=device, requires_grad=True) @ parameter
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_options_that_a_loaded_state_dict_lacks_stay() -> None:
    """PyTorch's AdamW knows no stochastic rounding."""
    parameter = nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
    optimizer = AdamW([parameter], lr=0.1, stochastic_rounding=True)
    optimizer.load_state_dict(torch.optim.AdamW([parameter], lr=0.2).state_dict())
    assert [(group["lr"], group["stochastic_rounding"]) for group in optimizer.param_groups] == [(0.2, True)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("maximize", [False, True])
def test_drawn_parameters(device: str, maximize: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small and large ones, of all dtypes, with views, none, negated gradients, and rates on the device."""
    rng = random.Random(seed := random.randrange(10**6))
    monkeypatch.setattr(optim, "SMALL", rng.choice([0, 100, 100_000, optim.SMALL]))
    dtypes = (torch.float32, torch.float16, torch.bfloat16)
    ours: list[nn.Parameter] = []
    for _ in range(12):
        shape = rng.choice([(), (0,), (1,), (37,), (1024,), (5, 7), (64, 1024), (130, 1024), (3, 4, 5)])
        values = torch.randn(shape, device=device, dtype=rng.choice(dtypes))
        ours.append(nn.Parameter(values.transpose(0, -1) if len(shape) > 1 and rng.random() < 0.3 else values))
    theirs = [nn.Parameter(p.detach().double()) for p in ours]
    options = {"betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1, "maximize": maximize}
    capturable = rng.random() < 0.5
    rate = torch.tensor(1e-2, device=device) if capturable and rng.random() < 0.5 else 1e-2
    one = AdamW(ours, lr=rate, capturable=capturable, **options)
    other = torch.optim.AdamW(theirs, lr=1e-2, **options)
    for _ in range(3):
        for p, q in zip(ours, theirs, strict=True):
            # Squares of small slopes would be lost in float16 moments.
            slope = (torch.rand(p.shape, device=device) + 0.5).to(p.dtype)
            p.grad = None if rng.random() < 0.2 else torch._neg_view(-slope) if rng.random() < 0.2 else slope
            q.grad = None if p.grad is None else slope.double()
        one.step()
        other.step()
    for p, q in zip(ours, theirs, strict=True):
        limit = {torch.float32: 2e-6, torch.float16: 3e-3, torch.bfloat16: 3e-2}[p.dtype]
        torch.testing.assert_close(p.double(), q, rtol=limit, atol=limit, msg=lambda m: f"seed {seed}: {m}")


@pytest.mark.slow
def test_a_step_in_a_compiled_function() -> None:
    """Dynamo leaves it out: traced, it was compiled anew for each number of steps, up to Dynamo's limit."""
    weight = nn.Parameter(torch.ones(3, 4))
    optimizer, compiles = AdamW([weight], lr=0.1, weight_decay=0.0), CompileCounter()

    @torch.compile(backend=compiles)
    def step(x: torch.Tensor) -> torch.Tensor:
        weight.grad = x * 2
        optimizer.step()
        return weight * x

    for count in range(1, 11):
        torch.testing.assert_close(step(torch.ones(3, 4)).detach(), torch.full((3, 4), 1 - 0.1 * count))
    assert compiles.frame_count == 2
