"""First call and steps of a flax.nnx GPT of four layers: through fuse, and as XLA compiles it. `nnx_gpt.py FIRST`."""
import os, sys, time
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "true")
begin0 = time.perf_counter()
import jax, jax.numpy as jnp, numpy as np, optax
from flax import nnx
import cute_ops_jax
print("imports", round(time.perf_counter() - begin0, 2), flush=True)
TINY = jax.default_backend() != "gpu"
N, HEADS, V, B, T, L = (64, 4, 256, 2, 32, 2) if TINY else (1024, 16, 50257, 8, 1024, 4)
DT = jnp.float32 if TINY else jnp.bfloat16

class Block(nnx.Module):
    def __init__(self, rngs):
        kw = dict(dtype=DT, param_dtype=DT, rngs=rngs)
        self.a, self.b = nnx.LayerNorm(N, **kw), nnx.LayerNorm(N, **kw)
        self.attention = nnx.MultiHeadAttention(HEADS, N, decode=False, **kw)
        self.up, self.down = nnx.Linear(N, 4 * N, **kw), nnx.Linear(4 * N, N, **kw)
    def __call__(self, x, mask):
        x = x + self.attention(self.a(x), mask=mask)
        return x + self.down(nnx.gelu(self.up(self.b(x))))

class GPT(nnx.Module):
    def __init__(self, rngs):
        kw = dict(dtype=DT, param_dtype=DT, rngs=rngs)
        self.tokens, self.places = nnx.Embed(V, N, **kw), nnx.Embed(T, N, **kw)
        self.blocks = nnx.List([Block(rngs) for _ in range(L)]) if hasattr(nnx, "List") else [Block(rngs) for _ in range(L)]
        self.norm, self.head = nnx.LayerNorm(N, **kw), nnx.Linear(N, V, use_bias=False, **kw)
    def __call__(self, window):
        at = window[:, :-1]
        x = self.tokens(at) + self.places(jnp.arange(T))
        mask = nnx.make_causal_mask(at)
        for block in self.blocks:
            x = block(x, mask)
        logits = self.head(self.norm(x)).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, window[:, 1:]).mean()

OPT = optax.adamw(3e-4, b2=0.95, weight_decay=0.1)
rng = np.random.default_rng(0)
windows = [jnp.asarray(rng.zipf(1.3, (B, T + 1)) % V, jnp.int32) for _ in range(2)]

def contender(kind):
    graph, params = nnx.split(GPT(nnx.Rngs(0)))
    loss = lambda params, w: nnx.merge(graph, params)(w)
    loss = cute_ops_jax.fuse(loss) if kind == "fuse" else loss
    @jax.jit
    def step(state, w):
        params, memory = state
        value, grads = jax.value_and_grad(loss)(params, w)
        updates, memory = OPT.update(grads, memory, params)
        return (optax.apply_updates(params, updates), memory), value
    return step, (params, OPT.init(params))

first = sys.argv[1]
runs = {}
for kind in (first, "XLA" if first == "fuse" else "fuse"):
    step, state = contender(kind)
    jax.block_until_ready(state)
    begin = time.perf_counter()
    state, value = step(state, windows[0])
    losses = [float(value)]
    print(f"{kind}: first call {time.perf_counter() - begin:.2f} s, {'first' if kind == first else 'second'} in its process", flush=True)
    runs[kind] = [step, state, losses, []]
for _ in range(8):
    for kind, run in runs.items():
        begin = time.perf_counter()
        for k in range(5):
            run[1], value = run[0](run[1], windows[k % 2])
        run[2].append(float(value))
        run[3].append((time.perf_counter() - begin) / 5 * 1e3)
for kind, run in runs.items():
    print(f"nnx gpt {kind}: step {np.median(run[3][1:]):.2f} ms (min {min(run[3]):.2f}), losses {run[2][0]:.4f} {run[2][-1]:.4f}")
print(f"nnx gpt: x XLA {np.median(runs['XLA'][3][1:]) / np.median(runs['fuse'][3][1:]):.3f}, jax {jax.__version__}", flush=True)
