# LIMIT 70
set -u
export PYTHONPATH=$PWD:${PYTHONPATH:-}
timeout 66 python3 -u "$REQ/gc_captures.py" | tee "$OUT_DIR/log.txt"
