# LIMIT 100
set -u
export TORCHINDUCTOR_COMPILE_THREADS=7
chain() {  # name, with the pass or without
  local caches=$OUT_DIR/../warm_$1
  mkdir -p $caches
  for run in cold warm again; do
    CUTE_OPS_CACHE_DIR=$caches/cute TORCHINDUCTOR_CACHE_DIR=$caches/inductor TRITON_CACHE_DIR=$caches/triton \
      timeout 85 python3 -W ignore $REQ/warm.py $1 $run 2> $OUT_DIR/$1_$run.err | tee -a $OUT_DIR/warm.txt || tail -3 $OUT_DIR/$1_$run.err
  done
  rm -rf $caches
}
chain plain & chain pass &
wait
echo "model: Llama of 4 layers, hidden 2048, head of 32000, [2, 1024] bf16 training; seconds of the first step, and kernels"
sort $OUT_DIR/warm.txt
