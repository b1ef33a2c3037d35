# LIMIT 60
export PYTHONPATH=$PYTHONPATH:$PWD:$REQ:$PWD/benchmarks PYTHONUNBUFFERED=1
for i in $(seq 0 7); do timeout 50 python3 $REQ/bench.py warm $i > /tmp/bc_warm$i.log 2>&1 & done; wait; tail -qn1 /tmp/bc_warm*.log | cut -c1-150 | sort | uniq -c; echo "warm after $SECONDS s"
timeout 30 python3 $REQ/bench.py time
