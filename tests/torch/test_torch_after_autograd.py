"""The pass after autograd: products with their regions in the graphs that Inductor gets, and the measured choice."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._inductor import config
from torch.utils.checkpoint import checkpoint

from cute_ops.composite.qkv_rope import HEADS
from cute_ops_torch import inductor
from cute_ops_torch.inductor import after_autograd, fusion_choice, measured_times
from tests.torch.drawn_programs import Program, compare, enabled, through_autograd, with_graphs_after_autograd

Tensor = torch.Tensor
N = 16


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    with enabled():
        yield


def became(where: str = "") -> list[str]:
    """The expressions that became something of ours, ``t1: expression`` with the number of the product's readers."""
    return sorted(entry.what for entry in inductor.report().replaced if where in entry.where)


def check(function: Callable[..., Any], *tensors: Tensor, dynamic: bool = False, bound: float = 3e-5) -> None:
    """The compiled function has the values and the gradients of the eager one."""
    results = []
    backend = with_graphs_after_autograd(rewritten=True)
    for run in (function, torch.compile(function, backend=backend, fullgraph=True, dynamic=dynamic)):
        given = [each.clone().requires_grad_(each.requires_grad) for each in tensors]
        made = run(*given)
        outputs = made if isinstance(made, tuple) else (made,)
        wanted = [each for each in given if each.requires_grad]
        gradients = torch.autograd.grad(sum(out.float().cos().sum() for out in outputs), wanted) if wanted else ()
        results.append([*outputs, *gradients, *given])
    for got, want in zip(results[1], results[0], strict=True):
        assert (got.dtype, got.shape, got.stride()) == (want.dtype, want.shape, want.stride())
        torch.testing.assert_close(got.float(), want.float(), rtol=bound, atol=bound)


def draw(*shape: int, dtype: torch.dtype = torch.float32, train: bool = True) -> Tensor:
    return (torch.randn(shape) * (N**-0.5 if len(shape) == 2 else 1)).to(dtype).requires_grad_(train)


@pytest.mark.slow
def test_gradients_of_several_products_of_one_input_are_added_by_the_last() -> None:
    check(lambda x, q, k, v: (x @ q).sin() + (x @ k).flip(-1) + (x @ v).cumsum(-1),
          draw(2, 3, N), draw(N, N), draw(N, N), draw(N, N))  # fmt: skip
    (text,) = became("backward")
    assert re.fullmatch(r"e1\(t,t,t\) add \d \d; add \d 3 -> 4", text)


def test_what_the_backward_needs_is_another_output() -> None:
    """GELU's gradient reads the product with its bias, which one kernel writes beside the activation."""
    check(lambda x, w, b: F.gelu(F.linear(x, w, b), approximate="tanh").cumsum(-1),
          draw(2, 3, N), draw(32, N), draw(32))  # fmt: skip
    (forward,) = became("forward")
    assert forward in ("e1(t,r) add 0 1; gelu_tanh 2 -> 2 3", "e1(t,r) add 0 1; gelu_tanh 2 -> 3 2")


def test_an_activations_gradient_follows_a_product_of_the_backward() -> None:
    check(lambda x, w: F.linear(torch.tanh(x.cumsum(-1)), w).sin(), draw(2, 3, N), draw(32, N))
    assert became("backward") == ["e1(t,t) square 1; subtract 1.0 2; multiply 0 3 -> 4"]


@pytest.mark.parametrize("order", ["before", "after"])
def test_a_product_that_others_read_is_an_output(order: str) -> None:
    def function(x: Tensor, w: Tensor, r: Tensor) -> Any:
        y = x @ w
        other = y.flip(-1)
        made = F.silu(y * r) + 1
        return (made, other) if order == "before" else (other, made)

    check(function, draw(3, N, train=False), draw(N, N, train=False), draw(N, train=False))
    (text,) = became()
    assert text == "e1(t,r) multiply 0 1; silu 2; add 3 1.0 -> 4 0"


def test_a_product_whose_other_reader_comes_first_stays() -> None:
    """The epilogue reads a cumulated sum of the product: computing both at once would be a circle."""

    def function(x: Tensor, w: Tensor) -> Tensor:
        y = x @ w
        return F.silu(y) * y.cumsum(-1) + y

    check(function, draw(3, N, train=False), draw(N, N, train=False))
    assert became() == []


