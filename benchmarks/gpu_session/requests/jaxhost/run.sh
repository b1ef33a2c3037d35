# LIMIT 75
set -u
export PYTHONUNBUFFERED=1
timeout 72 python3 $REQ/host.py 2>&1 | grep -v Warning | tee $OUT_DIR/host.txt
