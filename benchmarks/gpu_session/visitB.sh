#!/usr/bin/env bash
seconds=$1
(CUDA_VISIBLE_DEVICES=0 bash session/v.sh $seconds session/b0) > /tmp/lane0.txt 2>&1 &
(CUDA_VISIBLE_DEVICES=1 bash session/v.sh $seconds session/b1) > /tmp/lane1.txt 2>&1 &
wait
cat /tmp/lane0.txt /tmp/lane1.txt
find /tmp/results -type f -size +3M -delete
(cd /tmp && tar cJf $OUT/results.tar.xz results)
