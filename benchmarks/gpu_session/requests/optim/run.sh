# LIMIT 55
set -u
export PYTHONPATH=$PWD:${PYTHONPATH:-}
timeout 53 python3 -u "$REQ/optim.py" "$OUT_DIR"
