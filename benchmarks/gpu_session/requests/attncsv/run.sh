# LIMIT 185
export SITE=$(mktemp -d)
python3 - <<'P'
import glob, os, zipfile
for w in glob.glob(os.environ["REQ"] + "/*.whl"): zipfile.ZipFile(w).extractall(os.environ["SITE"])
P
export PYTHONPATH=$PYTHONPATH:$PWD:$PWD/benchmarks:$SITE PYTHONUNBUFFERED=1 FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED=1 FLASH_ATTENTION_CUTE_DSL_CACHE_DIR=$SITE/fa4
for i in $(seq 0 14); do timeout 80 python3 $REQ/bench.py warm $i 15 > $SITE/warm$i.log 2>&1 & done; wait
echo "warm after $SECONDS s"; grep -h "failed\|Error" $SITE/warm*.log | sort | uniq -c | head -8
LEFT=$((172 - SECONDS)) python3 $REQ/bench.py time $OUT_DIR
