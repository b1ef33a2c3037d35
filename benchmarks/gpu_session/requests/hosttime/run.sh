# LIMIT 60
set -u
export PYTHONPATH=$PWD:$PWD/benchmarks:${PYTHONPATH:-}
COLUMNS=110 timeout 58 python3 -u benchmarks/host_time.py --rounds 15 --out "$OUT_DIR" --only 'cute_ops_(torch|jax)\.(mlp|gated_mlp|rmsnorm_linear|linear_add_rmsnorm|qkv_rope|linear_cross_entropy)(,|$)|^cute_ops_torch.rmsnorm$|^torch.ops.cute.rmsnorm$|^cute_ops_torch.linear, with a bias|^F.linear, with|linear_gelu|^F.gelu'
uptime
