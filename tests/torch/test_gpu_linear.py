"""The products of a linear layer on a GPU, every config forced: exact where sums are exact, else within tolerance.

Tests go from one tile and one step to everything at once, so that the first one to fail says most.
"""

from __future__ import annotations

import math
import os
import random
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product as every_pair
from typing import Any

import pytest
import torch

import cute_ops_torch
from cute_ops import Array, Op, testing
from cute_ops.composite.linear_add_rmsnorm import linear_add_rmsnorm
from cute_ops.composite.qkv_rope import qkv_rope
from cute_ops.composite.rmsnorm_linear import rmsnorm_linear
from cute_ops.declaration.binding import Binding, bind
from cute_ops.hardware import sm
from cute_ops.jit import cache, target
from cute_ops.jit.layout import Memory
from cute_ops.jit.plan import Plan, plan
from cute_ops.kernels.gemm.config import GemmConfig
from cute_ops.ops import PRODUCTS as NAMED
from cute_ops.ops.gemm import config as gemm_config
from cute_ops.ops.gemm import in_parts, transposed
from cute_ops.ops.gemm.accumulate import linear_dweight_add
from cute_ops.ops.gemm.config import CLUSTERS, TILES, EpilogueCost, GemmSize, configs, without_tma
from cute_ops.ops.gemm.linear import HALVES, PRODUCTS, linear, linear_dweight, linear_dx, linear_float32
from cute_ops.tools import gradient
from cute_ops_torch.composite import products
from cute_ops_torch.host.launch import planned_call
from cute_ops_torch.library.tensors import DTYPES, bind_tensors, memory
from tests.ops.epilogues import BY_NAME as EPILOGUES
from tests.ops.epilogues import DIFFERENTIABLE, SMOOTH, columns

# What gradients are made of besides the products of a linear layer.
STEPS = {step.name: step for op in DIFFERENTIABLE for step in (*op.steps, *([op.saving] if op.saving else []))}.values()

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
SECONDS = 20.0  # after which a kernel hangs
# Without clusters first.
CONFIGS = sorted(configs("sm_90a", 132), key=lambda config: config.cluster_m * config.cluster_n)
INTEGERS = 4  # the largest: sums of up to 2^19 products of these are exact in float32


@pytest.fixture(scope="module")
def with_tma() -> None:
    """Most kernels, compiled side by side: one after the other they take minutes."""
    if sm(target.of_device().arch) != 90:
        pytest.skip("the kernel runs on SM 9.0 alone")
    wanted = [(linear, config, 64, "bfloat16") for config in CONFIGS]
    wanted += [(op, config, 64, dtype) for op in PRODUCTS for config in FEW for dtype in HALVES]
    wanted += [(op, config, 65, "bfloat16") for op in (linear, linear_float32) for config in FEW]
    variants = []
    for op, config, n, dtype in wanted:
        shapes = {name: t.of({"m": (64,), "n": n, "k": 64}) for name, t in op.inputs.items()}
        binding = bind(op, {name: Array(shape, dtype) for name, shape in shapes.items()})
        variants.append(planned(binding, {}, config).variant)
    for built in cache.build_all(variants):
        assert built.error is None, built.error


def by_kernel(op: Op) -> Callable[..., Any]:
    """The public function, which may not take the framework's product instead."""
    return partial(cute_ops_torch.register(op), **({"fused": "always"} if op.fallback else {}))


def name(config: GemmConfig) -> str:
    return f"{config.form}-{config.tile_m}x{config.tile_n}-cluster{config.cluster_m}x{config.cluster_n}"


every_product = pytest.mark.parametrize("product", PRODUCTS, ids=lambda op: op.name)
# Both forms, with and without clusters.
FEW = [
    next(config for config in CONFIGS if name(config) == wanted)
    for wanted in (
        "cooperative-128x256-cluster2x1", "cooperative-256x128-cluster1x2", "pingpong-128x160-cluster2x1",
        "pingpong-64x64-cluster1x1",
    )
]  # fmt: skip


def on_hopper(configs: list[GemmConfig]) -> Callable[[Any], Any]:
    """A test for each of these configs, on a GPU that has TMA."""

    def decorate(test: Any) -> Any:
        return pytest.mark.usefixtures("with_tma")(pytest.mark.parametrize("config", configs, ids=name)(test))

    return decorate


every_config, few_configs = on_hopper(CONFIGS), on_hopper(FEW)


def operands(op: Op, m: int, n: int, k: int, dtype: torch.dtype = torch.bfloat16, exact: bool = True) -> list[Any]:
    """Random inputs of a product with ``m`` rows of x and ``n`` rows of weight, each of ``k`` elements."""
    generator = torch.Generator(DEVICE).manual_seed(m + 7 * n + 49 * k)
    sizes = {"m": (m,), "n": n, "k": k}

    def one(shape: tuple[int, ...]) -> torch.Tensor:
        if exact:
            values = torch.randint(-INTEGERS, INTEGERS + 1, shape, generator=generator, device=DEVICE).to(dtype)
        else:
            values = torch.randn(shape, generator=generator, device=DEVICE, dtype=torch.float32).to(dtype)
        return values

    return [one(tensor.of(sizes)) for tensor in op.inputs.values()]


def expected(op: Op, tensors: list[torch.Tensor]) -> torch.Tensor:
    """In float64."""
    first, second = (t.double().flatten(0, -2) for t in tensors)
    if op is linear_dweight:
        return first.T @ second
    return (first @ (second if op is linear_dx else second.T)).unflatten(0, tensors[0].shape[:-1])


