"""The final configs of rows and group norm, alone: shares of a copy."""
import sys
sys.argv = ["check", "-", sys.argv[1] if len(sys.argv) > 1 else "rows.csv", sys.argv[2] if len(sys.argv) > 2 else "30"]
from contest import *
from cute_ops.ops.norm import group_norm as g
POINTS, A = [], Array
def P(op, n, d="fwd", **k):
    p = rows(op, n, d, **k)
    POINTS.append((f"{op} {d} {p.rows}x{n} " + " ".join(f"{a}={b}" for a, b in k.items()), p.binding(d), []))
def last(b, m, c, gr, silu, bwd, dt="bfloat16"):
    x = A((b, m, c), dt)
    ins = {"x": x, "weight": A((c,), dt), "bias": A((c,), dt)}
    if bwd:
        ins |= {"dy": x, "mean": A((b, gr), "float32"), "rstd": A((b, gr), "float32")}
        bd = bind(g.group_norm_examples_bwd, {k: ins[k] for k in g.group_norm_examples_bwd.inputs}, {"silu": silu})
    else:
        bd = bind(g.group_norm_examples, ins, {"silu": silu, "groups": gr, "eps": 1e-5})
    POINTS.append((f"last {'bwd' if bwd else 'fwd'} {b}x{m}x{c} silu={silu}", bd, []))
for n in (36864, 61440, 82000): P("row_layernorm", n, "bwd", mb=256)
for n in (1039, 1501, 5001): P("row_rms", n)
for n in (2021, 5001): P("row_layernorm", n)
P("row_capped_log_softmax", 4097, dtype="float32")
P("row_capped_log_softmax", 2051)
for n in (534, 1001, 8001): P("divergence", n)
for n in (534, 1024, 2048, 4096, 8001): P("divergence", n, "bwd")
P("row_tempered_softmax", 1039); P("row_log_sum_exp", 835); P("row_gated_rms", 5001); P("gelu_add", 54301); P("gelu_add", 109150)
for n in (31861, 53891, 171000, 171001): P("silu_mul_fp8", n)
P("layernorm", 6854, weight="float32"); P("layernorm", 8001); P("cross_entropy_metrics", 1072); P("cross_entropy_metrics", 576)
last(24, 4096, 320, 32, False, False); last(24, 4096, 320, 32, True, False); last(192, 256, 1280, 32, True, False)
if __name__ == "__main__":
    main(POINTS)
