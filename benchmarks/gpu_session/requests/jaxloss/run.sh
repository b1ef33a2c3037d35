# LIMIT 70
set -u
export PYTHONUNBUFFERED=1
timeout 67 python3 $REQ/loss.py 2>&1 | grep -v Warning | tee $OUT_DIR/loss.txt
