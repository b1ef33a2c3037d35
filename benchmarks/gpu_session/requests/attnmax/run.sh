# LIMIT 80
export PYTHONPATH=$PYTHONPATH:$PWD:$REQ:$PWD/benchmarks PYTHONUNBUFFERED=1
for i in $(seq 0 19); do timeout 50 python3 $REQ/bench.py warm $i > /tmp/max_warm$i.log 2>&1 & done; wait; tail -qn1 /tmp/max_warm*.log | sort | uniq -c | head -3; echo "warm after $SECONDS s"
timeout 30 python3 $REQ/bench.py time
if which ncu > /dev/null; then
  timeout 20 ncu --clock-control none --kernel-name regex:AttentionFwd --launch-skip 2 --launch-count 2 --metrics sm__cycles_elapsed.avg,sm__inst_issued.avg.per_cycle_active,sm__pipe_alu_cycles_active.avg.pct_of_peak_sustained_active,sm__pipe_fma_cycles_active.avg.pct_of_peak_sustained_active,sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active,sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active,sm__cycles_elapsed.avg.per_second python3 $REQ/bench.py ncu 2>&1 | grep -v "^==" | tail -24
fi
