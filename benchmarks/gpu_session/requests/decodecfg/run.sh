# LIMIT 75
export PYTHONPATH=$PYTHONPATH:$PWD:$REQ:$PWD/benchmarks PYTHONUNBUFFERED=1
for i in $(seq 0 19); do timeout 50 python3 $REQ/bench.py warm $i 20 > /tmp/dc_warm$i.log 2>&1 & done; wait; tail -qn1 /tmp/dc_warm*.log | cut -c1-150 | sort | uniq -c | head -5; echo "warm after $SECONDS s"
timeout 40 python3 $REQ/bench.py time
