"""Draw sequences of calls with requires_grad mixes, modes, transforms, hooks; compare with torch in float32/64."""
import os, random, sys, traceback, contextlib, threading, warnings
ROOT = os.environ.get("ROOT", ".")
sys.path.insert(0, ROOT)
import numpy as np, torch, torch.nn.functional as F
torch.set_num_threads(1)
warnings.filterwarnings("ignore")
import cute_ops_torch as C
STUB = "--stub" in sys.argv
if STUB:  # kernels that run the reference: the fast path on a CPU
    from cute_ops.jit import cache, target
    from cute_ops_torch.host import launch
    from cute_ops_torch import registry
    from tests.torch import conftest
    _tt = conftest.to_torch
    conftest.to_torch = lambda a, device="cpu": _tt(None if a is None else np.asarray(a), device)
    class Ops(dict):
        def __missing__(self, name):
            for r in list(registry._registered.values()):
                self[r.op.name] = r.op
                for st in r.op.steps:
                    for nn in st.narrowed: self.setdefault(nn.name, nn)
            from cute_ops.ops.gemm.row_copy import row_copy
            self.setdefault("row_copy", row_copy())
            return self[name] if name in self else None
    ops = Ops()
    runs = [0]
    def get(variant):
        def kernel(*given):
            runs[0] += 1
            conftest._run(ops[variant.op] if variant.op in ops or ops.__missing__(variant.op) else None, variant, given)
        return kernel
    cache.get = get
    target.of_device = lambda index: target.parse("sm_90a")
    launch.torch.cuda.device_count = lambda: 1
    registry.Registered._devices = property(lambda self: ("cpu", "cuda"))

EPS = 1e-6
def rms(x, w, eps=EPS): return F.rms_norm(x, x.shape[-1:], w, eps)
def rot(y, cos, sin):
    a, b = y.chunk(2, -1)
    return y * torch.cat([cos, cos], -1).unsqueeze(-2) + torch.cat([-b, a], -1) * torch.cat([sin, sin], -1).unsqueeze(-2)
def heads_of(x, w, cos, sin):
    y = F.linear(x, w).unflatten(-1, (3, 64))
    return torch.cat([rot(y[..., :2, :], cos, sin), y[..., 2:, :]], -2).flatten(-2)
# name: (shapes of tensors by (rows, n), ours, reference, integer input sizes)
def sgu(x, w):
    g, u = F.linear(x, w).chunk(2, -1)
    return F.silu(g) * u
