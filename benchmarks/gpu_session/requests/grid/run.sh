# LIMIT 120
set -u
export PYTHONPATH=$PWD:$PWD/benchmarks:${PYTHONPATH:-}
COLUMNS=110 timeout 118 python3 -u "$REQ/grid.py" --out "$OUT_DIR" --seconds 100
