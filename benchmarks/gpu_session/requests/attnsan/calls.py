"""Small calls of attention's kernels, compared with float64: plain, and for compute-sanitizer ("fast": fewer checks)."""
import math, sys, os
import torch
import cute_ops_torch
from cute_ops.ops.attention import config
from cute_ops.ops.attention.attention import declare
which = sys.argv[1]
if which == "warps":
    from tests.torch import test_torch_attention as T
    seed = int(sys.argv[2])
    config.by_warpgroups = lambda arch: False
    attend = cute_ops_torch.register(declare("attention_by_warps"))
    call = T.drawn(seed)
    try:
        T.assert_right(call, seed, "cuda", attend); print("warps", seed, call.name, "ok")
    except AssertionError as e: print("warps", seed, call.name, str(e)[:300])
    sys.exit()
fast = len(sys.argv) > 2
from tests.ops.attention_calls import Call
from tests.torch import test_torch_attention as T
def check(call, seed):
    try:
        if fast:
            given = T.tensors(call, seed, "cuda")
            leaves = [None if x is None else x.detach().requires_grad_() for x in given]
            out, lse = cute_ops_torch.attention(*leaves, **call.attrs)
            torch.autograd.grad([out, lse], [x for x in leaves if x is not None], [torch.ones_like(out), torch.ones_like(lse)])
            torch.cuda.synchronize()
        else:
            T.assert_right(call, seed, "cuda")
        print("ok", call.name, flush=True)
    except Exception as e: print("FAILED", call.name, type(e).__name__, str(e)[:300], flush=True)
C = lambda b, s, t, h, g, d, e=None, attrs=None, sinks=False, packed=False, dtype="bfloat16": Call(b, s, t, h, g, d, e or d, dtype, attrs or {}, sinks, packed)
one = {"deterministic": True}
PARTS = (
    [C(2, 300, 300, 4, 2, 128, attrs={"causal": True}), C(1, 131, 517, 4, 1, 128), C(1, 260, 260, 2, 2, 128, attrs={"causal": True, "left": 63}), C(1, 385, 385, 2, 1, 128, attrs={"causal": True, **one}), C(1, 1, 129, 2, 1, 128)],
    [C(2, 300, 300, 4, 2, 64, attrs={"causal": True}), C(1, 131, 517, 4, 1, 64, dtype="float16"), C(1, 400, 400, 2, 2, 64, attrs={"causal": True, "left": 63}), C(1, 385, 385, 2, 1, 64, attrs={"causal": True, **one}, sinks=True), C(1, 200, 200, 2, 2, 96, packed=True)],
    [C(1, 200, 200, 4, 2, 256, attrs={"causal": True}), C(1, 131, 260, 2, 1, 192, 128), C(1, 260, 260, 2, 2, 128, attrs={"causal": True, "softcap": 50.0}), C(1, 260, 131, 2, 2, 64, attrs={"softcap": 30.0}), C(1, 385, 385, 2, 1, 256)],
)
if which in "012":
    for i, call in enumerate(PARTS[int(which)]): check(call, i)