OPS = {
    "rmsnorm": (lambda r, n: [(*r, n), (n,)], lambda x, w: C.rmsnorm(x, w, eps=EPS), rms),
    "layernorm": (lambda r, n: [(*r, n), (n,), (n,)], lambda x, w, b: C.layernorm(x, w, b), lambda x, w, b: F.layer_norm(x, x.shape[-1:], w, b)),
    "add_rmsnorm": (lambda r, n: [(*r, n), (*r, n), (n,)], lambda x, y, w: C.add_rmsnorm(x, y, w), lambda x, y, w: (rms(x + y, w), x + y)),
    "swiglu": (lambda r, n: [(*r, 2 * n)], C.swiglu, lambda x: F.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1]),
    "silu_mul": (lambda r, n: [(*r, n), (*r, n)], C.silu_mul, lambda g, u: F.silu(g) * u),
    "softmax": (lambda r, n: [(*r, n)], C.softmax, lambda x: x.softmax(-1)),
    "linear": (lambda r, n: [(*r, n), (24, n)], C.linear, F.linear),
    "linear_bias": (lambda r, n: [(*r, n), (24, n), (24,)], lambda x, w, b: C.linear(x, w, b, epilogue="bias"), F.linear),
    "linear_gelu": (lambda r, n: [(*r, n), (24, n), (24,)], C.linear_gelu, lambda x, w, b: F.gelu(F.linear(x, w, b))),
    "gated_linear": (lambda r, n: [(*r, n), (32, n)], C.gated_linear, sgu),
    "mlp": (lambda r, n: [(*r, n), (24, n), (24,), (16, 24), (16,)], C.mlp, lambda x, a, b, c, d: F.linear(F.gelu(F.linear(x, a, b)), c, d)),
    "gated_mlp": (lambda r, n: [(*r, n), (48, n), (16, 24)], C.gated_mlp, lambda x, a, c: F.linear(sgu(x, a), c)),
    "rmsnorm_linear": (lambda r, n: [(*r, n), (n,), (24, n), (24,)], lambda x, g, w, b: C.rmsnorm_linear(x, g, w, b, eps=EPS), lambda x, g, w, b: F.linear(rms(x, g), w, b)),
    "linear_add_rmsnorm": (lambda r, n: [(*r, n), (n, n), (*r, n), (n,)], lambda x, w, s, g: C.linear_add_rmsnorm(x, w, s, g), lambda x, w, s, g: (rms(F.linear(x, w) + s, g), F.linear(x, w) + s)),
    "qkv_rope": (lambda r, n: [(*r, n), (192, n), "cos", "sin"], lambda x, w, c, s: C.qkv_rope(x, w, c, s, 2), heads_of),
    "cross_entropy": (lambda r, n: [(*r, n), "target"], lambda x, t: C.cross_entropy(x, t), lambda x, t: F.cross_entropy(x.reshape(-1, x.shape[-1]), t.reshape(-1))),
    "cross_entropy_none": (lambda r, n: [(*r, n), "target"], lambda x, t: C.cross_entropy(x, t, reduction="none"), lambda x, t: F.cross_entropy(x.reshape(-1, x.shape[-1]), t.reshape(-1), reduction="none").view(t.shape)),
    "linear_cross_entropy": (lambda r, n: [(*r, n), (16, n), "target16"], lambda x, w, t: C.linear_cross_entropy(x, w, t), lambda x, w, t: F.cross_entropy(F.linear(x, w).reshape(-1, 16), t.reshape(-1))),
    "lce_sum_bias": (lambda r, n: [(*r, n), (16, n), "target16", (16,)], lambda x, w, t, b: C.linear_cross_entropy(x, w, t, b, reduction="sum"), lambda x, w, t, b: F.cross_entropy(F.linear(x, w, b).reshape(-1, 16), t.reshape(-1), reduction="sum")),
    "group_norm": (lambda r, n: [(2, n, *r), (n,), (n,)], lambda x, w, b: C.group_norm(x, w, b, 4), lambda x, w, b: F.group_norm(x, 4, w, b)),
}
@C.fused
def gelu_add(xp, x, bias, residual): return xp.gelu(x + bias) + residual
OPS["fused"] = (lambda r, n: [(*r, n), (n,), (*r, n)], gelu_add, lambda x, b, s: F.gelu(x + b) + s)
@C.fused
def rowy(xp, x, w): return x * xp.rsqrt(xp.mean(x * x, axis=-1, keepdims=True) + 1.0) * w
OPS["fused_rows"] = (lambda r, n: [(*r, n), (n,)], rowy, lambda x, w: x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1.0) * w)
def rope_ref(x, c, s): return rot(x, c, s)
OPS |= {
    "rope": (lambda r, n: [(*r, 3, 64), "cos", "sin"], lambda x, c, s: C.rope(x, c, s), rope_ref),
    "rope_ip": (lambda r, n: [(*r, 3, 64), "cos", "sin"], lambda x, c, s: C.rope(x, c, s, inplace_backward=True), rope_ref),
    "ce_ip": (lambda r, n: [(*r, n), "target"], lambda x, t: C.cross_entropy(x, t, inplace_backward=True), lambda x, t: F.cross_entropy(x.reshape(-1, x.shape[-1]), t.reshape(-1))),
    "ce_smooth": (lambda r, n: [(*r, n), "target"], lambda x, t: C.cross_entropy(x, t, label_smoothing=0.1, reduction="sum"), lambda x, t: F.cross_entropy(x.reshape(-1, x.shape[-1]), t.reshape(-1), label_smoothing=0.1, reduction="sum")),
    "geglu": (lambda r, n: [(*r, 2 * n)], C.geglu, lambda x: F.gelu(x.chunk(2, -1)[0], approximate="tanh") * x.chunk(2, -1)[1]),
    "embedding": (lambda r, n: ["target_e", (20, n)], lambda i, w: C.embedding(i, w), lambda i, w: F.embedding(i, w)),
    "conv": (lambda r, n: [(2, *r[-1:], n), (n, 4), (n,)], lambda x, w, b: C.causal_conv1d(x, w, b)[0], lambda x, w, b: F.conv1d(F.pad(x.transpose(1, 2), (3, 0)), w.unsqueeze(1), b, groups=w.shape[0]).transpose(1, 2)),
    "add_layernorm": (lambda r, n: [(*r, n), (*r, n), (n,), (n,)], lambda x, y, w, b: C.add_layernorm(x, y, w, b), lambda x, y, w, b: (F.layer_norm(x + y, x.shape[-1:], w, b), x + y)),
    "mlp_silu_nobias": (lambda r, n: [(*r, n), (24, n), (16, 24)], lambda x, a, c: C.mlp(x, a, None, c, None, "silu"), lambda x, a, c: F.linear(F.silu(F.linear(x, a)), c)),
    "linear_fn": (lambda r, n: [(*r, n), (24, n), (*r, 24)], lambda x, w, s: C.linear(x, w, s, epilogue=epi), lambda x, w, s: torch.tanh(F.linear(x, w)) + s),
    "gated_post": (lambda r, n: [(*r, n), (48, n), (16, 24)], lambda x, a, c: C.gated_mlp(x, a, c, "gelu_tanh") , lambda x, a, c: F.linear(F.gelu(F.linear(x, a).chunk(2, -1)[0], approximate="tanh") * F.linear(x, a).chunk(2, -1)[1], c)),
    "attention": (lambda r, n: [(2, *r[-1:], 2, 64)] * 3, lambda q, k, v: C.attention(q, k, v, causal=True)[0], lambda q, k, v: F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True).transpose(1, 2)),
}
def epi(xp, acc, s): return xp.tanh(acc) + s
for k in list(OPS):
    try:
        r, n = (3, 5), 16
        base = []
        for sh in OPS[k][0](r, n):
            base.append(torch.rand(*r, 32) if sh in ("cos", "sin") else torch.randint(0, 16, r) if isinstance(sh, str) else torch.randn(sh))
        a, b = OPS[k][1](*base), OPS[k][2](*base)
        a, b = (a if isinstance(a, tuple) else (a,)), (b if isinstance(b, tuple) else (b,))
        assert all(torch.allclose(p, q, atol=1e-3, rtol=1e-3) for p, q in zip(a, b)), "values"
    except Exception as e:
        print("DROPPED", k, type(e).__name__, str(e)[:200]); OPS.pop(k)
