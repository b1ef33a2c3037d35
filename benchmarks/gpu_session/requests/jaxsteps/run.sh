# LIMIT 150
set -u
export CUTE_OPS_CACHE_DIR_SHARED=$CUTE_OPS_CACHE_DIR
export CUTE_OPS_CACHE_DIR=/tmp/cache_jaxsteps   # cold, for first calls
export PYTHONUNBUFFERED=1
t() { echo "== $1 at $SECONDS s"; }
t nnx_cold; timeout 60 python3 $REQ/nnx_gpt.py fuse 2>&1 | tail -8 | tee $OUT_DIR/nnx_cold.txt
t equinox; timeout 75 python3 benchmarks/fuse_step.py --out $OUT_DIR --models equinox --contenders XLA fuse --rounds 5 --steps 4 2>&1 | tail -12
t optax; timeout 70 python3 benchmarks/optax_decoder.py --out $OUT_DIR --rounds 5 --steps 6 2>&1 | tail -12
t stories; timeout 70 python3 benchmarks/fuse_step.py --out $OUT_DIR --models stories15m --contenders XLA fuse --rounds 5 --steps 4 2>&1 | tail -12
t nnx_warm; timeout 45 python3 $REQ/nnx_gpt.py fuse 2>&1 | tail -8 | tee $OUT_DIR/nnx_warm.txt
t end
cp -rn /tmp/cache_jaxsteps/. $CUTE_OPS_CACHE_DIR_SHARED/ 2>/dev/null
cut -d, -f1-13 $OUT_DIR/fuse_step.csv $OUT_DIR/optax_decoder.csv; cat $OUT_DIR/nnx_cold.txt $OUT_DIR/nnx_warm.txt