elif which == "3":  # caches
    torch.manual_seed(0)
    def caches(b, keys, g, d, page, dtype=torch.bfloat16):
        n = b * -(-keys // page) if page else b
        k, v = (torch.randn(n, page or keys, g, d, device="cuda").to(dtype) for _ in range(2))
        table = torch.randperm(n, device="cuda", dtype=torch.int32).reshape(b, -1) if page else None
        return k, v, table
    for b, keys, h, g, d, page, s, kind in ((3, 700, 8, 2, 128, 0, 1, 16), (3, 640, 8, 2, 128, 16, 1, 16), (2, 640, 8, 2, 128, 64, 4, 16), (3, 700, 8, 1, 64, 0, 1, 8), (2, 704, 8, 2, 128, 1, 1, 8), (2, 640, 8, 1, 64, 64, 1, 8), (1, 5000, 8, 2, 128, 0, 1, 8), (2, 300, 4, 2, 256, 0, 1, 16)):
        k, v, table = caches(b, keys, g, d, page, torch.float8_e4m3fn if kind == 8 else torch.bfloat16)
        q = torch.randn(b, s, h, d, device="cuda", dtype=torch.bfloat16)
        lengths = torch.tensor([keys, max(keys - 131, 0), 7][:b], device="cuda", dtype=torch.int32)
        scale = torch.ones(g, device="cuda") if kind == 8 else None
        try:
            out, lse = cute_ops_torch.decode_attention(q, k, v, lengths, table, None, scale, scale)
            torch.cuda.synchronize()
            worst = 0.0
            for i in range(b if not fast else 0):
                n = int(lengths[i])
                kk, vv = ((x[table[i].long()].flatten(0, 1) if page else x[i])[:n].double() for x in (k, v))
                kk, vv = (x.repeat_interleave(h // g, 1).transpose(0, 1) for x in (kk, vv))
                sc = q[i].double().transpose(0, 1) @ kk.transpose(1, 2) * d**-0.5
                m = torch.ones(s, n, dtype=torch.bool, device="cuda").tril(n - s)
                right = sc.masked_fill(~m, -math.inf).softmax(-1) @ vv
                worst = max(worst, (out[i].double().transpose(0, 1) - right).abs().max().item())
            print("decode", b, keys, h, g, d, page, s, kind, "worst %.2e" % worst, flush=True)
        except Exception as e: print("FAILED decode", b, keys, h, g, d, page, s, kind, str(e)[:200], flush=True)
    for page, dtype in ((0, torch.bfloat16), (16, torch.bfloat16), (64, torch.float8_e4m3fn)):
        k, v, table = caches(2, 640, 2, 128, page, dtype)
        q = torch.randn(2, 150, 8, 128, device="cuda", dtype=torch.bfloat16)
        lengths = torch.tensor([640, 411], device="cuda", dtype=torch.int32)
        scale = torch.ones(2, device="cuda") if dtype == torch.float8_e4m3fn else None
        try:
            more = {} if scale is None else {"k_scale": scale, "v_scale": scale}
            out, _ = cute_ops_torch.attention(q, k, v, causal=True, lengths=lengths, page_table=table, **more)
            torch.cuda.synchronize(); print("chunk", page, dtype, bool(out.isfinite().all()), flush=True)
        except Exception as e: print("FAILED chunk", page, str(e)[:200], flush=True)
else:  # latents
    torch.manual_seed(0)
    for b, keys, heads, page, s in ((2, 640, 16, 64, 1), (2, 700, 128, 0, 1), (1, 3000, 16, 0, 1), (2, 640, 64, 16, 2), (1, 65, 128, 0, 1), (1, 33, 16, 0, 1)):
        n = b * -(-keys // page) if page else b
        cache = torch.randn(n, page or keys, 576, device="cuda", dtype=torch.bfloat16)
        table = torch.randperm(n, device="cuda", dtype=torch.int32).reshape(b, -1) if page else None
        q = torch.randn(b, s, heads, 576, device="cuda", dtype=torch.bfloat16)
        lengths = torch.tensor([keys, keys - 30][:b], device="cuda", dtype=torch.int32)
        out, lse = cute_ops_torch.mla_decode(q, cache, lengths, table, scale=192**-0.5)
        torch.cuda.synchronize(); worst = 0.0
        for i in range(b if not fast else 0):
            m = int(lengths[i]); c = (cache[table[i].long()].flatten(0, 1) if page else cache[i])[:m].double()
            sc = q[i].double().transpose(0, 1) @ c.T * 192**-0.5
            seen = torch.ones(s, m, dtype=torch.bool, device="cuda").tril(m - s)
            right = sc.masked_fill(~seen, -math.inf).softmax(-1) @ c[:, :512]
            worst = max(worst, (out[i].double().transpose(0, 1) - right).abs().max().item())
        print("latent", b, keys, heads, page, s, "worst %.2e" % worst, flush=True)