POOL = [((3, 5), 16), ((3, 5), 24), ((4,), 16), ((1, 7), 16)]

def tensors_of(rng, shapes, r):
    made = []
    for s in shapes:
        if s in ("cos", "sin"): t = torch.rand(*r, 32)
        elif s == "target": t = torch.randint(0, 16, r); t.view(-1)[rng.randrange(t.numel())] = -100
        elif s == "target_e": t = torch.randint(0, 20, r)
        elif s == "target16": t = torch.randint(0, 16, r); t.view(-1)[rng.randrange(t.numel())] = -100
        else: t = torch.randn(s)
        made.append(t)
    return made

LOG = []
class Wrong(Exception): pass
def close(a, b, what, tol=2e-4):
    if (a is None) != (b is None):
        # None beside zeros is the same
        some = a if a is not None else b
        if some.abs().max() == 0: return
        raise Wrong(f"{what}: {'None' if a is None else 'there'} beside {'None' if b is None else 'there'}")
    if a is None: return
    if a.shape != b.shape: raise Wrong(f"{what}: shape {tuple(a.shape)} beside {tuple(b.shape)}")
    if a.dtype != b.dtype: raise Wrong(f"{what}: dtype {a.dtype} beside {b.dtype}")
    a, b = a.detach().double(), b.detach().double()
    if not torch.allclose(a, b, rtol=tol, atol=tol * max(1, b.abs().nan_to_num(0).max().item() if b.numel() else 1), equal_nan=True): raise Wrong(f"{what}: off by {(a - b).abs().max():.3g} of {b.abs().max():.3g}")

