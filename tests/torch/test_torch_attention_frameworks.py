"""Attention in torch's transforms and with the arguments of torch's function."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import cute_ops_torch
from cute_ops.ops.attention.attention import attention
from cute_ops_torch.composite import scaled_dot_product
from cute_ops_torch.library import reference
from tests.torch.test_torch_export import QUICK
from tests.torch.test_torch_fast_path import make  # noqa: F401  a fixture

Tensor = torch.Tensor
ATTRS: dict[str, Any] = {"causal": True, "left": 5}


def drawn(groups: int = 2, queries: int = 9, keys: int = 11, lead: tuple[int, ...] = (2,)) -> list[Tensor]:
    """q, k, v and sinks."""
    draw = torch.Generator().manual_seed(0)
    shapes = (*lead, queries, 2 * groups, 32), (*lead, keys, groups, 32), (*lead, keys, groups, 16), (2 * groups,)
    return [torch.randn(shape, generator=draw).bfloat16().requires_grad_() for shape in shapes]


def loss(*given: Tensor, **attrs: Any) -> Tensor:
    out, lse = cute_ops_torch.attention(*given, **ATTRS | attrs)
    return out.float().sin().sum() + lse.cos().sum()


def assert_close(found: Any, right: Any) -> None:
    torch.testing.assert_close(found, right, rtol=0.02, atol=0.02)


def test_the_kernels_run_on_hopper(make: Any, compiled: Any) -> None:  # noqa: F811
    """In 16 bits, forward and backward, and when a call is known."""
    function, given = make(attention).function, drawn(queries=9, keys=9)
    attrs = {**attention.attrs, **ATTRS}.values()
    for _ in range(2):
        found = function(*given, *attrs)
        assert_close(found, cute_ops_torch.attention(*given, **ATTRS))
        found[0].float().sum().backward()
    assert compiled.calls == 2 * ["attention", "attention_bwd"]
    function(*(x.detach().float() for x in given), *attrs)
    assert len(compiled.calls) == 4  # the framework computes in float32


def test_torch_func() -> None:
    """Gradients, gradients of each example, and what refuses a tangent."""
    given = [x.detach() for x in drawn()]
    leaves = [x.requires_grad_() for x in map(Tensor.clone, given)]
    right = torch.autograd.grad(loss(*leaves), leaves)
    assert_close(torch.func.grad(loss, argnums=(0, 1, 2, 3))(*given), right)
    each = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1, 2)), in_dims=(0, 0, 0, None))(*given)
    assert_close(each, right[:3])
    pull = torch.func.vjp(partial(cute_ops_torch.attention, **ATTRS), *given)[1]
    pulled = pull((torch.ones(2, 9, 4, 16).bfloat16(), torch.ones(2, 4, 9)))
    assert [x.shape for x in pulled] == [x.shape for x in given]
    with pytest.raises(NotImplementedError, match=r"cute\.attention: forward-mode AD"):
        torch.func.jvp(loss, tuple(given), tuple(map(torch.ones_like, given)))


@pytest.mark.parametrize("keeps", [False, True], ids=["again", "kept"])
def test_selective_checkpoints(keeps: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy names the op, whose results are then not computed again."""
    op, run, runs = torch.ops.cute.attention.default, reference.run_reference, list[str]()

    def policy(context: Any, function: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if keeps and function is op else CheckpointPolicy.PREFER_RECOMPUTE

    def counted(binding: Any, *args: Any) -> Any:
        runs.append(binding.op.name)
        return run(binding, *args)

    monkeypatch.setattr(reference, "run_reference", counted)

    given = drawn()
    contexts = partial(create_selective_checkpoint_contexts, policy)
    found = checkpoint(loss, *given, use_reentrant=False, context_fn=contexts)
    grads = torch.autograd.grad(found, given)
    assert runs == ["attention", *([] if keeps else ["attention"]), "attention_bwd"]
    assert_close(grads, torch.autograd.grad(loss(*given), given))


@pytest.mark.slow
def test_a_compiled_step_of_any_length() -> None:
    """Forward and backward in one graph, which serves all lengths and batches."""
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(loss, backend=backend, fullgraph=True, dynamic=True)
    for batch, queries, keys in ((3, 9, 11), (5, 17, 17), (7, 6, 40)):
        given = drawn(queries=queries, keys=keys, lead=(batch,))
        assert_close(torch.autograd.grad(compiled(*given), given), torch.autograd.grad(loss(*given), given))
    assert len(graphs) == 1


@pytest.mark.drawn(0.35, among="packages")
@pytest.mark.slow
def test_an_exported_program_and_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of any batch and length; AOTInductor compiles the op as a call."""
    from torch._inductor import cpu_vec_isa  # late: it takes a second

    monkeypatch.setattr(cpu_vec_isa, "valid_vec_isa_list", list)

    class Attention(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return cute_ops_torch.attention(q, k, v, **ATTRS)[0]

    given = tuple(x.detach() for x in drawn(queries=9, keys=9)[:3])
    batch, length = torch.export.Dim("batch", max=64), torch.export.Dim("length", max=512)
    dims = {0: batch, 1: length}
    exported = torch.export.export(Attention(), given, dynamic_shapes=(dims, dims, dims))
    package = torch._inductor.aoti_compile_and_package(
        exported, package_path=str(tmp_path / "attention.pt2"), inductor_configs=QUICK
    )
    loaded = torch._inductor.aoti_load_package(package)
    for run in (exported.module(), loaded):
        for b, s in ((2, 9), (3, 40)):
            arrays = [x.detach() for x in drawn(queries=s, keys=s, lead=(b,))[:3]]
            assert_close(run(*arrays), Attention()(*arrays))


SDPA = {
    "plain": {}, "causal": {"is_causal": True}, "scale": {"scale": 0.3}, "mask": {"attn_mask": True},
    "bias": {"attn_mask": False},
}  # fmt: skip


@pytest.mark.parametrize("attrs", SDPA.values(), ids=SDPA)
@pytest.mark.parametrize(("queries", "keys"), [(9, 9), (5, 9), (9, 5), (1, 9)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_arguments_of_torch(dtype: torch.dtype, queries: int, keys: int, attrs: dict[str, Any]) -> None:
    """Values and gradients, in 16 bits by our op where that computes the same."""
    draw = torch.Generator().manual_seed(0)
    attrs = dict(attrs)
    if "attn_mask" in attrs:
        seen = torch.rand(queries, keys, generator=draw) < 0.7
        attrs["attn_mask"] = seen if attrs["attn_mask"] else torch.where(seen, 0.5, -9.0).to(dtype)
    for heads, groups in ((4, 4), (4, 2)):
        shapes = (2, heads, queries, 32), (2, groups, keys, 32), (2, groups, keys, 16)
        given = [torch.randn(s, generator=draw).to(dtype).requires_grad_() for s in shapes]
        options = {**attrs, "enable_gqa": heads != groups}
        found, right = (
            f(*given, **options) for f in (cute_ops_torch.scaled_dot_product_attention, F.scaled_dot_product_attention)
        )
        known = queries <= keys or "is_causal" not in attrs
        computed = dtype == torch.bfloat16 and "attn_mask" not in attrs and known
        assert (type(_made_by(found)).__name__ == "cute_attentionBackward") == computed
        assert_close(found, right)
        cotangent = torch.randn(found.shape, generator=draw).to(dtype)
        assert_close(*(torch.autograd.grad(x, given, cotangent) for x in (found, right)))


def test_a_call_like_an_earlier_one_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shapes, dtypes and options are not looked into again; what differs in one of them is."""
    draw, function = torch.Generator().manual_seed(0), cute_ops_torch.scaled_dot_product_attention
    q, k, v = (torch.randn(2, h, 9, 32, generator=draw).bfloat16() for h in (4, 2, 2))
    options = {"is_causal": True, "enable_gqa": True}
    first = function(q, k, v, **options)
    seen: list[Any] = []
    attend = scaled_dot_product.attend
    monkeypatch.setattr(scaled_dot_product, "attend", lambda *args, **more: seen.append(args) or attend(*args, **more))
    assert torch.equal(function(q, k, v, **options), first)
    assert not seen
    by_columns = q.mT.contiguous().mT
    others = [
        (q[:, :, :5], k, v, options), (q, k, v, {**options, "scale": 0.3}), (q, k, v, {"enable_gqa": True}),
        (q.half(), k.half(), v.half(), options), (by_columns, k, v, options),
    ]  # fmt: skip
    for i, (*given, more) in enumerate(others):
        assert_close(function(*given, **more), F.scaled_dot_product_attention(*given, **more))
        assert len(seen) == i + 1
    with torch.autocast("cpu", torch.bfloat16):
        assert function(q.float(), k.float(), v.float(), **options).dtype == torch.bfloat16


def test_gradients_are_summed_in_a_fixed_order_where_torch_is_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a first call and of one that is known."""
    attention, seen = scaled_dot_product._attention, list[Any]()
    monkeypatch.setattr(scaled_dot_product, "_attention", lambda *args: seen.append(args[-1]) or attention(*args))
    q = torch.randn(2, 4, 11, 32).bfloat16()
    try:
        for fixed in (False, True):
            torch.use_deterministic_algorithms(fixed)
            for _ in range(2):
                cute_ops_torch.scaled_dot_product_attention(q, q, q)
    finally:
        torch.use_deterministic_algorithms(False)
    assert seen == [False, False, True, True]


def _made_by(x: Tensor) -> Any:
    node: Any = x.grad_fn
    while "Transpose" in type(node).__name__:
        node = node.next_functions[0][0]
    return node


def test_what_torch_refuses_is_its_own_error() -> None:
    q = torch.zeros(2, 4, 9, 32, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError):
        cute_ops_torch.scaled_dot_product_attention(q, q[:, :3], q[:, :3])
    dropped = cute_ops_torch.scaled_dot_product_attention(q, q, q + 1, dropout_p=0.5)
    assert dropped.unique().numel() > 1
