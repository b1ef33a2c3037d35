# LIMIT 85
set -u
export OMP_NUM_THREADS=4
export PYTHONPATH=$PWD:$PWD/benchmarks:${PYTHONPATH:-}
timeout 83 python3 -u "$REQ/prof.py" "$OUT_DIR"