def tup(o): return o if isinstance(o, tuple) else (o,)

def attempt(f):
    try: return f(), None
    except Wrong: raise
    except Exception as e: return None, e

def dress(rng, base, plan):
    """Leaves and what is passed, by a plan: the same for both sides."""
    leaves, given = [], []
    for t, p in zip(base, plan):
        t = t.clone()
        if not t.is_floating_point(): leaves.append(None); given.append(t); continue
        leaf = torch.nn.Parameter(t, p["grad"]) if p["param"] else t.requires_grad_(p["grad"])
        leaves.append(leaf)
        g = leaf
        how = p["how"]
        if how == "inner": g = leaf * 1.5
        elif how == "view": g = leaf.view(leaf.shape)
        elif how == "T" and leaf.ndim >= 2: g = leaf.transpose(-1, -2).contiguous().transpose(-1, -2)
        elif how == "slice" and leaf.ndim: g = torch.cat([leaf, leaf[..., :3]], -1)[..., : leaf.shape[-1]]
        elif how == "expand" and leaf.ndim >= 2: g = leaf[:1].expand(leaf.shape)
        elif how == "neg": g = torch._neg_view(leaf)
        elif how == "detach": g = leaf.detach()
        elif how == "base": g = torch.stack([leaf, leaf])[1]
        given.append(g)
    return leaves, given

