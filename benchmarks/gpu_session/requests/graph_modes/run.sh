# LIMIT 110
set -u
python3 $REQ/modes.py --seconds 92 --workers 12 --out $OUT_DIR
