"""Heads' losses as training libraries write them: XLA beside fuse. Time, temporaries, differences."""
import os, time
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "true")
from concurrent.futures import ThreadPoolExecutor
import jax, jax.numpy as jnp, numpy as np
import cute_ops_jax
GPU = jax.default_backend() == "gpu"
ROWS, K, N = (16384, 2048, 32000) if GPU else (64, 16, 40)
@jax.custom_vjp
def xent(logits, rows, z_loss):
    lse = jax.nn.logsumexp(logits, -1, keepdims=True)
    z = z_loss * jnp.squeeze(lse, -1) ** 2
    return z - jnp.sum(rows * (logits - lse), -1), z
def fwd(logits, rows, z_loss):
    most = logits.max(-1, keepdims=True)
    e = jnp.exp(logits - most)
    total = e.sum(-1, keepdims=True)
    lz = jnp.squeeze(jnp.log(total) + most, -1)
    z = z_loss * jax.lax.square(lz)
    return (z - jnp.sum(rows * (logits - most - jnp.log(total)), -1), z), (logits, rows, z_loss, e, total, lz)
def bwd(saved, g):
    logits, rows, z_loss, e, total, lz = saved
    d = jnp.expand_dims(1 + 2 * z_loss * lz, -1) * e / total - rows
    return jnp.asarray(jnp.expand_dims(g[0], -1) * d, logits.dtype), None, None
xent.defvjp(fwd, bwd)
rng = np.random.default_rng(0)
h = jnp.asarray(rng.standard_normal((ROWS, K)), jnp.bfloat16)
w = jnp.asarray(rng.standard_normal((K, N)) * K**-0.5 * 2, jnp.bfloat16)
t = jnp.asarray(rng.integers(0, N, ROWS), jnp.int32)
def logits(h, w): return (h @ w).astype(jnp.float32)
def wide(h, w): return jnp.matmul(h, w, preferred_element_type=jnp.float32)
def plain(x): return (jax.nn.logsumexp(x, -1) - jnp.take_along_axis(x, t[:, None], -1)[:, 0]).mean()
CASES = {
    "plain": lambda h, w: (plain(logits(h, w)), 0.0),
    "rule": lambda h, w: (xent(logits(h, w), jax.nn.one_hot(t, N), 1e-4)[0].mean(), 0.0),
    "rule, z-loss read": lambda h, w: (lambda o: (o[0].mean(), o[1].mean()))(xent(logits(h, w), jax.nn.one_hot(t, N), 1e-4)),
    "accuracy": lambda h, w: (lambda x: (plain(x), (x.argmax(-1) == t).mean()))(logits(h, w)),
    "wide": lambda h, w: (plain(wide(h, w)), 0.0),
    "wide, accuracy": lambda h, w: (lambda x: (plain(x), (x.argmax(-1) == t).mean()))(wide(h, w)),
}
begin = time.perf_counter()
low = {}
for name, fn in CASES.items():
    for kind, f in (("XLA", fn), ("fuse", cute_ops_jax.fuse(fn))):
        low[name, kind] = jax.jit(jax.value_and_grad(f, (0, 1), has_aux=True)).lower(h, w)
with ThreadPoolExecutor(8) as pool:
    run = dict(zip(low, pool.map(lambda l: l.compile(), low.values())))
print("compiled", round(time.perf_counter() - begin, 1), flush=True)
for name in CASES:
    times = {"XLA": [], "fuse": []}
    outs = {}
    try:
        for kind in times: outs[kind] = jax.block_until_ready(run[name, kind](h, w))
        for _ in range(6):
            for kind in times:
                jax.block_until_ready(run[name, kind](h, w))
                a = time.perf_counter()
                for _ in range(4): o = run[name, kind](h, w)
                jax.block_until_ready(o)
                times[kind].append((time.perf_counter() - a) / 4 * 1e3)
        mem = {k: run[name, k].memory_analysis().temp_size_in_bytes / 1e9 for k in times}
        apart = [float(jnp.max(jnp.abs(jnp.asarray(a, jnp.float32) - jnp.asarray(b, jnp.float32))) / jnp.maximum(jnp.max(jnp.abs(jnp.asarray(a, jnp.float32))), 1e-9)) for a, b in zip(jax.tree.leaves(outs["XLA"]), jax.tree.leaves(outs["fuse"]))]
        x, f = (np.median(times[k]) for k in times)
        print(f"{name:20s} XLA {x:7.2f} ms {mem['XLA']:6.2f} GB | fuse {f:7.2f} ms {mem['fuse']:6.2f} GB | {x / f:5.2f} x | apart " + " ".join(f"{a:.1e}" for a in apart), flush=True)
    except Exception as e:
        print(name, type(e).__name__, str(e)[:300], flush=True)
