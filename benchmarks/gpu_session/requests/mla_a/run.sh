# LIMIT 110
export PYTHONPATH=$PYTHONPATH:$PWD:$REQ:$PWD/benchmarks PYTHONUNBUFFERED=1
T=$(mktemp -d)
for i in $(seq 0 17); do timeout 60 python3 $REQ/bench.py warm $i > $T/warm$i.log 2>&1 & done; wait; tail -qn1 $T/warm*.log | sort | uniq -c; echo "warm after $SECONDS s"
for n in main cluster halves both; do (timeout -k 2 25 python3 $REQ/bench.py check $n > $T/check_$n.log 2>&1; echo "check $n: rc $?" >> $T/check_$n.log) & done; wait; tail -qn2 $T/check_*.log; echo "checks after $SECONDS s"
good=$(grep -l "rc 0" $T/check_*.log | sed 's/.*check_//; s/.log//'); echo "good: $good"
timeout -k 2 30 python3 $REQ/bench.py time $good
case "$good" in *both*) timeout 25 python3 benchmarks/decode.py --shapes --latent 0 1 2 3 4 --rounds 5 --out $OUT_DIR > $T/decode.log 2>&1; grep -h "^ours\|^copy" $OUT_DIR/decode.csv | cut -d, -f1-15;; esac
if which ncu > /dev/null; then
  timeout 20 ncu --clock-control none --kernel-name regex:MlaDecode --launch-count 3 --metrics sm__cycles_elapsed.max,sm__cycles_elapsed.avg.per_second,sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active,l1tex__m_xbar2l1tex_read_bytes.sum,lts__t_sectors_op_read.sum,dram__bytes_read.sum,l1tex__data_pipe_lsu_wavefronts_mem_shared.avg.pct_of_peak_sustained_elapsed python3 $REQ/bench.py ncu 2>&1 | grep -v "^==" | tail -32
fi
