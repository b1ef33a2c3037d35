# LIMIT 45
export PYTHONPATH=$PWD:$REQ:$PYTHONPATH
python3 "$REQ/check.py" "$OUT_DIR/rows.csv" 38 2>&1 | tee "$OUT_DIR/rows.log"
