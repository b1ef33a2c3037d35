# LIMIT 225
# Qwen3-MoE and Whisper, then GPT-OSS and T5: torch.compile, patched, patched + compile.
export TORCHINDUCTOR_COMPILE_THREADS=4 TORCHDYNAMO_VERBOSE=1
a() { d=$OUT_DIR/$1; mkdir -p $d; shift; python3 benchmarks/model_steps.py --out $d --together --profile 30 --rounds 4 --steps 3 --seconds 95 --contenders "torch.compile" "ours" "ours + compile" --models "$@" 2>&1; for f in $d/*.txt; do grep -n "Error\|SymNode" "$f" | tail -5; done; }
a one Qwen3-MoE Whisper-large
a two GPT-OSS T5
cat $OUT_DIR/*/model_steps.csv | cut -d, -f1-12
