"""Host time of jitted composites beside their parts and plain XLA, with and without gradients."""
import os, sys, time
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
from concurrent.futures import ThreadPoolExecutor
import jax, jax.numpy as jnp, numpy as np
import cute_ops_jax as ours
begin0 = time.perf_counter()
GPU = jax.default_backend() == "gpu"
EPS = 1e-6
n, heads, columns = 512, 3, 64
def made(seed, *shape): return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16) * 0.2
P = dict(x=made(0, 16, n), residual=made(1, 16, n), norm=made(2, n), bias=made(3, n), shift=made(4, n), up=made(5, 2 * n, n),
         down=made(6, n, n), weight=made(7, n, n), qkv=made(8, (heads + 1) * columns, n), head=made(9, 1024, n),
         cos=made(10, 16, columns // 2), sin=made(11, 16, columns // 2))
target = jnp.arange(16)
def rms(y, norm): 
    w = y.astype(jnp.float32)
    return (w * jax.lax.rsqrt(jnp.mean(w * w, -1, keepdims=True) + EPS)).astype(y.dtype) * norm
def gated(x, up, down):
    gate, value = jnp.split(x @ up.T, 2, -1)
    return (jax.nn.silu(gate) * value) @ down.T
def rotated(x, qkv, cos, sin):
    a, b = jnp.split((x @ qkv.T).reshape(16, heads + 1, columns)[:, :heads], 2, -1)
    c, s = cos[:, None], sin[:, None]
    return jnp.concatenate([a * c - b * s, b * c + a * s], -1)
def xent(x, head):
    logits = (x @ head.T).astype(jnp.float32)
    return jnp.mean(jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, target[:, None], -1)[:, 0])
CALLS = {
    "gated_mlp": (("x", "up", "down"), lambda x, u, d: ours.gated_mlp(x, u, d), lambda x, u, d: ours.linear(ours.gated_linear(x, u), d), gated),
    "rmsnorm_linear": (("x", "norm", "weight", "bias"), lambda x, m, w, b: ours.rmsnorm_linear(x, m, w, b),
                       lambda x, m, w, b: ours.linear(ours.rmsnorm(x, m), w, b, epilogue="bias"), lambda x, m, w, b: rms(x, m) @ w.T + b),
    "linear_add_rmsnorm": (("x", "weight", "residual", "norm"), lambda x, w, r, m: ours.linear_add_rmsnorm(x, w, r, m)[0],
                           lambda x, w, r, m: ours.add_rmsnorm(ours.linear(x, w), r, m)[0], lambda x, w, r, m: rms(x @ w.T + r, m)),
    "qkv_rope": (("x", "qkv"), lambda x, q: ours.qkv_rope(x, q, P["cos"], P["sin"], heads),
                 lambda x, q: ours.rope(ours.linear(x, q).reshape(16, heads + 1, columns)[:, :heads], P["cos"], P["sin"]),
                 lambda x, q: rotated(x, q, P["cos"], P["sin"])),
    "linear_cross_entropy": (("x", "head"), lambda x, h: ours.linear_cross_entropy(x, h, target),
                             lambda x, h: ours.cross_entropy(ours.linear(x, h), target), xent),
    "mlp": (("x", "weight", "bias", "down", "shift"), lambda x, w, b, d, s: ours.mlp(x, w, b, d, s),
            lambda x, w, b, d, s: ours.linear(ours.linear_gelu(x, w, b), d, s, epilogue="bias"),
            lambda x, w, b, d, s: jax.nn.gelu(x @ w.T + b) @ d.T + s),
}
def entry(name, kind, grad):
    names, *fns = CALLS[name]
    fn, args = fns[kind], [P[k] for k in names]
    if grad:
        run = jax.value_and_grad(lambda *a: jnp.sum(fn(*a).astype(jnp.float32)), tuple(range(len(args))))
    else:
        run = fn
    jitted = jax.jit(run)
    return jitted, args
entries = {(name, kind, grad): entry(name, kind, grad) for name in CALLS for kind in range(3) for grad in (False, True)}
lowered = {key: jitted.lower(*args) for key, (jitted, args) in entries.items()}
print("lowered", round(time.perf_counter() - begin0, 1), flush=True)
kernels = {}
with ThreadPoolExecutor(12) as pool:
    compiled = dict(zip(lowered, pool.map(lambda low: low.compile(), lowered.values())))
print("compiled", round(time.perf_counter() - begin0, 1), flush=True)
for key, c in compiled.items():
    text = c.as_text()
    kernels[key] = text.count("custom-call(") + text.count("fusion(")
    jax.block_until_ready(c(*entries[key][1]))
for key, (jitted, args) in entries.items(): jax.block_until_ready(jitted(*args))  # fast path of jit
print("warm", round(time.perf_counter() - begin0, 1), flush=True)
CALLN = 100 if GPU else 5
def sample(fn, args, finished):
    begin = time.perf_counter()
    for _ in range(CALLN):
        out = fn(*args)
        if finished: jax.block_until_ready(out)
    s = time.perf_counter() - begin
    jax.block_until_ready(out)
    return s / CALLN * 1e6
rows = {(key, f): [] for key in entries for f in (False, True)}
deadline = time.perf_counter() + (22 if GPU else 5)
rounds = 0
while rounds < 15 and time.perf_counter() < deadline:
    for (key, f), got in rows.items(): got.append(sample(*entries[key], f))
    rounds += 1
print(f"us a call, median of {rounds} samples of {CALLN} (min); jitted; enqueued | until finished; ours, its parts, jnp; jax {jax.__version__}")
for name in CALLS:
    for grad in (False, True):
        text = f"{name:22s} {'grad' if grad else '    '}"
        for f in (False, True):
            text += " |" + "".join(f" {np.median(rows[(name, k, grad), f]):7.1f} ({min(rows[(name, k, grad), f]):6.1f})" for k in range(3))
        print(text + "  ops " + " ".join(str(kernels[name, k, grad]) for k in range(3)), flush=True)
# eager calls, each dispatched by Python
print("eager, ours / parts / jnp")
for name, (names, *fns) in CALLS.items():
    args = [P[k] for k in names]
    got = []
    for fn in fns:
        jax.block_until_ready(fn(*args))
        got.append(min(sample(fn, args, False) for _ in range(5)))
    print(f"{name:22s} " + " ".join(f"{g:7.1f}" for g in got), flush=True)
