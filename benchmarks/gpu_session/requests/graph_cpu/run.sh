# LIMIT 80
# Drawn graphs on the host's 16 cores (no GPU): torch 2.11, correctness only.
set -u
export OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES= TORCHINDUCTOR_COMPILE_THREADS=1
for k in $(seq 0 14); do
  timeout 70 python3 -u -W ignore -m tests.torch.drawn_graphs --first $((700000 + k * 10000)) --count 9999 > $OUT_DIR/drawn_$k.log 2>&1 &
done
wait
cat $OUT_DIR/drawn_*.log | grep -c '^seed .*: graph' | sed 's/$/ graphs drawn/'
cat $OUT_DIR/drawn_*.log | grep -c '^refused: ' | sed 's/$/ refused by torch/'
grep -h -E '^seed [0-9]+: [A-Z][A-Za-z]*(Error|Exception|Failed|Unsupported)?: ' $OUT_DIR/drawn_*.log | cut -c1-1200
tail -qn 1 $OUT_DIR/drawn_0.log
python3 -c "import torch; print(torch.__version__)"
