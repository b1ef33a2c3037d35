"""The calls that a Hugging Face model makes, from its configuration."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

from cute_ops.calls import lookup
from cute_ops.calls.manifest import ROWS, Call
from cute_ops.composite.qkv_rope import SIZES
from cute_ops.declaration.op import Op
from cute_ops.declaration.shapes import FLOATS, ITEMSIZE, Array
from cute_ops.errors import meant, shown
from cute_ops.jit.layout import Memory

# Batch and positions: the number of leading dims matters to kernels, their sizes do not.
LEAD = (1, ROWS)
# Tokens of a short, a usual and a long sequence: attention may have another kernel for each.
LENGTHS = (64, ROWS, 2 * ROWS)
# A product's tile depends on its number of rows; one kernel serves all products with its tile.
PRODUCT_ROWS = tuple(2**k for k in range(7, 18))
# The gated product of each activation, and its attributes.
_GATED: dict[str, tuple[str, dict[str, Any]]] = {
    "silu": ("silu_mul", {}),
    "swish": ("silu_mul", {}),
    "gelu": ("gelu_mul", {"approximate": "none"}),
    "gelu_new": ("gelu_mul", {"approximate": "tanh"}),
    "gelu_pytorch_tanh": ("gelu_mul", {"approximate": "tanh"}),
}
# Numbers of sequences: kernels read a table that several share with another config than the table of one.
_BATCHES = (1, 2)
# What configurations call the number of experts.
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")

# The fields that are read, by the type that each must have.
_COUNTS = (
    "hidden_size", "intermediate_size", "moe_intermediate_size", "num_attention_heads", "num_key_value_heads",
    "head_dim", "vocab_size", "sliding_window",
)  # fmt: skip
_NUMBERS = (
    "rms_norm_eps", "partial_rotary_factor", "query_pre_attn_scalar", "attn_logit_softcapping",
    "final_logit_softcapping", "logit_scale", "logits_scaling",
)  # fmt: skip
_TEXTS = ("model_type", "dtype", "torch_dtype", "hidden_act", "hidden_activation")


def calls_of_model(config: Mapping[str, Any], dtype: str | None = None, *, train: bool = False) -> list[Call]:
    """The calls of a decoder that :func:`cute_ops_torch.patch` has changed: norms, gates, rotations, attention,
    embedding and loss.

    Args:
        config: the content of ``config.json``; its ``text_config``, if it has one, is read instead.
        dtype: of the activations; by default the configuration's.
        train: whether to include gradients and the loss.

    Raises:
        ValueError: the configuration lacks something that is needed.
    """
    if not isinstance(config, Mapping):
        raise ValueError(f"it is no configuration, but a {type(config).__name__}")
    config = config.get("text_config") or config
    _check(config)
    kind = dtype or config.get("dtype") or config.get("torch_dtype") or "bfloat16"
    if kind not in FLOATS:
        raise ValueError(f"dtype {kind!r} is not one of {', '.join(FLOATS)}{meant(kind, FLOATS)}")
    if "hidden_size" not in config:
        raise ValueError("it has no hidden_size")
    return list(_calls(config, kind, train))


def _check(config: object) -> None:
    """Raise ValueError for a field that has another type than ours read it with; None is one that is left out."""
    if not isinstance(config, Mapping):
        raise ValueError(f"its text_config is {shown(config)}, expected an object")
    for name, value in config.items():
        if value is None:
            continue
        if name in _COUNTS and (type(value) is not int or value < 1):
            raise ValueError(f"its {name} is {shown(value)}, expected a whole number above 0")
        if name in _NUMBERS and type(value) not in (int, float):
            raise ValueError(f"its {name} is {shown(value)}, expected a number")
        if name in _TEXTS and not isinstance(value, str):
            raise ValueError(f"its {name} is {shown(value)}, expected a text")


def _calls(config: Mapping[str, Any], dtype: str, train: bool) -> Iterator[Call]:
    hidden = config["hidden_size"]
    if config.get("rms_norm_eps") is not None:
        yield from _norms(config, dtype, train)
    activation = config.get("hidden_activation") or config.get("hidden_act")
    if activation in _GATED and "intermediate_size" in config:
        for size in _dense_sizes(config):
            yield from _gates(activation, hidden, size, dtype, train)
    if _count(config, *_EXPERTS):
        yield from _experts(config, activation, dtype, train)
    # If only some columns of a head are rotated, models cut off the others first.
    whole = config.get("partial_rotary_factor") in (None, 1.0)
    if "num_attention_heads" in config and whole and (config.get("rope_theta") or config.get("rope_parameters")):
        yield from _rotations(config, dtype, train)
        if dtype != "float32":
            yield from _attention(config, dtype, train)
    if train and "vocab_size" in config:
        yield _embedding(config["vocab_size"], hidden, dtype)
        yield from _losses(config, dtype)


def _norms(config: Mapping[str, Any], dtype: str, train: bool) -> Iterator[Call]:
    """Norms of the residual stream, alone and after its adds, and norms of heads."""
    hidden, name = config["hidden_size"], str(config.get("model_type", ""))
    attrs = {"eps": float(config["rms_norm_eps"])} | ({"weight_offset": 1.0} if name.startswith("gemma") else {})
    yield from _rows("rmsnorm", {"x": hidden, "weight": hidden}, dtype, attrs, train=train)
    if _norms_heads(config):
        heads = config.get("num_attention_heads", 1)
        size = config.get("head_dim") or hidden // heads
        sizes = {"x": size, "weight": size}
        calls = list(_rows("rmsnorm", sizes, dtype, attrs, train=train, lead=(*LEAD, heads)))
        yield from calls
        if name.startswith("gemma3"):
            yield from (_exchanged(call, batch) for call in calls for batch in (1, 2))
    sizes = {"x": hidden, "residual": hidden, "weight": hidden}
    summed = list(_rows("add_rmsnorm", sizes, dtype, attrs, train=train))
    yield from summed
    for call in summed[1:]:  # after the last layer the sum is not read again
        last = {name: array for name, array in call.inputs.items() if name != "dresidual_out"}
        yield Call(call.name, last, attrs=call.attrs)
    if train and dtype != "float32" and not name.startswith("gemma"):
        yield from _added(config, dtype, attrs)


def _gates(activation: str, hidden: int, size: int, dtype: str, train: bool) -> Iterator[Call]:
    """The activation of a gated MLP of ``size`` columns."""
    gated, attrs = _GATED[activation]
    yield from _rows(gated, {"gate": size, "up": size}, dtype, attrs, train=train)
    if train and gated == "silu_mul":  # in one autograd node with its products, on matrices
        yield from _rows("swiglu", {"x": 2 * size}, dtype, {}, train=False, lead=(ROWS,))
        for name in ("swiglu_bwd", "swiglu_again"):
            yield from _rows(name, {"x": 2 * size, "dout": size}, dtype, {}, train=False, lead=(ROWS,))
        if dtype != "float32":
            yield from _mlp_products(hidden, size, dtype)


def _dense_sizes(config: Mapping[str, Any]) -> list[int]:
    """The columns of gated MLPs that are no experts."""
    size = config["intermediate_size"]
    if not _count(config, *_EXPERTS):
        return [size]
    shared = _count(config, "shared_expert_intermediate_size")
    shared = shared or _count(config, "moe_intermediate_size") * _count(config, "n_shared_experts")
    steps = _count(config, "first_k_dense_replace") or _count(config, "decoder_sparse_step") > 1
    return [each for each in (size if steps or config.get("mlp_only_layers") else 0, shared) if each]


def _experts(config: Mapping[str, Any], activation: Any, dtype: str, train: bool) -> Iterator[Call]:
    """The tokens of experts, whose products the framework groups, and the usual gate."""
    k, hidden = _count(config, "num_experts_per_tok", "experts_per_token") or 1, config["hidden_size"]
    size = _count(config, "moe_intermediate_size", "intermediate_size")
    rows, weights = Array((ROWS, hidden), dtype), {"weights": Array((ROWS, k), dtype)}
    index, place = (Array((ROWS, k), kind) for kind in ("int64", "int32"))
    yield Call("class_places", {"index": index}, attrs={"classes": _count(config, *_EXPERTS)})
    yield Call("scattered_rows", {"x": rows, "place": place})
    yield from (Call("gathered_sum", {"y": rows, "index": place, **more}) for more in (weights, {})[: 1 + train])
    if train:
        chosen = Array((ROWS * k, hidden), dtype)
        yield Call("scattered_dots", {"y": chosen, "place": place, "dout": rows, **weights})
    if activation in _GATED and size:
        gated, attrs = _GATED[activation]
        op = "swiglu" if gated == "silu_mul" else "geglu"
        yield from _rows(op, {"x": 2 * size}, dtype, attrs, train=False, lead=(ROWS,))
        if train:
            yield from _rows(f"{op}_bwd", {"x": 2 * size, "dout": size}, dtype, attrs, train=False, lead=(ROWS,))


def _count(config: Mapping[str, Any], *names: str) -> int:
    """The first of these fields that is a number above 0; else 0."""
    found = (config.get(name) for name in names)
    return next((each for each in found if type(each) is int and each > 0), 0)


def _rotations(config: Mapping[str, Any], dtype: str, train: bool) -> Iterator[Call]:
    """Rotations of queries and keys, by tables with two equal halves, of which a view of the first is used."""
    heads = config["num_attention_heads"]
    keys = config.get("num_key_value_heads") or heads
    size = config.get("head_dim") or config["hidden_size"] // heads
    # Heads come before positions in memory after Gemma 3's norms, and in gradients of Gemma 2's eager attention.
    exchanged = {"gemma2": "rope_bwd", "gemma3": "rope"}.get(str(config.get("model_type"))[:6])
    halves = {name: Memory((size, 1)) for name in ("cos", "sin")}
    for count in dict.fromkeys((heads, keys)):
        for name, rotated in (("rope", "x"), ("rope_bwd", "dout"))[: 1 + train]:
            # When a token is generated there is one position, and the half of its table is compact.
            for positions, memory in ((ROWS, halves), (1, {}))[: 2 if name == "rope" else 1]:
                table = Array((positions, size // 2), dtype)
                for batch in _BATCHES:
                    inputs = {rotated: Array((batch, positions, count, size), dtype), "cos": table, "sin": table}
                    yield (call := Call(name, inputs, memory=memory))
                    if positions > 1 and exchanged == name:
                        yield _exchanged(call, batch)
    yield from _normed_rotations(config, (heads, keys, size), dtype, train)
    if train and dtype != "float32":
        yield from _products_of_heads(config, (heads, keys, size), dtype)
    if train:
        yield from _rotated_back(heads, keys, size, dtype, exchanged == "rope_bwd")


def _products_of_heads(config: Mapping[str, Any], heads: tuple[int, int, int], dtype: str) -> Iterator[Call]:
    """Projections to queries, keys and values in training; ``heads`` as in :func:`_normed_rotations`."""
    queries, keys, size = heads
    yield from _projections(config["hidden_size"], [count * size for count in (queries, keys, keys)], dtype)
    if config.get("attention_bias") or str(config.get("model_type", "")).startswith("qwen2"):
        for columns in {count * size for count in (queries, keys)}:
            arrays = {"x": Array((ROWS, columns), dtype), "bias": Array((columns,), dtype)}
            yield Call("column_sum", arrays)
    if size in SIZES and not _norms_heads(config):
        yield from _rotated(config["hidden_size"], [queries, keys, keys], size, dtype)


def _normed_rotations(
    config: Mapping[str, Any], heads: tuple[int, int, int], dtype: str, train: bool
) -> Iterator[Call]:
    """Norms of queries' and keys' heads with their rotation; ``heads``: how many there are of each, and their size."""
    if not _norms_heads(config):
        return
    queries, keys, size = heads
    eps = float(config.get("rms_norm_eps") or 1e-6)
    # One is added to Gemma's weights in float32.
    weight = Array((size,), "float32" if str(config.get("model_type")).startswith("gemma") else dtype)
    for positions in (ROWS, 1):
        q, k = (Array((1, positions, count, size), dtype) for count in (queries, keys))
        table = Array((positions, size // 2), dtype)
        inputs = {"q": q, "k": k, "q_weight": weight, "k_weight": weight, "cos": table, "sin": table}
        memory = {name: Memory((size, 1)) for name in ("cos", "sin")} if positions > 1 else {}
        attrs = {} if eps == lookup.find("qk_norm_rope").attrs["eps"] else {"eps": eps}
        yield Call("qk_norm_rope", inputs, memory, attrs)
        if train and positions > 1:
            yield Call("qk_norm_rope_bwd", {**inputs, "dq_out": q, "dk_out": k}, memory, attrs)


def _norms_heads(config: Mapping[str, Any]) -> bool:
    """Whether norms stand between queries and keys and their rotation."""
    return str(config.get("model_type", "")).startswith(("qwen3", "gemma3"))


def _rotated_back(heads: int, keys: int, size: int, dtype: str, exchanged: bool) -> Iterator[Call]:
    """Gradients of heads that are rotated right after their projections."""
    halves = {name: Memory((size, 1)) for name in ("cos", "sin")}
    counts = {"dq": heads, "dk": keys}
    table = Array((ROWS, size // 2), dtype)
    for batch in _BATCHES:
        together = Array((batch, ROWS, sum(counts.values()), size), dtype)
        yield Call("rope", {"x": together, "cos": table, "sin": table}, memory=halves)
        inputs = {name: Array((batch, ROWS, count, size), dtype) for name, count in counts.items()}
        joined = Call("rope_bwd_joined", {**inputs, "dv": inputs["dk"], "cos": table, "sin": table}, memory=halves)
        yield joined
        if exchanged:
            yield _exchanged(joined, batch)


def _attention(config: Mapping[str, Any], dtype: str, train: bool) -> Iterator[Call]:
    """Attention of the layers with a sliding window and of those without one. Projections of packed weights are slices
    of one array, and a cache has heads before positions.
    """
    heads = config["num_attention_heads"]
    keys, size = config.get("num_key_value_heads") or heads, config.get("head_dim") or config["hidden_size"] // heads
    if size % 16 or size > 256:
        return
    scalar, window = config.get("query_pre_attn_scalar") or size, config.get("sliding_window")
    attrs = {"causal": True, "softcap": float(config.get("attn_logit_softcapping") or 0.0)}
    attrs |= {} if scalar == size else {"scale": float(scalar**-0.5)}
    sinks = {"sinks": Array((heads,), dtype)} if config.get("model_type") == "gpt_oss" else {}
    lefts = (-1, window - 1) if window and config.get("use_sliding_window", True) else (-1,)
    for options in ({**attrs, "left": left} for left in lefts):
        if train:
            for length in LENGTHS:
                yield from _attention_in_training(_qkv(heads, keys, size, length, dtype), sinks, options)
        else:
            room = LENGTHS[-1] * size
            cached = dict.fromkeys(("k", "v"), Memory((keys * room, size, room, 1)))
            for length, memory in product(LENGTHS, ({}, cached)):
                yield Call("attention", {**_qkv(heads, keys, size, length, dtype), **sinks}, memory, options)


def _qkv(heads: int, keys: int, size: int, length: int, dtype: str) -> dict[str, Array]:
    """Queries, keys and values of sequences of ``length`` tokens."""
    batch = LENGTHS[-1] // length
    return {name: Array((batch, length, n, size), dtype) for name, n in (("q", heads), ("k", keys), ("v", keys))}


def _attention_in_training(
    rows: Mapping[str, Array], sinks: Mapping[str, Array], options: Mapping[str, Any]
) -> Iterator[Call]:
    """Attention with its gradient, of arrays of their own and of slices of a packed projection."""
    batch, length, heads, size = rows["q"].shape
    token = (heads + 2 * rows["k"].shape[2]) * size
    packed = dict.fromkeys(rows, Memory((length * token, token, size, 1)))
    results = {"out": rows["q"], "lse": Array((batch, heads, length), "float32"), "dout": rows["q"]}
    for memory in ({}, packed):
        yield Call("attention", {**rows, **sinks}, memory, options)
        yield Call("attention_bwd", {**rows, **results, **sinks}, memory, options)


def _mlp_products(hidden: int, size: int, dtype: str) -> Iterator[Call]:
    """Products of a gated MLP with packed weights, which is one autograd node."""
    for m in PRODUCT_ROWS:
        yield from _products(("gated_linear_saving", "linear_dweight", "linear_dx"), m, hidden, 2 * size, dtype)
        yield from _products(("linear", "linear_dweight"), m, size, hidden, dtype)
        for name in ("gated_mlp_dgrad", "gated_mlp_dgrad_again"):
            shapes = {"x": (m, hidden), "weight": (hidden, size), "pre": (m, 2 * size)}
            yield Call(name, {n: Array(shape, dtype) for n, shape in shapes.items()})


def _products(names: tuple[str, ...], m: int, k: int, n: int, dtype: str) -> Iterator[Call]:
    """These products of a linear layer from ``k`` to ``n`` columns, and of its gradient."""
    arrays = {"x": Array((m, k), dtype), "weight": Array((n, k), dtype), "dout": Array((m, n), dtype)}
    for name in names:
        read = {"linear_dx": ("dout", "weight"), "linear_dweight": ("dout", "x")}.get(name, ("x", "weight"))
        yield Call(name, {each: arrays[each] for each in read})


def _projections(hidden: int, sizes: list[int], dtype: str) -> Iterator[Call]:
    """Products for queries, keys and values, one autograd node: queries and keys together, backward all three."""
    for m in PRODUCT_ROWS:
        for n in (*sizes, sum(sizes[:2])):
            yield from _products(("linear",), m, hidden, n, dtype)
        yield from _products(("linear_dx", "linear_dweight"), m, hidden, sum(sizes), dtype)


def _rotated(hidden: int, heads: list[int], size: int, dtype: str) -> Iterator[Call]:
    """Products for queries, keys and values that rotate the first two in their epilogue: packed, or one by one."""
    memory = {name: Memory((size, 1)) for name in ("cos", "sin")}
    for m in PRODUCT_ROWS:
        x, table = Array((1, m, hidden), dtype), Array((m, size // 2), dtype)
        both = sum(heads[:2])
        for count, rotated in ((sum(heads), both), *((n, n) for n in dict.fromkeys((both, *heads[:2])))):
            inputs = {"x": x, "weight": Array((count * size, hidden), dtype), "cos": table, "sin": table}
            yield Call(f"qkv_rope_{size}", inputs, memory, {"heads": rotated})


def _added(config: Mapping[str, Any], dtype: str, attrs: Mapping[str, Any]) -> Iterator[Call]:
    """A layer's last products, which are added to the residual stream, and the norms that read it next."""
    hidden, heads = config["hidden_size"], config.get("num_attention_heads", 0)
    sizes = [config.get("intermediate_size"), heads * (config.get("head_dim") or hidden // (heads or 1))]
    for size in filter(None, sizes):
        for m in PRODUCT_ROWS:
            weight = Array((hidden, size), dtype)
            x, stream = (Array((1, m, n), dtype) for n in (size, hidden))
            yield Call("linear_add_rstd", {"x": x, "weight": weight, "residual": stream}, attrs=attrs)
            yield from _products(("linear", "linear_dx", "linear_dweight"), m, size, hidden, dtype)
    rows = {"x": Array((*LEAD, hidden), dtype), "rstd": Array((*LEAD, 1), "float32")}
    yield Call("scaled_rows", {**rows, "weight": Array((hidden,), dtype)})


def _exchanged(call: Call, batch: int) -> Call:
    """A call on ``batch`` sequences whose positions and heads are exchanged in memory."""
    inputs, memory = dict(call.inputs), dict(call.memory)
    for name, array in call.inputs.items():
        if len(array.shape) == 4:
            _, outer, inner, size = array.shape
            inputs[name] = Array((batch, outer, inner, size), array.dtype)
            memory[name] = Memory((outer * inner * size, size, outer * size, 1))
    return Call(call.name, inputs, memory, call.attrs)


def _embedding(vocab: int, hidden: int, dtype: str) -> Call:
    """The gradient of the table, from sorted tokens."""
    tokens = {"classes": Array((ROWS,), "int32"), "order": Array((ROWS,), "int64")}
    inputs = {"ends": Array((vocab,), "int32"), **tokens, "dout": Array((ROWS, hidden), dtype)}
    return Call("sorted_embedding_bwd", inputs)


def _losses(config: Mapping[str, Any], dtype: str) -> Iterator[Call]:
    """Losses of a chunk of logits: with their gradient in training, alone in evaluation."""
    vocab, scale = config["vocab_size"], config.get("logit_scale") or 1 / (config.get("logits_scaling") or 1)
    attrs = {"softcap": float(config.get("final_logit_softcapping") or 0), "logit_scale": float(scale)}
    logits, target = Array((ROWS, vocab), dtype), Array((ROWS,), "int64")
    weight = {"dloss": Memory((0,))}  # one number, expanded to all rows
    step = {"logits": logits, "target": target, "dloss": Array((ROWS,), "float32")}
    aligned = {"logits": Memory((-(-vocab * ITEMSIZE[dtype] // 16) * 16 // ITEMSIZE[dtype], 1))}  # in chunks, by torch
    for memory in ({}, aligned, aligned | {"dlogits": aligned["logits"]}):
        yield Call("cross_entropy_step", step, weight | memory, attrs)
    for memory in ({}, aligned):
        yield Call("cross_entropy", {"logits": logits, "target": target}, memory, attrs)
    # The mean of the kept rows' losses, and the cotangent of each: one over their number.
    losses: dict[str, Array]
    for losses in ({}, {"loss": step["dloss"]}):
        yield Call("kept_mean", {"target": target, **losses})
    # Gradients as one row of any length, scaled by the loss's cotangent.
    yield Call("scale", {"x": Array((1, ROWS), dtype), "factor": Array((1,), "float32")})


def _rows(
    name: str, sizes: Mapping[str, int], dtype: str, attrs: Mapping[str, Any], *, train: bool,
    lead: tuple[int, ...] = LEAD,
) -> Iterator[Call]:  # fmt: skip
    """An op on rows, and in training its gradient, as declared and without the gradients of frozen weights."""
    op = lookup.find(name)

    def arrays(of: Op, names: Mapping[str, int]) -> dict[str, Array]:
        return {n: Array((*(lead if of.inputs[n].rows else ()), size), dtype) for n, size in names.items()}

    full = {key: value for key, value in attrs.items() if op.attrs.get(key) != value}
    yield Call(name, arrays(op, sizes), attrs=full)
    for step in op.steps if train else ():
        first = next(iter(sizes.values()))
        known = {
            n: sizes.get(n, first) for n, t in step.inputs.items() if n in sizes or n.startswith("d") or not t.optional
        }
        yield Call(step.name, arrays(step, known), attrs=full)
        if step.narrowed:  # for frozen weights
            frozen = step.only(*(n for n, t in step.outputs.items() if t.rows))
            yield Call(frozen.name, arrays(step, known), attrs=full)