def test_a_sum_of_products_that_share_a_row_vector() -> None:
    check(lambda x, w, v, r: F.silu((x @ w) * r) * (x @ v), *(draw(N, N, train=False) for _ in range(3)),
          draw(N, train=False))  # fmt: skip
    assert len(became()) == 1


def test_one_part_after_another() -> None:
    """The second reads what the first has replaced."""
    check(lambda x, w, v, r: (F.silu(x @ w) * (x @ v)) @ w * r + x, *(draw(N, N, train=False) for _ in range(3)),
          draw(N, train=False))  # fmt: skip
    assert len(became()) == 2


def test_inputs_that_are_written_to() -> None:
    def function(x: Tensor, w: Tensor, r: Tensor) -> Tensor:
        y = F.silu(x @ w) * r
        r.add_(1)
        x.mul_(2)
        return y + F.relu(x @ w) * r

    check(function, draw(3, N, train=False), draw(N, N, train=False), draw(N, train=False))


def test_dtypes_of_sixteen_bits() -> None:
    tensors = [draw(2, 3, N, dtype=torch.bfloat16), *(draw(N, N, dtype=torch.bfloat16) for _ in range(2))]
    check(lambda x, w, v: F.silu(x @ w).float().cumsum(-1) + (x @ v).float() * 2, *tensors, bound=0.06)
    assert became()


def test_rows_of_any_number() -> None:
    function = lambda x, w, r: F.gelu(F.linear(x, w) + r) * 2  # noqa: E731
    check(function, draw(5, 3, N), draw(32, N), draw(32), dynamic=True)
    assert became("forward")


