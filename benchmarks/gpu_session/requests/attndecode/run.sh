# LIMIT 100
export PYTHONPATH=$PYTHONPATH:$PWD:$PWD/benchmarks PYTHONUNBUFFERED=1 XLA_PYTHON_CLIENT_PREALLOCATE=false
T=$(mktemp -d)
for i in $(seq 0 18); do (sleep $((i / 10 * 14)); timeout 60 python3 benchmarks/decode.py --shapes $i --latent --rounds 1 --out $T/w$i > $T/w$i.log 2>&1) & done
for i in 0 1 4; do (sleep 14; timeout 60 python3 benchmarks/decode.py --shapes --latent $i --rounds 1 --out $T/l$i > $T/l$i.log 2>&1) & done
wait; echo "warm after $SECONDS s"
COLUMNS=220 python3 benchmarks/decode.py --out $OUT_DIR --rounds 5 > $OUT_DIR/view.log 2>&1 || tail -3 $OUT_DIR/view.log
python3 - <<'P'
import csv, os
for r in csv.DictReader(open(os.environ["OUT_DIR"] + "/decode.csv")):
    if r["contender"] in ("ours", "ours, float8", "ours, batch-invariant", "SDPA", "ours, JAX") and r["status"] == "ok":
        print(r["contender"], r["batch"], "x", r["keys"], r["heads"], r["kv_heads"], "d" + r["headdim"], "page", r["page"], "q", r["queries"], r["us"], "us of copy", r["of_copy"], "tflops", r["tflops"], "host", r["host_us"], "err", r["error"])
P
