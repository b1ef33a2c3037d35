# LIMIT 75
export PYTHONPATH=$PYTHONPATH:$PWD:$PWD/benchmarks PYTHONUNBUFFERED=1 PYTORCH_NO_CUDA_MEMORY_CACHING=1
T=$(mktemp -d)
for part in 3 4; do timeout 60 python3 $REQ/calls.py $part > $T/plain$part.log 2>&1 & done; wait; grep -h FAILED $T/plain*.log; echo "plain after $SECONDS s"
for tool in racecheck memcheck; do for part in 3 4; do
  (timeout 60 compute-sanitizer --tool $tool --error-exitcode 9 --print-limit 5 python3 $REQ/calls.py $part fast > $OUT_DIR/$tool$part.log 2>&1; echo "$tool part $part: rc $? $(grep SUMMARY $OUT_DIR/$tool$part.log)") &
done; done; wait
grep -h -A3 "Race reported" $OUT_DIR/racecheck*.log | cut -c1-200 | head -12; echo "end after $SECONDS s"