def test_autocast() -> None:
    def function(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return F.linear(F.silu(F.linear(x, w)) * 2, v).float() * 0.25

    check(function, draw(2, 3, N), draw(32, N), draw(N, 32), bound=0.06)
    assert became("forward")


def test_checkpoints_are_computed_again() -> None:
    """The backward computes the product and its activation anew."""

    def inner(x: Tensor, w: Tensor, r: Tensor) -> Tensor:
        return F.gelu(F.linear(x, w) * r)

    check(lambda x, w, r: checkpoint(inner, x, w, r, use_reentrant=False).cumsum(-1), draw(2, 3, N), draw(32, N),
          draw(32))  # fmt: skip
    assert became("forward")


def test_checkpoints_with_dropout() -> None:
    """The backward draws the forward's random numbers again, by an operator of which no graph says what it returns."""

    def inner(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        return F.linear(F.dropout(F.gelu(F.linear(x, w)), 0.5, True), v)

    x, w, v = draw(2, 3, N), draw(32, N), draw(N, 32)
    results = []
    for rewritten in (False, True):
        torch._dynamo.reset()
        backend = with_graphs_after_autograd(rewritten)
        run = torch.compile(lambda x, w, v: checkpoint(inner, x, w, v, use_reentrant=False), backend=backend)
        torch.manual_seed(3)
        results.append(torch.autograd.grad(run(x, w, v).cos().sum(), (x, w, v)))
    torch.testing.assert_close(*results)
    assert [entry.what.partition(" ")[0] for entry in inductor.report() if "backward" in entry.where] == ["e1(t,t,t)"]


def test_checkpoints_with_dropout_before_an_add() -> None:
    """The operator returns the random numbers' state and the dropout's results, which are a tuple themselves."""
    config = torch._inductor.config
    own: Any = config.post_grad_custom_pre_pass

    def as_inductor_has_it(graph: torch.fx.Graph) -> None:
        for node in graph.find_nodes(op="call_function", target=torch.ops.higher_order.run_and_save_rng_state):
            node.meta["val"] = tuple(each.meta["val"] for each in node.users)
        own(graph)

    with config.patch(fallback_random=True, post_grad_custom_pre_pass=as_inductor_has_it):
        run = torch.compile(
            lambda x: checkpoint(lambda x: F.dropout(x.sin(), 0.5, True) + x, x, use_reentrant=False),
            backend=with_graphs_after_autograd(True),
        )
        run(draw(2, 3, N)).sum().backward()
    assert "a graph" not in {entry.what for entry in inductor.report()}


class Exported(torch.nn.Module):
    """A norm, a gated MLP, a product with its neighbours, and one that is found after autograd alone."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.RMSNorm(N)
        self.gate, self.up, self.down, self.out = (torch.nn.Linear(N, N, bias=False) for _ in range(4))
        self.head = torch.nn.Linear(N, N)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        x = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return F.gelu(self.head(x)) * 2 + x + torch.baddbmm(x, x, x.transpose(1, 2) @ x)


def test_reports_say_in_which_module_parts_stand() -> None:
    model = torch.nn.Sequential(*(torch.nn.ModuleDict({"block": Exported()})["block"] for _ in range(2)))
    module = torch.export.export(model, (torch.randn(2, 6, N),)).module(check_guards=False)
    torch._inductor.config.pre_grad_custom_pass(module.graph)
    lines = str(inductor.report()).splitlines()
    assert lines[0].startswith("torch.compile: 5 parts replaced")
    assert "    2 x gated_mlp * [2, 6, 16] x, w_gate, w_up, w_down" in lines
    assert "    1 x rmsnorm   *.norm [2, 6, 16]" in lines


@pytest.mark.parametrize(("alpha", "beta"), [(1.0, 1.0), (0.3, -2.0)])
def test_what_follows_a_batch_of_products(alpha: float, beta: float) -> None:
    """The sum of ``baddbmm`` joins what follows it; the products stay torch's."""

    def function(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
        return F.rms_norm(F.gelu(torch.baddbmm(x, y, w, alpha=alpha, beta=beta)), (N,))

    compiled = torch.compile(function, backend=through_autograd, fullgraph=True)
    given = draw(2, 3, N), draw(2, 3, 5), draw(2, 5, N)
    (got, want) = (run(*given) for run in (compiled, function))
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(*(torch.autograd.grad(out.cos().sum(), given) for out in (got, want)))
    assert any("gelu" in text and "mean" in text for text in became())


AHEAD = """
import sys, torch, cute_ops_torch
path, given, wanted = torch.load(sys.argv[1])
loaded = torch._inductor.aoti_load_package(path)
for x, want in zip(given, wanted):
    torch.testing.assert_close(loaded(x), want, rtol=1e-5, atol=1e-5)
"""


def test_parts_do_not_wait_for_products_of_each_other() -> None:
    """Of a gate that is computed again: its value and its gradients read both products, and either may return one."""

    def inner(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)

    check(lambda x, gate, up, down: checkpoint(inner, x.sin(), gate, up, down, use_reentrant=False).cumsum(-1),
          draw(2, 3, N), *(draw(N, N) for _ in range(3)))  # fmt: skip


@pytest.mark.drawn(0.35, among="packages")
@pytest.mark.slow
def test_compiled_ahead_of_time(tmp_path: Path) -> None:
    """Both passes act on an exported program of any number of rows; a process that has found nothing runs the ops."""
    model, given = Exported(), [torch.randn(2, 6, N), torch.randn(5, 6, N)]
    with torch.no_grad():
        program = torch.export.export(
            model, (given[0],), dynamic_shapes=({0: torch.export.Dim("rows", min=2, max=64)},)
        )
        path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2"))
        assert {entry.becomes for entry in inductor.report().replaced} == {"rmsnorm", "gated_mlp", "linear"}
        torch.save((path, given, [model(x) for x in given]), tmp_path / "given.pt")
    command = [sys.executable, "-c", AHEAD, str(tmp_path / "given.pt")]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("heads", "of_keys"), [(4, 2), (HEADS - 8, 8)], ids=["heads", "default-heads"])
def test_gradients_of_queries_keys_and_values_are_not_joined_by_a_copy(
    monkeypatch: pytest.MonkeyPatch, heads: int, of_keys: int
) -> None:
    graphs: list[torch.fx.Graph] = []

    class Attention(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v = (
                torch.nn.Linear(N, n, bias=False) for n in (64 * heads, 64 * of_keys, 64 * of_keys)
            )

        def forward(self, x: Tensor, angles: Tensor) -> Tensor:
            angles = torch.cat((angles, angles), -1)[:, None]
            cos, sin = angles.cos(), angles.sin()
            q, k, v = (f(x).unflatten(-1, (-1, 64)).transpose(1, 2) for f in (self.q, self.k, self.v))
            q, k = (t * cos + torch.cat((-t[..., 32:], t[..., :32]), -1) * sin for t in (q, k))
            return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    def both(module: torch.fx.GraphModule, inputs: Any) -> Any:
        config.pre_grad_custom_pass(module.graph)
        module.recompile()
        return with_graphs_after_autograd(True)(module, inputs)

    take_apart = after_autograd.take_apart
    monkeypatch.setattr(after_autograd, "take_apart", lambda graph: (graphs.append(graph), take_apart(graph))[1])
    model, x = Attention(), torch.randn(2, 6, N, requires_grad=True)
    angles = torch.randn(1, 6, 32)
    wanted = [x, *model.parameters()]
    results = []
    for run in (model, torch.compile(model, backend=both, fullgraph=True)):
        results.append(torch.autograd.grad(run(x, angles).sin().sum(), wanted))
    torch.testing.assert_close(results[1], results[0], rtol=3e-5, atol=3e-5)
    called = [str(node.target) for graph in graphs for node in graph.nodes]
    assert "cute.rope_bwd_joined.default" in called
    assert "cute.qkv_rope_64_bwd.default" not in called


@pytest.mark.parametrize("seed", range(4000, 4003))
def test_drawn_programs_that_are_exported(seed: int) -> None:
    """The pass before autograd reads ATen's operators as it reads torch's functions; ops come by their recipes."""
    from torch._inductor.virtualized import V

    program = Program(seed, 9)
    given = [each.detach() for each in program.inputs()]

    class Module(torch.nn.Module):
        def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
            return program(*tensors)

    with torch.no_grad(), V.set_aot_compilation(True):
        module = torch.export.export(Module(), tuple(given)).module(check_guards=False)
        results = []
        for rewritten in (False, True):
            if rewritten:
                torch._inductor.config.pre_grad_custom_pass(module.graph)
                module.recompile()
            torch.manual_seed(seed)
            results.append(module(*given))
    assert not [entry for entry in inductor.report() if entry.what == "a graph"]
    bound = 0.2 if "narrow" in program.steps else 3e-5
    torch.testing.assert_close(results[1], results[0], rtol=bound, atol=bound)


def test_recipes_that_make_no_op_are_refused() -> None:
    import cute_ops_torch.composite.recipes  # noqa: F401 (as a process that loads a package)

    for recipe in ("linear(", "eval('1')", "linear(1)", "[]"):
        with pytest.raises(ValueError, match=re.escape(f"cute.by_recipe: {recipe!r} makes no op")):
            torch.ops.cute.by_recipe(recipe, [])


def test_other_processes_find_ops_of_graphs_by_their_place() -> None:
    """To measure configs of their kernels, and to build what was recorded: packed halves and all steps included."""
    from cute_ops.calls import lookup
    from cute_ops_torch.composite import recipes

    made = recipes.linear("e1(2t,2r) add 0[n:] 1[n:]; add 0[:n] 1[:n]; gelu 3; multiply 2 4 -> 5", ("2n",), "2n k")
    for op in (made, recipes.fused("e1(t) exp 0 -> 1", {"x": "*m n"})):
        place = lookup.place(op)
        assert place is not None
        del vars(recipes)[place.partition(":")[2]]
        recipes.op_by.cache_clear()
        assert lookup.find(place).name == op.name
    with pytest.raises(
        AttributeError, match=r"module 'cute_ops_torch.composite.recipes' has no attribute 'linear_by_x'"
    ):
        recipes.linear_by_x  # noqa: B018


def test_products_that_are_not_of_rows_stay() -> None:
    """The gradient of a weight, whose left operand is transposed."""
    check(lambda x, w: (x.t() @ w) * 2 + 1, draw(N, 4, train=False), draw(N, 8, train=False))
    assert became() == []


@pytest.mark.drawn(0.5)
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3000, 3004))
def test_drawn_programs(seed: int) -> None:
    """With random numbers, in-place writes and views, beside the graphs as they are."""
    compare(
        Program(seed, 9), with_graphs_after_autograd(True), seed % 3 == 0 or None, with_graphs_after_autograd(False)
    )


# The measured choice


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[float]:
    """What timing says, in order: of our form, and of Inductor's."""
    said: list[float] = []
    monkeypatch.setattr(fusion_choice, "DEVICES", {"cuda", "cpu"})
    monkeypatch.setattr(fusion_choice, "_known", {})
    monkeypatch.setattr(fusion_choice, "_milliseconds", lambda form, values: said.pop(0))
    monkeypatch.setenv("CUTE_OPS_CACHE_DIR", str(tmp_path))
    return said


def one_product(x: Tensor, w: Tensor, r: Tensor) -> Tensor:
    return F.silu(x @ w) * r + 1


def rows(x: Tensor, w: Tensor, r: Tensor) -> Tensor:
    return torch.softmax(x * 2, -1) * r


TENSORS = (torch.randn(3, N), torch.randn(N, N), torch.randn(N))


@pytest.mark.parametrize("function", [one_product, rows])
@pytest.mark.parametrize("how", ["max-autotune", "CUTE_OPS_TUNE"])
def test_the_faster_form_is_taken_and_kept(
    function: Callable[..., Any], how: str, times: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    if how == "CUTE_OPS_TUNE":
        monkeypatch.setenv("CUTE_OPS_TUNE", "1")
    with config.patch(max_autotune=how == "max-autotune"):
        times += [1.0, 2.0]
        check(function, *TENSORS)
        assert times == []
        (entry,) = inductor.report().replaced
        assert entry.gain == pytest.approx(1000)
        monkeypatch.setattr(fusion_choice, "_known", {})  # as in another process
        inductor.enable(devices=("cpu",))
        torch._dynamo.reset()
        check(function, *TENSORS)
        assert len(inductor.report().replaced) == 1


@pytest.mark.parametrize("function", [one_product, rows])
def test_the_slower_form_is_not_taken(function: Callable[..., Any], times: list[float]) -> None:
    times += [2.0, 1.99]
    with config.patch(max_autotune=True):
        check(function, *TENSORS)
    assert became() == []
    assert "1.99e+03 us were measured, 2e+03 of our kernel" in {entry.why for entry in inductor.report()}


def test_products_stay_on_a_gpu_unless_both_forms_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(after_autograd, "target_of", lambda device: "sm_90a")
    check(one_product, *TENSORS)
    assert became() == []
    assert {entry.why for entry in inductor.report()} == {after_autograd._STAYS}


def test_rows_stay_unless_both_forms_are_timed() -> None:
    check(rows, *TENSORS)
    assert became() == []


@pytest.mark.slow
def test_both_forms_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Compiled and timed as they are, by Inductor on a CPU."""
    monkeypatch.setattr(fusion_choice, "DEVICES", {"cuda", "cpu"})
    monkeypatch.setattr(fusion_choice, "_known", {})
    monkeypatch.setenv("CUTE_OPS_CACHE_DIR", str(tmp_path))
    with config.patch(max_autotune=True):
        check(one_product, *TENSORS)
    ((ours, theirs),) = fusion_choice._known.values()
    assert ours > 0
    assert theirs > 0


def test_what_is_kept_and_cannot_be_read_is_measured_again(times: list[float], tmp_path: Path) -> None:
    measured_times.keep("key", (1.0, 2.0))
    assert measured_times.recall("key") == (1.0, 2.0)
    (tmp_path / "choices" / "key.json").write_text('{"ours_ms": "fast"}')
    assert measured_times.recall("key") is None
    assert measured_times.recall("other") is None


# Fresh processes but for the imports, which take longer than the program.
PROGRAM = """
import os, sys, torch, torch._inductor.compile_fx, cute_ops_torch
from torch._dynamo.utils import counters
from cute_ops.composite.qkv_rope import HEADS
from cute_ops_torch import inductor

def function(x, w, v, r):
    y = torch.tanh(x @ w) * r
    return (y.cumsum(-1) @ v).sin()

for run in range(2):
    if child := os.fork():
        if os.waitpid(child, 0)[1]:
            sys.exit(f"process {run} failed")
        continue
    torch.manual_seed(0)
    given = [torch.randn(*shape).requires_grad_() for shape in ((6, 16), (16, 16), (16, 16), (16,))]
    with inductor.enable(devices=("cpu",), ops=["linear"]):
        torch._inductor.config.pre_grad_custom_pass = None
        out = torch.compile(function)(*given)
        got = torch.autograd.grad(out.sum(), given)
    want = torch.autograd.grad(function(*given).sum(), given)
    torch.testing.assert_close(got, want)
    hits = counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"]
    print(inductor.replaced["linear"], hits > 0, flush=True)
    os._exit(0)
"""


@pytest.mark.drawn(0.35, among="second processes")
@pytest.mark.slow
def test_a_second_process_makes_what_the_first_has_found(tmp_path: Path) -> None:
    """Its graphs come from Inductor's cache, so the pass does not run there."""
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "TORCHINDUCTOR_AUTOGRAD_CACHE": "1"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["1", "False", "0", "True"]