def rounded(op: Op, tensors: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """In float64, and by how much a sum in float32 that is rounded once may miss that."""
    exact, terms = expected(op, tensors), expected(op, [t.abs() for t in tensors])
    return exact, terms.mul_(2.0**-18).add_(exact.abs(), alpha=0.0 if op is linear_float32 else 2.0**-8)


def filling(op: Op, tensors: list[torch.Tensor], config: GemmConfig) -> tuple[Callable[[], torch.Tensor], str]:
    """A call with this config into an output of NaN, and its description."""
    binding = bind_tensors(op, tensors, [*op.attrs.values()])
    chosen = planned(binding, memory(op, tensors), config)
    made = binding.outputs[next(iter(op.outputs))]
    assert made is not None
    fill = planned_call(binding, chosen, torch.device(DEVICE)).fill(tuple(op.outputs))
    what = f"{op.name} {name(config)} {dict(chosen.variant.config)}: {dict(binding.dims)}"

    def call() -> torch.Tensor:
        out = torch.full(made.shape, torch.nan, dtype=DTYPES[made.dtype], device=DEVICE)
        fill(*tensors, out)
        finish(what)
        return out

    return call, what


def planned(binding: Binding, places: Mapping[str, Memory], config: GemmConfig) -> Plan:
    """With this config, as it is for the op's output and for this GPU."""
    where, itemsize = target.of_device(), 4 if binding.op in (linear_float32, linear_float32.batched) else 2
    if config.form == "mma_sync" or config.transposed or config.parts > 1:
        return plan(binding, places, where, config=config.flat())
    fitting = next(c for c in configs(where.arch, where.sm_count, EpilogueCost((itemsize,))) if name(c) == name(config))
    return plan(binding, places, where, config=fitting.flat())


def finish(what: str) -> None:
    """Wait for the GPU. One that hangs cannot be stopped from Python: the program ends and says what ran."""
    event = torch.cuda.Event()
    event.record()
    deadline = time.monotonic() + SECONDS
    while not event.query():
        if time.monotonic() > deadline:
            print(f"\nHANGS: {what}", file=sys.__stderr__, flush=True)
            os._exit(3)
        time.sleep(1e-4)


def compare(got: torch.Tensor, exact: torch.Tensor, allowed: Any, config: GemmConfig, what: str) -> None:
    """Say where a result is wrong: elements, tiles, and the worst one."""
    wide = got.double()
    wrong = ~((wide - exact).abs() <= allowed)
    if not wrong.any():
        return
    rows, columns = (d.flatten() for d in wrong.flatten(0, -2).nonzero().unbind(1))
    error = torch.where(wrong, (wide - exact).abs().nan_to_num(math.inf), -1.0).flatten(0, -2)
    at = divmod(int(error.argmax()), error.shape[1])
    tiles = sorted(set(zip((rows // config.tile_m).tolist(), (columns // config.tile_n).tolist(), strict=True)))
    pytest.fail(
        f"{what}\n  {len(rows)} of {got.numel()} elements are wrong, {int(got.isnan().sum())} are NaN\n"
        f"  rows {int(rows.min())} to {int(rows.max())}, columns {int(columns.min())} to {int(columns.max())}\n"
        f"  in {len(tiles)} tiles of {config.tile_m}x{config.tile_n}: {tiles[:8]}\n"
        f"  in a tile, rows {sorted(set((rows % config.tile_m).tolist()))[:16]}, "
        f"columns {sorted(set((columns % config.tile_n).tolist()))[:16]}\n"
        f"  worst at {at}: got {wide.flatten(0, -2)[at].item():.8g}, expected {exact.flatten(0, -2)[at].item():.8g}",
        pytrace=False,
    )


def check(op: Op, sizes: tuple[int, int, int], config: GemmConfig, dtype: torch.dtype = torch.bfloat16) -> None:
    """Integers, whose sums are exact."""
    tensors = operands(op, *sizes, dtype)
    call, what = filling(op, tensors, config)
    exact = expected(op, tensors)
    got = call()
    compare(got, exact.to(got.dtype).double(), 0.0, config, f"{what} {dtype}")


@every_config
@pytest.mark.parametrize("steps", [1, 2, 9])
def test_one_tile(config: GemmConfig, steps: int) -> None:
    check(linear, (config.tile_m, config.tile_n, 64 * steps), config)


@every_config
@pytest.mark.parametrize("k", [8, 256])
def test_many_tiles(config: GemmConfig, k: int) -> None:
    """With few terms stores are still in flight when their slots' turn comes again."""
    check(linear, (2048 + 64, 4096 + 64, k), config)


@every_product
@few_configs
def test_every_layout(product: Op, config: GemmConfig) -> None:
    check(product, (1024, 768, 512), config)


@pytest.mark.parametrize("product", [linear, linear_dx, linear_float32], ids=lambda op: op.name)
def test_transposed_tiles(product: Op) -> None:
    """Drawn configs, each with one tile and with several of which some are past the end along each dim."""
    where, seed = target.of_device(), secrets.randbelow(1 << 30)
    if sm(where.arch) != 90:
        pytest.skip("the kernel runs on SM 9.0 alone")
    rng, itemsize = random.Random(seed), 4 if product is linear_float32 else 2
    cost = EpilogueCost((itemsize,), blocks=64 if product is linear_dx else 8, transposes=True)
    for config in rng.sample(transposed.configs(where.arch, where.sm_count, cost), 6):
        (tile_m, tile_n), k = config.tile, 8 * rng.randint(1, 500)
        for m, n in ((tile_m, tile_n), (rng.randint(1, 4 * tile_m), 8 * rng.randint(1, 1000))):
            print(f"seed {seed}: {m, n, k}, {config}")
            check(product, (m, k, n) if product is linear_dx else (m, n, k), config)


@pytest.mark.parametrize("product", PRODUCTS, ids=lambda op: op.name)
def test_terms_in_parts(product: Op) -> None:
    """The configs of one, two and three waves of drawn sizes, of which tiles and parts are past the end."""
    where, seed = target.of_device(), secrets.randbelow(1 << 30)
    if sm(where.arch) != 90:
        pytest.skip("the kernel runs on SM 9.0 alone")
    rng = random.Random(seed)
    cost = EpilogueCost(blocks=8 if product in (linear, linear_float32) else 64, parts=True)
    for _ in range(3):
        m, n, k = rng.randint(65, 2048), 8 * rng.randint(8, 256), 8 * rng.randint(512, 4096)
        dims = {linear_dx: (m, k, n), linear_dweight: (k, 8 * (m // 8), n)}.get(product, (m, n, k))
        found = list(in_parts.configs(GemmSize(m, n, k), cost, where.arch, where.sm_count))
        assert found, f"seed {seed}: {m, n, k}"
        for config in found:
            print(f"seed {seed}: {dims}, {config}")
            check(product, dims, config)


SIZES = [
    (1, 8, 8), (1, 1, 8), (3, 5, 16), (17, 33, 72), (127, 129, 136), (129, 127, 1000), (255, 1001, 8), (513, 1023, 520),
    (1000, 50257, 64), (4099, 77, 256), (8192, 8, 64), (1, 4096, 4096), (2, 28672, 64), (333, 512, 8192),
]  # fmt: skip


@few_configs
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("product", [linear, linear_float32], ids=lambda op: op.name)
def test_odd_sizes(product: Op, sizes: tuple[int, int, int], config: GemmConfig) -> None:
    check(product, sizes, config)


@few_configs
@pytest.mark.parametrize("product", [linear_dx, linear_dweight], ids=lambda op: op.name)
@pytest.mark.parametrize("sizes", [(1, 8, 8), (77, 72, 136), (513, 1024, 520), (5000, 264, 104)], ids=str)
def test_odd_rows_of_gradients(product: Op, sizes: tuple[int, int, int], config: GemmConfig) -> None:
    check(product, sizes, config)


@every_product
@few_configs
def test_float16(product: Op, config: GemmConfig) -> None:
    check(product, (300, 520, 264), config, torch.float16)


@few_configs
def test_rows_with_a_stride(config: GemmConfig) -> None:
    x, weight = operands(linear, 300, 200, 136)
    tensors = [torch.cat([torch.full_like(t, torch.nan), t], 1)[:, t.shape[1] :] for t in (x, weight)]
    call, what = filling(linear, tensors, config)
    compare(call(), expected(linear, tensors).bfloat16().double(), 0.0, config, what)


def test_expanded_rows() -> None:
    """Strides of zero, which TMA does not take of every dim."""
    x, weight = operands(linear, 300, 200, 136)
    for tensors in ((x[:1].expand(300, 136), weight), (x, weight[:1].expand(200, 136))):
        got = by_kernel(linear)(*tensors)
        finish("expanded rows")
        compare(got, expected(linear, tensors).bfloat16().double(), 0.0, without_tma(1, 1), "expanded rows")


@few_configs
def test_leading_dims(config: GemmConfig) -> None:
    x, weight = operands(linear, 6 * 50, 200, 136)
    tensors = [x.unflatten(0, (2, 3, 50)), weight]
    call, what = filling(linear, tensors, config)
    compare(call(), expected(linear, tensors).bfloat16().double(), 0.0, config, what)


@pytest.mark.parametrize("m", [1, 2, 3, 4, 7, 8, 15, 16, 17, 31, 32, 33, 48, 63, 64])
def test_few_rows(m: int) -> None:
    """Through the public functions, exact: integers, of which all parts' sums are exact."""
    for n, k in ((8, 8), (1, 64), (77, 136), (1001, 1000), (4096, 4096), (2048, 8192), (28672, 512)):
        for op in (linear, linear_float32, linear_dx):
            if op is linear_dx and n % 8:  # TMA does not take dout
                continue
            tensors = operands(op, m, n, k)
            got = by_kernel(op)(*tensors)
            finish(f"{op.name} {m}x{n}x{k}")
            assert torch.equal(got, expected(op, tensors).to(got.dtype)), f"{op.name} {m}x{n}x{k}"
            assert torch.equal(by_kernel(op)(*tensors), got)


@pytest.mark.parametrize("m", [1, 2, 5, 8, 9, 16, 17, 32, 33])
def test_few_rows_off_vectors(m: int) -> None:
    """Exact; NaN in a row of each operand stays there, and between rows that lie apart."""
    for n, k in ((1, 1), (77, 135), (1001, 1001), (28672, 511)):
        for op, apart, shift in ((linear, 0, 0), (linear, 3, 1), (linear_float32, 0, 0)):
            tensors = []
            for t in operands(op, m, n, k):
                t[-1] = torch.nan
                whole = torch.full((t.shape[0], k + apart + shift), torch.nan, device=DEVICE, dtype=t.dtype)
                tensors.append(whole[:, shift : shift + k].copy_(t))
            got = by_kernel(op)(*tensors)
            finish(f"{op.name} {m}x{n}x{k}, {apart} apart, from {shift}")
            exact, what = expected(op, tensors).to(got.dtype), f"{op.name} {m}x{n}x{k}, {apart} apart, from {shift}"
            torch.testing.assert_close(got, exact, rtol=0, atol=0, equal_nan=True, msg=what)
            assert torch.equal(by_kernel(op)(*tensors).nan_to_num(-1.0), got.nan_to_num(-1.0)), what


@pytest.mark.parametrize("product", [op for op in DIFFERENTIABLE if op.fallback], ids=lambda op: op.name)
@pytest.mark.parametrize("m", [1, 5, 64])
def test_epilogues_of_few_rows(product: Op, m: int) -> None:
    """As the framework's product and a pass."""
    for n, k in ((136, 1024), (129, 72), (129, 73)):
        sizes = {"m": (m,), "n": columns(product, n), "k": k}
        given = [torch.randn(t.of(sizes), device=DEVICE).bfloat16() for t in product.inputs.values()]
        given[1] /= k**0.5
        function = cute_ops_torch.register(product)
        outputs = [function(*given, fused=fused) for fused in ("always", "never")]
        for got, wanted in zip(*(out if isinstance(out, tuple) else (out,) for out in outputs), strict=True):
            torch.testing.assert_close(got, wanted, rtol=0.03, atol=0.03 * max(1.0, wanted.abs().max().item()))


def batch(op: Op, lead: tuple[int, ...], m: int, n: int, k: int) -> list[torch.Tensor]:
    """Integers for the op of a batch: rows of the first operand and its matrices lie apart."""
    assert op.batched is not None
    generator, sizes = torch.Generator(DEVICE).manual_seed(m + n + k), {"b": lead, "m": m, "n": n, "k": k}
    first, second = (
        torch.randint(-INTEGERS, INTEGERS + 1, t.of(sizes), generator=generator, device=DEVICE).bfloat16()
        for t in op.batched.inputs.values()
    )
    wide = torch.full((*first.shape[:-2], first.shape[-2] + 3, first.shape[-1] + 8), torch.nan).to(first)
    wide[..., 3:, 8:] = first
    return [wide[..., 3:, 8:], second]


def expected_of_batch(op: Op, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    a, b = first.double(), second.double()
    return a.mT @ b if op is linear_dweight else a @ (b if op is linear_dx else b.mT)


@every_product
@few_configs
@pytest.mark.parametrize("sizes", [(1, 8, 8), (64, 136, 72), (300, 520, 264)], ids=str)
def test_a_batch(product: Op, config: GemmConfig, sizes: tuple[int, int, int]) -> None:
    assert product.batched is not None
    for lead in ((7,), (2, 3)):
        tensors = batch(product, lead, *sizes)
        if len(lead) == 2:  # whose matrices no single stride steps over
            tensors = [tensors[0].transpose(0, 1), tensors[1].transpose(0, 1).contiguous()]
        call, what = filling(product.batched, tensors, config)
        got = call()
        compare(got, expected_of_batch(product, *tensors).to(got.dtype).double(), 0.0, config, what)


@pytest.mark.parametrize("sizes", [(130, 136, 72), (5, 33, 17)], ids=str)
def test_weights_of_a_batch_with_one_x(sizes: tuple[int, int, int]) -> None:
    """TMA steps from matrix to matrix of x by a stride of 0."""
    x, weight = batch(linear, (5,), *sizes)
    got = torch.vmap(by_kernel(linear), (None, 0))(x[0], weight)
    finish("a batch with one x")
    assert torch.equal(got, expected_of_batch(linear, x[:1], weight).bfloat16())


@pytest.mark.parametrize("product", DIFFERENTIABLE, ids=lambda op: op.name)
@pytest.mark.parametrize("fused", ["always", "never"])
def test_gradients_of_a_batch(product: Op, fused: str) -> None:
    """As of each example."""
    function, dims = cute_ops_torch.register(product), {"m": (2, 60), "n": columns(product, 136), "k": 72}
    generator = torch.Generator(DEVICE).manual_seed(0)
    stacked = [
        torch.randn((3, *t.of(dims)), generator=generator, device=DEVICE).to(torch.bfloat16).requires_grad_()
        for t in product.inputs.values()
    ]

    def run(*tensors: torch.Tensor) -> Any:
        return function(*tensors, fused=fused)

    def gradients(outputs: Any) -> Any:
        each = outputs if isinstance(outputs, tuple) else (outputs,)
        return torch.autograd.grad([out.float().square().sum() for out in each], stacked)

    whole = gradients(torch.vmap(run)(*stacked))
    one_by_one = [run(*(t[i] for t in stacked)) for i in range(3)]
    joined = gradients(tuple(out for one in one_by_one for out in (one if isinstance(one, tuple) else (one,))))
    for got, wanted in zip(whole, joined, strict=True):
        torch.testing.assert_close(got, wanted, rtol=0.02, atol=0.02 * wanted.abs().max().item())


@every_product
@pytest.mark.parametrize(
    "sizes",
    [
        (128, 128, 32),
        (128, 128, 320),
        (1, 1, 1),
        (3, 5, 7),
        (256, 512, 1024),
        (127, 129, 131),
        (129, 127, 1001),
        (513, 1023, 522),
        (1000, 50257, 63),
        (4099, 77, 254),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_without_tma(product: Op, sizes: tuple[int, int, int], dtype: torch.dtype) -> None:
    tensors = operands(product, *sizes, dtype)
    if dtype is torch.float16:  # sums that it holds
        tensors = [t.clamp(-1, 1) for t in tensors]
    config = without_tma(*(math.gcd(8, t.shape[-1]) for t in tensors))
    call, what = filling(product, tensors, config)
    got = call()
    compare(got, expected(product, tensors).to(got.dtype).double(), 0.0, config, f"{what} {dtype}")
    assert torch.equal(got, call())


def test_slices_off_16_bytes() -> None:
    x, weight = operands(linear, 300, 200, 136)
    wide = [torch.cat([torch.full_like(t, torch.nan), t], 1) for t in (x, weight)]
    for shift in (1, 2, 4):
        tensors = [t[:, t.shape[1] // 2 :][:, shift : shift + 100] for t in wide]
        got = by_kernel(linear)(*tensors)
        finish(f"slices shifted by {shift}")
        compare(got, expected(linear, tensors).bfloat16().double(), 0.0, without_tma(1, 1), f"shifted by {shift}")


@every_config
def test_normal_numbers_in_any_order_of_calls(config: GemmConfig) -> None:
    """Products of several sizes back to back, without waiting: what one leaves in flight must not reach the next."""
    sizes = [(1024, 2048, 64), (129, 4096, 2048), (4096, 1024, 128), (64, 512, 4096)]
    given = [operands(linear, *s, exact=False) for s in sizes]
    calls = [filling(linear, tensors, config) for tensors in given]
    first = [call() for call, _ in calls]
    for out, tensors, (_, what) in zip(first, given, calls, strict=True):
        compare(out, *rounded(linear, tensors), config, what)
    for _ in range(5):
        for out, (call, what) in zip(first, calls, strict=True):
            again = call()
            assert torch.equal(out.view(torch.int16), again.view(torch.int16)), f"{what}: differs from call to call"


@few_configs
def test_rows_do_not_depend_on_others(config: GemmConfig) -> None:
    x, weight = operands(linear, 1000, 512, 1024, exact=False)
    call, _ = filling(linear, [x, weight], config)
    whole = call()
    for rows in (slice(0, 1), slice(137, 400)):
        part, what = filling(linear, [x[rows].clone(), weight], config)
        assert torch.equal(part(), whole[rows]), what


@pytest.mark.large
@pytest.mark.parametrize("sizes", [(8192, 28672, 4096), (8192, 4096, 14336), (16384, 2048, 8192)], ids=str)
@every_product
def test_llama(product: Op, sizes: tuple[int, int, int]) -> None:
    """Through the public function, with the config that the model of cycles chooses."""
    function = by_kernel(product)
    tensors = operands(product, *sizes, exact=False)
    out = function(*tensors)
    finish(f"{product.name} {sizes}")
    compare(out, *rounded(product, tensors), CONFIGS[0], f"{product.name} {sizes}")
    assert torch.equal(out, function(*tensors))


@pytest.fixture
def captured() -> Iterator[torch.cuda.CUDAGraph]:
    yield torch.cuda.CUDAGraph()
    torch.cuda.synchronize()


def test_in_a_graph_behind_what_it_reads(captured: torch.cuda.CUDAGraph) -> None:
    """A product that starts early (PDL) waits for what the kernel before it writes."""
    function = by_kernel(linear)
    x, weight = operands(linear, 4096, 4096, 512)
    function(x, weight)
    with torch.cuda.graph(captured):
        once = function(x * 2, weight)
        twice = function(once.clamp(-4, 4), weight[:, :512].repeat(1, 8))
    captured.replay()
    finish("graph")
    compare(once, expected(linear, [x * 2, weight]).bfloat16().double(), 0.0, CONFIGS[0], "first of a graph")
    wide = [once.clamp(-4, 4), weight.repeat(1, 8)]
    compare(twice, expected(linear, wide).bfloat16().double(), 0.0, CONFIGS[0], "second of a graph")


# --- epilogues -----------------------------------------------------------------------------------------------------


def epilogue_inputs(op: Op, m: tuple[int, ...], n: int, k: int, **others: torch.dtype) -> dict[str, torch.Tensor]:
    """Random normal numbers in bfloat16, some operands in other dtypes; sums of the size of what is added to them."""
    generator, n = torch.Generator(DEVICE).manual_seed(n + k), columns(op, n)
    found = {}
    for key, tensor in op.inputs.items():
        values = torch.randn(tensor.of({"m": m, "n": n, "k": k}), generator=generator, device=DEVICE)
        dtype = others.get(key, DTYPES.get(tensor.dtype, torch.bfloat16))
        found[key] = (values / (k**0.5 if key == "weight" else 1)).to(dtype)
    return found


def check_epilogue(op: Op, given: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The outputs with the config that is chosen, in tensors that were NaN, against the reference in float64."""
    tensors = list(given.values())
    binding = bind_tensors(op, tensors, [*op.attrs.values()])
    chosen = plan(binding, memory(op, tensors), target.of_device())
    made = {name: out for name, out in binding.outputs.items() if out is not None}
    fill = planned_call(binding, chosen, torch.device(DEVICE)).fill(tuple(made))
    filled = {n: torch.full(o.shape, torch.nan, dtype=DTYPES[o.dtype], device=DEVICE) for n, o in made.items()}
    fill(*tensors, *filled.values())
    outs = tuple(filled[name if name in filled else str(t.same_as)] for name, t in op.outputs.items())
    finish(f"{op.name} {dict(chosen.variant.config)}: {dict(binding.dims)}")
    testing.check(op, given, op.attrs, tuple(map(filled.get, op.outputs)))
    return outs


every_epilogue = pytest.mark.parametrize("epilogue", EPILOGUES.values(), ids=lambda op: op.name)


@every_epilogue
def test_epilogue_of_one_tile(epilogue: Op) -> None:
    check_epilogue(epilogue, epilogue_inputs(epilogue, (64,), 64, 64))


@every_epilogue
@pytest.mark.parametrize(
    "sizes", [(1, 8, 8), (3, 9, 16), (129, 1001, 72), (300, 520, 264), (2048, 2056, 1000), (67, 130, 17)], ids=str
)
def test_epilogue(epilogue: Op, sizes: tuple[int, int, int]) -> None:
    m, n, k = sizes
    given = epilogue_inputs(epilogue, (m,), n, k)
    first = check_epilogue(epilogue, given)
    for out, again in zip(first, check_epilogue(epilogue, given), strict=True):
        assert torch.equal(out, again)


@pytest.mark.parametrize("cluster", [c for c in CLUSTERS[::-1] if math.prod(c) <= 2], ids=str)
@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize(
    "name",
    ["with_gelu", "saving", "with_swiglu", "gated_dgrad", "with_all", "with_rstd", "rescaled", "with_qk_norm"],
)
def test_epilogue_of_every_tile(name: str, tile: Any, cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if sm(target.of_device().arch) != 90:
        pytest.skip("the kernel runs on SM 9.0 alone")
    monkeypatch.setattr(gemm_config, "TILES", (tile,))
    monkeypatch.setattr(gemm_config, "CLUSTERS", (cluster,))
    # Many tiles of each CTA, and a short sum: the epilogue of one tile meets that of the next.
    check_epilogue(EPILOGUES[name], epilogue_inputs(EPILOGUES[name], (3000,), 4104, 128))


@pytest.mark.parametrize(("pre", "shift"), list(every_pair([torch.bfloat16, torch.float32], [0, 4, 8])), ids=str)
def test_epilogue_of_slices(pre: torch.dtype, shift: int) -> None:
    """Tiles with rows that TMA takes, and with rows that it does not."""
    op = EPILOGUES["with_residual"]
    given = epilogue_inputs(op, (2, 150), 200, 136, residual=pre)
    wide = torch.full((2, 150, 240), torch.nan, dtype=pre, device=DEVICE)
    wide[..., shift : shift + 200] = given["residual"]
    check_epilogue(op, {**given, "residual": wide[..., shift : shift + 200]})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_epilogue_of_other_dtypes(dtype: torch.dtype) -> None:
    op = EPILOGUES["with_all"]
    others = dict.fromkeys(("scale", "bias", "residual", "factor"), dtype)
    check_epilogue(op, epilogue_inputs(op, (300,), 520, 264, **others))


@pytest.mark.large
@every_epilogue
@pytest.mark.parametrize("sizes", [(8192, 14336, 4096), (16384, 3072, 768)], ids=str)
def test_epilogue_of_models(epilogue: Op, sizes: tuple[int, int, int]) -> None:
    m, n, k = sizes
    check_epilogue(epilogue, epilogue_inputs(epilogue, (m,), n, k))


@pytest.mark.parametrize("name", ["with_residual", "gated_dgrad", "with_all"])
@pytest.mark.parametrize("sizes", [(8192, 14336, 4096), (16384, 3072, 768)], ids=str)
def test_epilogue_time_and_again(name: str, sizes: tuple[int, int, int]) -> None:
    """A slot of a tile that is filled anew too early is a matter of chance: it was seen once in ten runs."""
    m, n, k = sizes
    function, given = by_kernel(EPILOGUES[name]), epilogue_inputs(EPILOGUES[name], (m,), n, k)
    first = function(*given.values())
    for _ in range(200):
        assert torch.equal(function(*given.values()), first)


@pytest.mark.parametrize("sizes", [(1, 8, 8), (129, 1000, 72), (67, 130, 17), (8192, 4096, 1024)], ids=str)
def test_the_next_norm(sizes: tuple[int, int, int]) -> None:
    m, n, k = sizes
    given = epilogue_inputs(linear_add_rmsnorm(), (m,), n, k)
    function = cute_ops_torch.register(linear_add_rmsnorm())
    outs = function(*given.values(), fused="always")
    finish(f"linear_add_rmsnorm {sizes}")
    testing.check(linear_add_rmsnorm(), given, {**linear_add_rmsnorm().attrs, "fused": "always"}, outs)
    for ours, apart in zip(outs, function(*given.values(), fused="never"), strict=True):
        assert (ours - apart).abs().max() <= 2.0**-6 * apart.abs().max()


@pytest.mark.parametrize("epilogue", ["bias", "gelu"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("sizes", [(1, 8, 8), (129, 1000, 72), (67, 130, 17), (8192, 4096, 1024)], ids=str)
def test_the_norm_before(sizes: tuple[int, int, int], weighted: bool, epilogue: str) -> None:
    """Forward and backward: normalised rows are rounded."""
    m, n, k = sizes
    op = rmsnorm_linear(epilogue, ("n",))
    given = {name: t.requires_grad_() for name, t in epilogue_inputs(op, (m,), n, k).items()}
    names = [name for name in given if weighted or name != "norm_weight"]
    tensors = [given[name] for name in names]
    plain = {name: given[name].detach() if name in names else None for name in given}
    (exact,), found = testing.expected(op, plain, op.attrs), []
    for fused in ("always", "never"):
        out = cute_ops_torch.register(op)(*tensors, fused=fused)
        found.append((out, *torch.autograd.grad(out, tensors, torch.ones_like(out))))
        finish(f"{op.name} {fused} {sizes}")
        assert (out - exact).abs().max() <= 2.0**-6 * exact.abs().max()
    for ours, theirs in zip(*found, strict=True):
        assert (ours - theirs).abs().max() <= 2.0**-5 * max(1.0, theirs.abs().max().item())


@pytest.mark.parametrize("transposed", [False, True])
def test_the_norm_before_a_batch_of_layers(transposed: bool) -> None:
    """One norm's weight for all of them, and a bias for each."""
    shapes = (3, 130, 264), (264,), ((3, 264, 520) if transposed else (3, 520, 264)), (3, 1, 520)
    given = [torch.randn(s, device=DEVICE, dtype=torch.bfloat16).requires_grad_() for s in shapes]
    found = []
    for fused in ("always", "never"):
        out = cute_ops_torch.rmsnorm_linear(*given, epilogue="gelu", transposed=transposed, fused=fused)
        found.append((out, *torch.autograd.grad(out, given, torch.ones_like(out))))
        finish(f"rmsnorm_linear of a batch, {fused}")
    for ours, theirs in zip(*found, strict=True):
        assert (ours - theirs).abs().max() <= 2.0**-5 * max(1.0, theirs.abs().max().item())


@pytest.mark.parametrize("size", [64, 128])
def test_qkv_rope(size: int) -> None:
    """Forward and backward by our kernels, against the framework's."""
    function = cute_ops_torch.register(qkv_rope(size))
    given = epilogue_inputs(qkv_rope(size), (2, 300), 10 * size, 264)
    x, weight = given["x"].requires_grad_(), given["weight"].requires_grad_()
    angles = torch.rand(300, size // 2, device=DEVICE) * 6
    found = []
    for fused in ("always", "never"):
        out = function(x, weight, angles.cos(), angles.sin(), heads=8, fused=fused)
        found.append((out, *torch.autograd.grad(out, [x, weight], torch.ones_like(out))))
        finish(f"qkv_rope {size} {fused}")
    for ours, theirs in zip(*found, strict=True):
        assert (ours - theirs).abs().max() <= 2.0**-6 * theirs.abs().max()


def test_angles_that_a_batch_shares() -> None:
    """Rows of cos and sin by position, for projections of (batch, positions, k), and halves of wider tables."""
    op = EPILOGUES["with_rope"]
    given = epilogue_inputs(op, (3, 150), 320, 136)
    for position in (given["cos"][0], given["cos"][:1], given["cos"][0].repeat(1, 2)[:, :32]):
        check_epilogue(op, {**given, "cos": position, "sin": -position})


def test_epilogue_in_a_graph(captured: torch.cuda.CUDAGraph) -> None:
    """An epilogue's operands are what the kernel before it writes."""
    op = EPILOGUES["with_residual"]
    function, given = by_kernel(op), epilogue_inputs(op, (4096,), 1024, 1024)
    x, weight, residual = given.values()
    eager = function(x, weight, function(x, weight, residual))
    with torch.cuda.graph(captured):
        out = function(x, weight, function(x, weight, residual))
    captured.replay()
    finish("graph of epilogues")
    assert torch.equal(out, eager)


@pytest.mark.parametrize("save", ["pre", "none"])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("sizes", [(300, 136, 264, 200), (4096, 2048, 8192, 2048)], ids=str)
def test_gated_mlp(sizes: tuple[int, int, int, int], activation: str, transposed: bool, save: str) -> None:
    """Every product by our kernels: the output and all gradients, against float64, and again."""
    m, k, n, p = sizes
    generator = torch.Generator(DEVICE).manual_seed(0)
    tensors = [
        (torch.randn(shape, generator=generator, device=DEVICE) / shape[-1] ** scale).bfloat16().requires_grad_()
        for shape, scale in (((m, k), 0), ((2 * n, k), 0.5), ((p, n), 0.5))
    ]
    dout = torch.randn(m, p, generator=generator, device=DEVICE).bfloat16()

    def run(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        given = [w.T.contiguous() if transposed else w for w in weights]
        options: dict[str, Any] = {"fused": "always", "save": save, "transposed": transposed}
        return cute_ops_torch.gated_mlp(x, *given, activation, **options)

    def plain(x: torch.Tensor, w_gate_up: torch.Tensor, w_down: torch.Tensor) -> torch.Tensor:
        gate, up = (x @ w_gate_up.T).chunk(2, -1)
        known = {"approximate": "tanh"} if activation == "gelu_tanh" else {}
        return getattr(torch.nn.functional, activation.partition("_")[0])(gate, **known) * up @ w_down.T

    results = []
    for _ in range(2):
        out = run(*tensors)
        results.append([out, *torch.autograd.grad(out, tensors, dout)])
    finish(f"gated_mlp {sizes}")
    wide = [t.detach().double().requires_grad_() for t in tensors]
    exact = plain(*wide)
    for first, again, wanted in zip(*results, [exact, *torch.autograd.grad(exact, wide, dout.double())], strict=True):
        assert torch.equal(first, again)
        torch.testing.assert_close(first.double(), wanted, rtol=0.02, atol=0.02 * wanted.abs().max().item())


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("lead", "n"), [((300,), 265), ((3, 50), 132)])
def test_odd_hidden_layers(lead: tuple[int, ...], n: int, transposed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a gradient their rows lie apart, and what lies between is neither read nor part of a result."""
    monkeypatch.setattr(products, "LEAST_APART", 0)
    generator, (k, p) = torch.Generator(DEVICE).manual_seed(0), (136, 200)

    def made(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=generator, device=DEVICE) / shape[-1] ** 0.5).bfloat16()

    x, up, b_up, gate_up, down, b_down = made(*lead, k), made(n, k), made(n), made(2, n, k), made(p, n), made(p)
    wide_x, wide_up, wide_gate_up, wide_down = (t.double() for t in (x, up, gate_up, down))
    silu, linear = torch.nn.functional.silu, torch.nn.functional.linear
    gate, through = (linear(wide_x, w) for w in wide_gate_up)
    wanted = [
        linear(silu(linear(wide_x, wide_up, b_up.double())), wide_down, b_down.double()),
        linear(silu(linear(wide_x, wide_up)), wide_down), linear(silu(gate) * through, wide_down),
    ]  # fmt: skip
    if transposed:
        up, down, gate_up = up.T.contiguous(), down.T.contiguous(), gate_up.permute(2, 0, 1).contiguous()
    packed = gate_up.flatten(1) if transposed else gate_up.flatten(0, 1)
    torch.full((1 << 20,), torch.nan, dtype=x.dtype, device=DEVICE)  # memory that the hidden layer takes next
    found = [
        cute_ops_torch.mlp(x, up, b_up, down, b_down, "silu", transposed=transposed),
        cute_ops_torch.mlp(x, up, None, down, None, "silu", transposed=transposed),
        cute_ops_torch.gated_mlp(x, packed, down, transposed=transposed),
        cute_ops_torch.gated_mlp(x, gate_up, down, transposed=transposed, halves=True),
    ]
    finish(f"odd hidden layer of {n}")
    for out, right in zip(found, (*wanted, wanted[-1]), strict=True):
        torch.testing.assert_close(out.double(), right, rtol=0.02, atol=0.02 * right.abs().max().item())


@pytest.mark.parametrize(("save", "transposed"), [("pre", False), ("none", True)])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "relu", "relu2", "silu", "quick_gelu"])
@pytest.mark.parametrize("sizes", [(300, 136, 264, 200), (4096, 1280, 5120, 1280)], ids=str)
def test_mlp(sizes: tuple[int, int, int, int], activation: str, biased: bool, save: str, transposed: bool) -> None:
    """Every product by our kernels: the output and all gradients, against float64, and again."""
    m, k, n, p = sizes
    generator = torch.Generator(DEVICE).manual_seed(0)
    every = (((m, k), 0), ((n, k), 0.5), ((n,), 0), ((p, n), 0.5), ((p,), 0))
    tensors = [
        (torch.randn(shape, generator=generator, device=DEVICE) / shape[-1] ** scale).bfloat16().requires_grad_()
        for shape, scale in every if biased or len(shape) > 1
    ]  # fmt: skip
    dout = torch.randn(m, p, generator=generator, device=DEVICE).bfloat16()
    exact_of = {
        "gelu": torch.nn.functional.gelu, "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
        "relu": torch.relu, "relu2": lambda x: torch.relu(x) ** 2, "silu": torch.nn.functional.silu,
        "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    }  # fmt: skip

    def apart(given: Sequence[torch.Tensor]) -> tuple[Any, ...]:
        return tuple(given) if biased else (*given[:2], None, given[2], None)

    def run(*given: torch.Tensor) -> torch.Tensor:
        x, up, b_up, down, b_down = apart(given)
        up, down = (w.T.contiguous() if transposed else w for w in (up, down))
        options: dict[str, Any] = {"fused": "always", "save": save, "transposed": transposed}
        return cute_ops_torch.mlp(x, up, b_up, down, b_down, activation, **options)

    def plain(*given: torch.Tensor) -> torch.Tensor:
        x, up, b_up, down, b_down = apart(given)
        linear = torch.nn.functional.linear
        return linear(exact_of[activation](linear(x, up, b_up)), down, b_down)

    wide = [t.detach().double().requires_grad_() for t in tensors]
    if activation == "relu":  # its gradient jumps at zero: none through rows where rounding may cross it
        x, up, b_up, *_ = apart(wide)
        hidden = torch.nn.functional.linear(x, up, b_up).abs()
        dout[(hidden < hidden.max() * 2**-16).any(-1)] = 0
    results = []
    for _ in range(2):
        out = run(*tensors)
        results.append([out, *torch.autograd.grad(out, tensors, dout)])
    finish(f"mlp {sizes}")
    exact = plain(*wide)
    for first, again, wanted in zip(*results, [exact, *torch.autograd.grad(exact, wide, dout.double())], strict=True):
        assert torch.equal(first, again)
        torch.testing.assert_close(first.double(), wanted, rtol=0.02, atol=0.02 * wanted.abs().max().item())


@pytest.mark.parametrize("product", NAMED, ids=lambda op: op.name)
def test_named_products(product: Op) -> None:
    check_epilogue(product, epilogue_inputs(product, (300,), 520, 264))


def test_epilogue_of_nothing() -> None:
    op = EPILOGUES["with_residual"]
    function, given = by_kernel(op), epilogue_inputs(op, (5,), 8, 16)
    x, weight, residual = given.values()
    assert torch.equal(function(x[:, :0], weight[:, :0], residual), residual)
    assert function(x[:0], weight, residual[:0]).shape == (0, 8)


# --- gradients -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("product", SMOOTH, ids=lambda op: op.name)
@pytest.mark.parametrize("sizes", [(1, 8, 8), (67, 130, 17), (300, 520, 264), (4096, 2048, 1024)], ids=str)
def test_gradients(product: Op, sizes: tuple[int, int, int]) -> None:
    """Each step against its reference, with what the steps before it gave; twice, for the same bits."""
    m, n, k = sizes
    given = epilogue_inputs(product, (m,), n, k)
    tensors = [t.requires_grad_() for t in given.values()]
    # Of eight million sums some lie at a bound of `clip`, where rounding decides which derivative is theirs.
    attrs = {**product.attrs, **({"limit": 1e4} if m > 1000 and "limit" in product.attrs else {})}
    outputs = by_kernel(product)(*tensors, **attrs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    cotangents = [torch.randn_like(out) for out in outputs]
    found, again = (torch.autograd.grad(outputs, tensors, cotangents, retain_graph=True) for _ in range(2))
    finish(f"gradient of {product.name} {sizes}")
    assert all(map(torch.equal, found, again))
    plain = {name: t.detach() for name, t in given.items()}
    raw = tuple(out.detach() for out in outputs)
    by_name = gradient.backward(product, plain, raw, dict(zip(product.outputs, cotangents, strict=True)), attrs)
    for name, got in zip(given, found, strict=True):
        wanted = by_name[name].double()
        limit = 2.0**-6 * max(1.0, wanted.abs().max().item())
        torch.testing.assert_close(got.double(), wanted, rtol=2.0**-6, atol=limit)


@pytest.mark.parametrize("product", [*STEPS], ids=lambda op: op.name)
@pytest.mark.parametrize("sizes", [(1, 8, 8), (67, 130, 17), (4096, 2048, 1024)], ids=str)
def test_steps_of_gradients(product: Op, sizes: tuple[int, int, int]) -> None:
    m, n, k = sizes
    check_epilogue(product, epilogue_inputs(product, (m,), n, k))


def test_gradient_in_a_graph(captured: torch.cuda.CUDAGraph) -> None:
    op = next(op for op in DIFFERENTIABLE if op.name == "with_gelu")
    tensors = [t.requires_grad_() for t in epilogue_inputs(op, (512,), 1024, 256).values()]
    function = by_kernel(op)
    eager = torch.autograd.grad(function(*tensors).sum(), tensors)
    with torch.cuda.graph(captured):
        found = torch.autograd.grad(function(*tensors).sum(), tensors)
    captured.replay()
    finish("graph of gradients")
    assert all(map(torch.equal, found, eager))


def test_a_layer_and_its_gradients_in_a_graph(captured: torch.cuda.CUDAGraph) -> None:
    """By the public functions: an epilogue, a gated MLP and rotated projections; the graph reads what inputs hold when
    it is replayed.
    """
    generator = torch.Generator(DEVICE).manual_seed(0)

    def made(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=generator, device=DEVICE) / shape[-1] ** 0.5).bfloat16().requires_grad_()

    m, k = 300, 256
    tensors = [made(m, k), made(k, k), made(k), made(2 * 520, k), made(k, 520), made(4 * 64, k)]
    angles = torch.rand(m, 32, generator=generator, device=DEVICE)

    def run() -> tuple[torch.Tensor, ...]:
        x, weight, bias, gate_up, down, qkv = tensors
        x = cute_ops_torch.linear(x, weight, bias, epilogue="gelu", fused="always")
        x = cute_ops_torch.gated_mlp(x, gate_up, down, fused="always")
        out = cute_ops_torch.qkv_rope(x, qkv, angles.cos(), angles.sin(), 3, fused="always")
        return (out, *torch.autograd.grad(out.float().sin().sum(), tensors))

    run()
    with torch.cuda.graph(captured):
        found = run()
    with torch.no_grad():
        tensors[0].mul_(-2)
    captured.replay()
    finish("graph of a layer")
    assert all(map(torch.equal, found, run()))


# --- the framework's product ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("product", [*SMOOTH, linear, linear_float32], ids=lambda op: op.name)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("sizes", [(1, 8, 8), (16, 512, 1024), (67, 130, 17), (1024, 512, 256)], ids=str)
def test_the_product_of_the_framework(product: Op, dtype: torch.dtype, sizes: tuple[int, int, int]) -> None:
    """Forward and backward give what the kernels give, but for rounding."""
    m, n, k = sizes
    tensors = [t.to(dtype).requires_grad_() for t in epilogue_inputs(product, (m,), n, k).values()]
    found = []
    for fused in ("always" if dtype is torch.bfloat16 else "auto", "never"):
        outputs = cute_ops_torch.register(product)(*tensors, fused=fused)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        gradients = torch.autograd.grad(outputs, tensors, [torch.ones_like(out) for out in outputs])
        finish(f"{product.name} {fused} {sizes}")
        found.append((*outputs, *gradients))
    rounding = 2.0**-6 if dtype is torch.bfloat16 else 2.0**-17
    for ours, theirs in zip(*found, strict=True):
        limit = rounding * max(1.0, ours.abs().max().item())
        torch.testing.assert_close(theirs.double(), ours.double(), rtol=rounding, atol=limit)


# --- weight gradients that are added up ----------------------------------------------------------------------------


@pytest.mark.parametrize("fused", ["always", "never"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sizes", [(1, 8, 8), (67, 130, 17), (300, 520, 264), (8192, 4096, 2048)], ids=str)
def test_adding_to_a_total(sizes: tuple[int, int, int], dtype: torch.dtype, fused: str) -> None:
    """In place: what is stored was read before. Sums of integers are exact in float32."""
    m, n, k = sizes
    dout, x = operands(linear_dweight, m, n, k)
    total = torch.randint(-INTEGERS, INTEGERS + 1, (n, k), device=DEVICE).to(dtype)
    exact = total.double()
    for _ in range(3):
        exact = (exact + expected(linear_dweight, [dout, x])).to(dtype).double()
        cute_ops_torch.register(linear_dweight_add)(dout, x, total, fused=fused)
    finish(f"adding {sizes}")
    if fused == "always":
        assert torch.equal(total.double(), exact)
    else:  # torch.addmm may round once more
        torch.testing.assert_close(total.double(), exact, rtol=2.0**-6, atol=2.0**-6 * exact.abs().max().item())
