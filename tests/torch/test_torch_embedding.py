"""Embeddings: torch's rows, gradients beside float64, and what every op can do."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import cute_ops_torch
from cute_ops_torch.huggingface.patch import Replaced

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
FLOATS = [torch.float32, torch.float16, torch.bfloat16]
# Tokens, classes, columns: few and many tokens to a class, chunks of one class, unaligned rows, no token, no column.
SIZES = [(300, 33, 257), (700, 5, 96), (40, 4000, 64), (2000, 3, 8), (5, 9, 7), (0, 11, 24), (4, 3, 0)]


def indices(kind: str, tokens: int, classes: int) -> torch.Tensor:
    index = torch.randint(classes, (tokens,))
    if kind == "half":  # of the tokens have one class
        index[torch.rand(tokens) < 0.5] = classes // 3
    elif kind == "edges":
        index[: tokens // 3], index[tokens // 3 : tokens // 2] = 0, classes - 1
    return index


def exact_gradient(dout: torch.Tensor, index: torch.Tensor, classes: int, padding_idx: int) -> tuple[torch.Tensor, ...]:
    """In float64, and the sum of absolute values."""
    kept = index != padding_idx
    rows = dout[kept].double()
    return tuple(rows.new_zeros(classes, rows.shape[1]).index_add_(0, index[kept], r) for r in (rows, rows.abs()))


def assert_rounded_once(got: torch.Tensor, exact: torch.Tensor, size: torch.Tensor) -> None:
    """Within half a unit in the last place, and the error of a float32 sum."""
    unit = torch.finfo(got.dtype).eps / 2
    # Subnormal float16 numbers have the unit of the smallest normal one.
    limit = 1.01 * unit * exact.abs().clamp(min=torch.finfo(got.dtype).tiny) + 4 * torch.finfo(torch.float32).eps * size
    assert ((got.double() - exact).abs() <= limit).all()


@pytest.mark.parametrize("device", DEVICES)
def test_leading_dims_and_strides(device: str) -> None:
    torch.manual_seed(0)
    weight = torch.randn(13, 24, device=device, requires_grad=True)
    wide = torch.randn(4, 5, 3, 48, device=device)
    for index in (torch.tensor(3), torch.randint(13, (4, 5, 3)), torch.randint(13, (3, 5, 4)).transpose(0, 2)):
        index = index.to(device)
        whole = wide[: 1 if index.ndim == 0 else None]
        for dout in (whole[..., :24], whole[..., 1:25], whole[..., ::2], whole[..., :1].expand(*whole.shape[:-1], 24)):
            dout = dout[0, 0, 0] if index.ndim == 0 else dout
            grads = [
                torch.autograd.grad(f(index, weight), weight, dout)[0] for f in (cute_ops_torch.embedding, F.embedding)
            ]
            torch.testing.assert_close(*grads)


@pytest.mark.gpu
def test_tables_beyond_32_bits() -> None:
    """More than 2^31 elements."""
    classes, n = 1_050_000, 2056
    index = torch.cat([torch.randint(classes, (600,)), torch.tensor([classes - 1, 0])]).cuda()
    dout = torch.randn(len(index), n, device="cuda", dtype=torch.bfloat16)
    got = torch.ops.cute.embedding_bwd(index, dout.new_empty((1, n)).expand(classes, n), dout)
    there, place = index.unique(return_inverse=True)
    exact, size = exact_gradient(dout, place, len(there), -1)
    assert_rounded_once(got[there], exact, size)
    assert got.count_nonzero() == got[there].count_nonzero()


@pytest.mark.gpu
def test_the_same_bits_every_time() -> None:
    index = indices("half", 20_000, 700).cuda()
    dout = torch.randn(20_000, 256, device="cuda", dtype=torch.bfloat16)
    weight = torch.empty(700, 256, device="cuda", dtype=torch.bfloat16)
    first = torch.ops.cute.embedding_bwd(index, weight, dout)
    for _ in range(5):
        assert torch.equal(torch.ops.cute.embedding_bwd(index, weight, dout), first)


def test_as_an_op() -> None:
    index, weight = torch.randint(7, (3, 5)), torch.randn(7, 4)
    torch.library.opcheck(torch.ops.cute.embedding.default, (index, weight.requires_grad_(), 2))
    torch.library.opcheck(torch.ops.cute.embedding_bwd.default, (index, weight.detach(), torch.randn(3, 5, 4), 2))


def test_transforms() -> None:
    index, weight = torch.randint(7, (3, 5)), torch.randn(7, 4)

    def loss(function: Any, weight: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return function(index, weight).pow(2).sum()

    for function in (torch.func.grad(loss, 1), torch.vmap(torch.func.grad(loss, 1), (None, None, 0))):
        torch.testing.assert_close(*(function(f, weight, index) for f in (cute_ops_torch.embedding, F.embedding)))
    weights = torch.randn(7, 3, 4)
    for dims in ((0, None), (1, None), (None, 1), (0, 1)):
        table = weight if dims[1] is None else weights
        got, expected = (torch.vmap(f, dims)(index, table) for f in (cute_ops_torch.embedding, F.embedding))
        assert torch.equal(got, expected)
        none = [t if d is None else t.narrow(d, 0, 0) for t, d in zip((index, table), dims, strict=True)]
        assert torch.vmap(cute_ops_torch.embedding, dims)(*none).shape == (0, *expected.shape[1:])
    with pytest.raises(NotImplementedError, match=r"cute\.embedding: forward-mode AD"):
        torch.func.jvp(lambda w: cute_ops_torch.embedding(index, w), (weight,), (weight,))


def test_the_table_may_change_before_its_gradient() -> None:
    """The backward needs its shape, not its values."""
    index, weight = torch.randint(7, (3, 5)), torch.randn(7, 4, requires_grad=True)
    out = cute_ops_torch.embedding(index, weight)
    with torch.no_grad():
        weight.zero_()
    torch.testing.assert_close(*(torch.autograd.grad(o.sum(), weight)[0] for o in (out, F.embedding(index, weight))))


def test_differentiated_once() -> None:
    index, weight = torch.randint(7, (3, 5)), torch.randn(7, 4, requires_grad=True)
    (grad,) = torch.autograd.grad(cute_ops_torch.embedding(index, weight).pow(2).sum(), weight, create_graph=True)
    with pytest.raises(NotImplementedError, match=r"cute\.embedding_bwd: has no gradient .* no double backward"):
        grad.sum().backward()


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_compiled(device: str) -> None:
    torch.manual_seed(0)
    weight = torch.randn(31, 16, device=device, requires_grad=True)
    compiled = torch.compile(lambda i, w: cute_ops_torch.embedding(i, w, 1) * 2, fullgraph=True, dynamic=True)
    for shape in ((3, 5), (2, 9)):
        index = torch.randint(31, shape, device=device)
        grads = []
        for function in (compiled, lambda i, w: F.embedding(i, w, 1) * 2):
            grads += torch.autograd.grad(function(index, weight).sum(), weight)
        torch.testing.assert_close(*grads)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_added_to_another_gradient(device: str, dtype: torch.dtype) -> None:
    """The bits of a sum of both, though only rows of tokens are touched."""
    torch.manual_seed(0)
    for tokens, classes, n in SIZES:
        for kind in ("any", "half", "edges"):
            index, padding_idx = indices(kind, tokens, classes).to(device), int(torch.randint(-1, classes, ()))
            dout, total = (torch.randn(rows, n, device=device).to(dtype) for rows in (tokens, classes))
            expected = total + torch.ops.cute.embedding_bwd(index, total, dout, padding_idx)
            found = torch.ops.cute.add_embedding_gradient(total, index, dout, padding_idx)
            assert torch.equal(found, expected)
            torch.ops.cute.add_embedding_gradient_(total, index, dout, padding_idx)
            assert torch.equal(total, expected)


@pytest.mark.parametrize("device", DEVICES)
def test_a_graph_with_a_tied_head(device: str) -> None:
    """Where tokens are few, no array of zeros is added; the graph's gradients are the program's. Inductor adds in place
    on a GPU; here its pass is enough.
    """
    import torch._inductor.lowering
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor.fx_passes.post_grad import pass_patterns

    import cute_ops_torch.inductor.lowering

    seen: list[int] = []

    def count(graph: torch.fx.Graph) -> None:
        seen.append(len(graph.find_nodes(op="call_function", target=torch.ops.cute.add_embedding_gradient.default)))

    def after_passes(module: torch.fx.GraphModule, inputs: Any) -> Any:
        pass_patterns[0].apply(module)
        module.recompile()
        count(module.graph)
        return make_boxed_func(module.forward)

    def loss(weight: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        hidden = cute_ops_torch.embedding(index, weight, 3).sin()
        return 1.5 * cute_ops_torch.linear_cross_entropy(hidden, weight, index.flip(-1))

    torch.manual_seed(0)
    weight = torch.randn(200, 16, device=device, requires_grad=True)
    backend = "inductor" if device == "cuda" else aot_autograd(fw_compiler=after_passes)
    with torch._inductor.config.patch(post_grad_custom_post_pass=count):
        compiled = torch.compile(loss, fullgraph=True, dynamic=False, backend=backend)
        for tokens in (20, 60):
            index = torch.randint(200, (tokens,), device=device)
            index[:5] = 3
            for factor in (1.0, 2.0):
                runs = (torch.autograd.grad(factor * run(weight, index), weight) for run in (compiled, loss))
                torch.testing.assert_close(*runs)
    assert seen == [0, 1, 0, 0]


def test_a_graph_that_adds_a_multiple() -> None:
    """No sum of two gradients; and cached code of another version of this package is not taken."""
    import cute_ops_torch.inductor.cache_key

    def total(index: torch.Tensor, dout: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]:
        gradient, other = (torch.ops.cute.embedding_bwd(index + k, weight, dout) for k in range(2))
        return [torch.add(weight, gradient, alpha=2), torch.add(other, weight, alpha=0.5)]

    given = torch.tensor([1, 5, 1]), torch.randn(3, 16), torch.randn(200, 16)
    torch.testing.assert_close(torch.compile(total)(*given), total(*given))
    assert cute_ops_torch.inductor.cache_key.package()[:32] in torch.compiler.config.cache_key_tag


def test_arguments_are_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    module, checked = import_module("cute_ops_torch.host.launch"), []
    check = module.bind_tensors
    monkeypatch.setattr(module, "bind_tensors", lambda op, *args: (checked.append(op.name), check(op, *args))[1])
    weight = torch.randn(7, 4, requires_grad=True)
    for _ in range(3):
        out = cute_ops_torch.embedding(torch.randint(7, (3, 5, 2)), weight)
        out.pow(2).sum().backward()
    assert [name for name in checked if name.startswith("embedding")] == ["embedding", "embedding_bwd"]
    with pytest.raises(ValueError, match=r"^cute\.embedding_bwd: argument `dout` has leading dims"):
        torch.ops.cute.embedding_bwd(torch.randint(7, (3, 5)), weight.detach(), torch.randn(5, 3, 4))


def test_autocast_leaves_it_alone() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        out = cute_ops_torch.embedding(torch.tensor([1]), torch.randn(3, 4, requires_grad=True))
    assert out.dtype == torch.float32


def test_errors() -> None:
    index, weight = torch.randint(7, (3, 5)), torch.randn(7, 4)
    for wrong, kind, text in (
        ((index, weight.double()), TypeError, "`weight` has dtype float64"),
        ((index.to("meta"), weight), ValueError, "`weight` is on cpu, but `index` is on meta"),
    ):
        with pytest.raises(kind, match=rf"^cute\.embedding: (argument )?{text}"):
            cute_ops_torch.embedding(*wrong)
    with pytest.raises(IndexError):
        cute_ops_torch.embedding(index + 7, weight)


def test_modules() -> None:
    """Only embeddings that do no more than :func:`embedding` are replaced."""
    torch.manual_seed(0)
    model = nn.ModuleDict({
        "plain": nn.Embedding(11, 8), "padded": nn.Embedding(11, 8, padding_idx=3),
        "max": nn.Embedding(11, 8, max_norm=1.0),
        "frequency": nn.Embedding(11, 8, scale_grad_by_freq=True), "sparse": nn.Embedding(11, 8, sparse=True),
        "wide": nn.Embedding(11, 8, dtype=torch.float64), "bag": nn.EmbeddingBag(11, 8),
    })  # fmt: skip
    index = torch.randint(11, (4, 6))

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        for name in ("plain", "padded"):
            model[name](index).pow(2).sum().backward()
        return [model[name].weight.grad.clone() for name in ("plain", "padded")]

    expected = gradients()
    assert cute_ops_torch.patch(model) == [Replaced("plain", "embedding"), Replaced("padded", "embedding")]
    out = model["plain"](index)
    assert type(out.grad_fn).__name__ == "cute_embeddingBackward"
    with torch.no_grad():
        assert torch.equal(model["plain"](index), out)
    torch.testing.assert_close(gradients(), expected)
    cute_ops_torch.unpatch(model)
    assert type(model["plain"]) is nn.Embedding
