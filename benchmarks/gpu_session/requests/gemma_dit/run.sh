# LIMIT 130
# Gemma 3 and DiT: torch.compile beside the graph pass + compile, with kernels of a step and the pass' report.
export TORCHINDUCTOR_COMPILE_THREADS=4
python3 benchmarks/model_steps.py --out $OUT_DIR --together --profile 60 --rounds 6 --steps 4 --seconds 110 --contenders "torch.compile" "graph pass + compile" --models "Gemma 3" DiT 2>&1
cut -d, -f1-12 $OUT_DIR/model_steps.csv
