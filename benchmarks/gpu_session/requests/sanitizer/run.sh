# LIMIT 110
set -u
export PYTHONPATH=$PWD:${PYTHONPATH:-}
timeout 106 python3 -u "$REQ/race.py" | tee "$OUT_DIR/log.txt"