def one(rng, counts):
    name = rng.choice(list(OPS)) if not ONLY else ONLY
    shapes, ours, ref = OPS[name]
    r, n = rng.choice(POOL)
    base = tensors_of(rng, shapes(r, n), r)
    nograd = ("cos", "sin")
    plan = [dict(grad=rng.random() < 0.6 and s not in nograd, param=rng.random() < 0.4, how=rng.choice(["leaf"] * 6 + ["inner", "view", "T", "slice", "expand", "neg", "detach", "base"]) if s not in nograd else "leaf") for s in shapes(r, n)]
    for p, s in zip(plan, shapes(r, n)):
        if s in nograd: p["param"] = False
    mode = rng.choice(["plain"] * 8 + ["no_grad", "inference", "autocast", "vmap", "vmap_grad", "hooks", "hooks_clone", "save_on_cpu", "retain", "inplace_in", "inplace_out", "create", "create_const", "func_grad", "func_vjp", "jacrev", "functional_call", "thread", "checkpoint", "ckpt_re", "partial", "hook_grad", "set_data", "multi_out", "twice_same", "anomaly", "func_mode", "disp_mode", "deepcopy", "detach_then", "out_inplace_mul", "inf_tensor", "jvp", "gradgrad_ref", "compile_eager", "side_effect_grad_mode", "views_of_out", "grads_batched", "retain_mod"])
    if MODE: mode = MODE
    LOG.append((name, r, n, mode, plan))
    counts[mode] = counts.get(mode, 0) + 1
    lossw = rng.random(); cot_kind = rng.choice(["sum", "rand", "sq", "expand", "T"])
    seeds = rng.randrange(10**9)
    def cot(outs):
        g = torch.Generator().manual_seed(seeds)
        if cot_kind == "sum": return [torch.ones(()).expand(o.shape) for o in outs]
        cs = [torch.randn(o.shape, generator=g).to(o.dtype) for o in outs]
        if cot_kind == "T": cs = [c.transpose(-1, -2).contiguous().transpose(-1, -2) if c.ndim >= 2 else c for c in cs]
        if cot_kind == "expand": cs = [c[:1].expand(o.shape) if c.ndim else c for c, o in zip(cs, outs)]
        return cs
    tol = 2e-4

    def grads(outs, leaves, **kw):
        live = [o for o in outs if o.requires_grad]
        want = [l for l in leaves if l is not None and l.requires_grad]
        if not live or not want: return []
        cs = [c.to(o.dtype) for c, o in zip(cot(outs), outs) if o.requires_grad]
        return list(torch.autograd.grad(live, want, cs, allow_unused=True, **kw))

    def side(f):
        leaves, given = dress(rng, base, plan)
        vals = []
        if mode in ("plain", "partial", "multi_out", "detach_then", "grads_batched"):
            outs = tup(f(*given)); vals += outs
            if mode == "multi_out" and len(outs) > 1:
                outs = (outs[rng2.randrange(2)],)
            if mode == "grads_batched":
                live = [o for o in outs if o.requires_grad]; want = [l for l in leaves if l is not None and l.requires_grad]
                if live and want:
                    vals += torch.autograd.grad(live[:1], want, [torch.stack([torch.ones_like(live[0]), torch.full_like(live[0], 2.0)])], is_grads_batched=True, allow_unused=True)
            elif mode == "partial":
                some = [l if rng2.random() < 0.5 else None for l in leaves]
                vals += grads(outs, some)
            else: vals += grads(outs, leaves)
        elif mode == "no_grad":
            with torch.no_grad(): outs = tup(f(*given))
            vals += outs
            vals.append(torch.tensor([float(o.requires_grad) for o in outs]))
            outs = tup(f(*given)); vals += outs; vals += grads(outs, leaves)
        elif mode == "inference":
            with torch.inference_mode(): outs = tup(f(*given))
            vals += [o.clone() for o in outs]; vals.append(torch.tensor([float(o.is_inference()) for o in outs]))
            outs = tup(f(*given)); vals += outs; vals += grads(outs, leaves)
        elif mode == "inf_tensor":  # a tensor made in inference mode, used outside
            with torch.inference_mode():
                k = rng2.randrange(len(given))
                given[k] = given[k].clone()
            outs = tup(f(*given)); vals += [o.clone() for o in outs]; vals += grads(outs, leaves)
        elif mode == "autocast":
            with torch.autocast("cpu", torch.bfloat16): outs = tup(f(*given))
            vals += [o.float() for o in outs]; vals += grads(outs, leaves)
        elif mode in ("vmap", "vmap_grad"):
            st = [torch.stack([g, g * 2 if g.is_floating_point() else g]) for g in given]
            dims = [None if rng2.random() < 0.3 and i else 0 for i in range(len(st))]
            args = [s if d == 0 else s[0] for s, d in zip(st, dims)]
            outs = tup(torch.vmap(f, tuple(dims))(*args)); vals += outs
            if mode == "vmap_grad": vals += grads(outs, leaves)
        elif mode in ("hooks", "hooks_clone", "save_on_cpu"):
            ctx = {"hooks": torch.autograd.graph.saved_tensors_hooks(lambda t: t.numpy(force=True).copy() if t.is_floating_point() else t, lambda t: torch.from_numpy(t) if isinstance(t, np.ndarray) else t),
                   "hooks_clone": torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t),
                   "save_on_cpu": torch.autograd.graph.save_on_cpu()}[mode]
            with ctx: outs = tup(f(*given))
            vals += outs; vals += grads(outs, leaves)
        elif mode == "retain":
            outs = tup(f(*given)); vals += outs; vals += grads(outs, leaves, retain_graph=True); vals += grads(outs, leaves)
        elif mode == "retain_mod":  # gradients are the caller's: written over between two backwards
            outs = tup(f(*given)); g1 = grads(outs, leaves, retain_graph=True)
            vals += [g.clone() if g is not None else None for g in g1]
            for g in g1:
                if g is not None and not any(s == 0 for s in g.stride()): g.mul_(3)
            vals += grads(outs, leaves, retain_graph=True); vals += grads(outs, leaves); vals += outs
        elif mode == "inplace_in":
            outs = tup(f(*given)); k = rng2.randrange(len(given))
            with torch.no_grad():
                given[k].mul_(2) if given[k].is_floating_point() else given[k].fill_(1)
            vals += outs
            res, e = attempt(lambda: grads(outs, leaves))
            return vals, (("raise", e) if e else ("grads", res)), k
        elif mode == "inplace_out":
            outs = tup(f(*given)); k = rng2.randrange(len(outs))
            with torch.no_grad(): outs[k].mul_(2)
            res, e = attempt(lambda: grads(outs, leaves))
            return vals, (("raise", e) if e else ("grads", res)), k
        elif mode == "out_inplace_mul":
            outs = tup(f(*given)); k = rng2.randrange(len(outs))
            outs[k].mul_(2)
            vals += outs
            res, e = attempt(lambda: grads(outs, leaves))
            return vals, (("raise", e) if e else ("grads", res)), k
        elif mode == "views_of_out":
            outs = tup(f(*given))
            o = [x[0] if x.ndim else x for x in outs]
            vals += outs; vals += grads(o, leaves)
        elif mode in ("create", "create_const", "gradgrad_ref"):
            outs = tup(f(*given)); live = [o for o in outs if o.requires_grad]
            want = [l for l in leaves if l is not None and l.requires_grad] + [g for g in given if g.requires_grad and not g.is_leaf]
            if not live or not want: return vals, None, None
            g = torch.autograd.grad([(o.square() if mode != "create_const" else o).sum() for o in live], want, create_graph=True, allow_unused=True)
            vals += g
            gg = [x for x in g if x is not None and x.requires_grad]
            if gg:
                res, e = attempt(lambda: list(torch.autograd.grad([x.square().sum() for x in gg], want, allow_unused=True)))
                return vals, (("raise", e) if e else ("grads", res)), None
            return vals, ("grads", [None for _ in want]), None
        elif mode in ("func_grad", "func_vjp", "jacrev"):
            idx = [i for i, t in enumerate(base) if t.is_floating_point() and shapes(r, n)[i] not in ("cos", "sin")]
            k = rng2.choice(idx)
            def h(t):
                a = [x.detach() if x.is_floating_point() else x for x in given]; a[k] = t
                return f(*a)
            if mode == "func_grad":
                vals.append(torch.func.grad(lambda t: sum(o.sin().sum() for o in tup(h(t))))(given[k].detach()))
            elif mode == "func_vjp":
                o, pull = torch.func.vjp(h, given[k].detach()); vals += tup(o)
                cs = cot(tup(o)); vals += pull(tuple(c.to(x.dtype) for c, x in zip(cs, tup(o))) if isinstance(o, tuple) else cs[0])
                vals += pull(tuple(c.to(x.dtype) for c, x in zip(cs, tup(o))) if isinstance(o, tuple) else cs[0])
            else: vals += tup(torch.func.jacrev(lambda t: tup(h(t))[0].sum(-1) if tup(h(t))[0].ndim else tup(h(t))[0])(given[k].detach()))
        elif mode == "jvp":
            k = rng2.choice([i for i, t in enumerate(base) if t.is_floating_point()])
            def h(t):
                a = [x.detach() if x.is_floating_point() else x for x in given]; a[k] = t
                return f(*a)
            res, e = attempt(lambda: list(tup(torch.func.jvp(h, (given[k].detach(),), (torch.ones_like(base[k]),))[1])))
            return vals, (("raise", e) if e else ("grads", res)), None
        elif mode == "functional_call":
            class M(torch.nn.Module):
                def __init__(s):
                    super().__init__()
                    for i, t in enumerate(base):
                        if t.is_floating_point(): setattr(s, f"p{i}", torch.nn.Parameter(t * 0))
                def forward(s, *xs): return f(*[getattr(s, f"p{i}") if hasattr(s, f"p{i}") else x for i, x in enumerate(xs)])
            outs = tup(torch.func.functional_call(M(), {f"p{i}": g for i, g in enumerate(given) if g.is_floating_point()}, tuple(given)))
            vals += outs; vals += grads(outs, leaves)
        elif mode == "thread":
            box = []
            def work():
                outs = tup(f(*given)); box.extend(outs); box.extend(grads(outs, leaves))
            err = []
            def safe():
                try: work()
                except Exception as e: err.append(e)
            t = threading.Thread(target=safe); t.start(); t.join()
            if err: raise err[0]
            vals += box
        elif mode in ("checkpoint", "ckpt_re"):
            from torch.utils.checkpoint import checkpoint
            outs = tup(checkpoint(f, *given, use_reentrant=mode == "ckpt_re"))
            vals += outs
            if mode == "ckpt_re":
                live = [o for o in outs if o.requires_grad]
                if live:
                    torch.autograd.backward(live, [c.to(o.dtype) for c, o in zip(cot(outs), outs) if o.requires_grad])
                    vals += [l.grad for l in leaves if l is not None and l.requires_grad]
            else: vals += grads(outs, leaves)
        elif mode == "hook_grad":
            for l in leaves:
                if l is not None and l.requires_grad: l.register_hook(lambda g: g.mul(2))
            outs = tup(f(*given))
            for o in outs:
                if o.requires_grad: o.register_hook(lambda g: g.clone().mul_(3)); o.retain_grad()
            vals += outs; live = [o for o in outs if o.requires_grad]
            if live:
                torch.autograd.backward(live, [c.to(o.dtype) for c, o in zip(cot(outs), outs) if o.requires_grad])
                vals += [l.grad for l in leaves if l is not None and l.requires_grad]; vals += [o.grad for o in live]
        elif mode == "set_data":
            outs = tup(f(*given)); vals += outs; vals += grads(outs, leaves)
            for l, b in zip(leaves, base):
                if l is not None: l.data = b.clone().mul(2)
            _, given2 = leaves, [None] * 0
            outs = tup(f(*[l if l is not None else g for l, g in zip(leaves, given)])); vals += outs; vals += grads(outs, leaves)
        elif mode == "twice_same":  # one tensor for all arguments of one shape
            by = {}
            given = [by.setdefault((tuple(g.shape), g.dtype), g) for g in given]
            outs = tup(f(*given)); vals += outs; vals += grads(outs, leaves)
        elif mode == "anomaly":
            with torch.autograd.detect_anomaly(check_nan=False):
                outs = tup(f(*given)); vals += outs; vals += grads(outs, leaves)
        elif mode == "func_mode":
            class Mode(torch.overrides.TorchFunctionMode):
                def __torch_function__(s, func, types, args=(), kwargs=None): return func(*args, **(kwargs or {}))
            with Mode(): outs = tup(f(*given)); vals += outs; vals += grads(outs, leaves)
        elif mode == "disp_mode":
            from torch.utils._python_dispatch import TorchDispatchMode
            class Mode(TorchDispatchMode):
                def __torch_dispatch__(s, func, types, args=(), kwargs=None): return func(*args, **(kwargs or {}))
            with Mode(): outs = tup(f(*given)); vals += outs; vals += grads(outs, leaves)
        elif mode == "deepcopy":
            import copy
            leaves2 = [copy.deepcopy(l) if l is not None else None for l in leaves]
            outs = tup(f(*[l if l is not None else g for l, g in zip(leaves2, given)])); vals += outs; vals += grads(outs, leaves2)
        elif mode == "compile_eager":
            if rng2.random() < 0.8: outs = tup(f(*given)); vals += outs; vals += grads(outs, leaves)
            else:
                torch._dynamo.reset()
                outs = tup(torch.compile(f, backend="aot_eager")(*given)); vals += outs; vals += grads(outs, leaves)
        elif mode == "side_effect_grad_mode":
            with torch.set_grad_enabled(False):
                with torch.enable_grad(): outs = tup(f(*given))
            vals += outs; vals += grads(outs, leaves)
        return vals, None, None
    rs = rng.randrange(10**9)
    rng2 = random.Random(rs)
    want, we = attempt(lambda: side(ref))
    rng2 = random.Random(rs)
    got, ge = attempt(lambda: side(ours))
    if mode == "autocast": tol = 6e-2
    if we is not None:
        if ge is None and not isinstance(we, NotImplementedError): counts["ref raises " + mode] = counts.get("ref raises " + mode, 0) + 1
        return
    if ge is not None and ", expected 1" in str(ge):
        counts["refused strides"] = counts.get("refused strides", 0) + 1
        return
    if ge is not None:
        raise Wrong(f"raises {type(ge).__name__}: {str(ge)[:300]}")
    (wv, wt, k), (gv, gt, _) = want, got
    if len(wv) != len(gv): raise Wrong(f"{len(gv)} values beside {len(wv)}")
    for i, (a, b) in enumerate(zip(gv, wv)):
        if mode == "autocast" and a is not None and b is not None: a = a.to(b.dtype)
        close(a, b, f"value {i} of {len(wv)}", tol)
    if wt is not None and gt is not None:
        if gt[0] == "raise":
            if not isinstance(gt[1], (RuntimeError, NotImplementedError)): raise Wrong(f"odd error {type(gt[1])} {gt[1]}")
            if mode in ("out_inplace_mul",) and wt[0] == "grads": raise Wrong(f"raises, torch does not: {str(gt[1])[:200]}")
            counts["ours raises " + mode] = counts.get("ours raises " + mode, 0) + 1
            return
        if wt[0] == "raise":
            # ours gives numbers: right ones for the values of the forward?
            leaves, given = dress(rng, base, plan)
            outs = tup(ref(*given)) ; expected = grads(outs, leaves)
            for i, (a, b) in enumerate(zip(gt[1], expected)): close(a, b, f"gradient {i} where torch raises", tol)
            counts["torch raises, ours right " + mode] = counts.get("torch raises, ours right " + mode, 0) + 1
            return
        for i, (a, b) in enumerate(zip(gt[1], wt[1])): close(a, b, f"{mode} gradient {i}", tol if mode not in ("create", "create_const", "gradgrad_ref") else 2e-3)

ONLY = os.environ.get("OP"); MODE = os.environ.get("MODE")
first, count = int(sys.argv[1]), int(sys.argv[2])
counts, wrong = {}, {}
for seed in range(first, first + count):
    rng = random.Random(seed); torch.manual_seed(seed)
    for step in range(10):
        try: one(rng, counts)
        except Wrong as e:
            name, r, n, mode, plan = LOG[-1]
            key = (name, mode, str(e)[:60])
            wrong.setdefault(key, []).append((seed, step))
            if len(wrong[key]) == 1: print(f"seed {seed}.{step} {name} {r} {n} {mode} {[(p['grad'], p['param'], p['how']) for p in plan]}: {e}", flush=True)
        except Exception as e:
            print("HARNESS", seed, step, LOG[-1][:4], type(e), str(e)[:300], flush=True); traceback.print_exc()
print(counts)
print({k: len(v) for k, v in wrong.items()})
if STUB: print("kernels run", runs)
