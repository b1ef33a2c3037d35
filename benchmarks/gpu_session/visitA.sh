#!/usr/bin/env bash
# visitA.sh SECONDS TESTS: lane 0 on card 0; tests, then lane 1 on card 1
seconds=$1; tests=$2; root=$PWD; export CUTE_OPS_CACHE_DIR=/tmp/cache; mkdir -p /tmp/cache /tmp/results
tar xJf session/tests/kernels.tar.xz -C /tmp/cache --no-same-owner; rm -f session/tests/kernels.tar.xz
(CUDA_VISIBLE_DEVICES=0 bash session/v.sh $seconds session/a0) > /tmp/lane0.txt 2>&1 &
(export CUDA_VISIBLE_DEVICES=1
 (export REQ=$root/session/gctest OUT_DIR=/tmp/results/gctest; mkdir -p $OUT_DIR; timeout -k 5 -s INT $tests bash $REQ/run.sh > $OUT_DIR/log.txt 2>&1; echo "rc=$?" >> $OUT_DIR/log.txt) &
 bash session/tests/run.sh $tests > /tmp/tests.txt 2>/dev/null; pkill -9 -f scratch/gctest
 bash session/v.sh $((seconds - tests - 5)) session/a1 > /tmp/lane1.txt 2>&1) &
wait
cat /tmp/lane0.txt /tmp/lane1.txt; grep -v "Killed\|# collected" /tmp/tests.txt | cut -c1-140 | head -60
find /tmp/results -type f -size +3M -delete
(cd /tmp && tar cJf $OUT/results.tar.xz results); mv /tmp/results /tmp/results_a
