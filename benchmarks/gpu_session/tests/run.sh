#!/usr/bin/env bash
# run.sh SECONDS: all processes on the GPU; needs session/tests/{ids/*.ids,gpuplug.py}
seconds=$1; here=$PWD/session/tests; export CUTE_OPS_CACHE_DIR=${CUTE_OPS_CACHE_DIR:-/tmp/cache}
mkdir -p $CUTE_OPS_CACHE_DIR /tmp/logs; [ -f $here/kernels.tar.xz ] && tar xJf $here/kernels.tar.xz -C $CUTE_OPS_CACHE_DIR --no-same-owner
chmod -R go-w $CUTE_OPS_CACHE_DIR
export PYTHONPATH=$here:$PYTHONPATH OMP_NUM_THREADS=1 XLA_PYTHON_CLIENT_PREALLOCATE=false
start=$(date +%s)
for ids in $here/ids/*.ids; do
  name=$(basename $ids .ids)
  files=$(cut -d: -f1 $ids | sort -u)
  IDS=$ids LOG=/tmp/logs/$name.tsv timeout -s KILL $seconds python3 -m pytest -p gpuplug -p no:cacheprovider -q -m gpu --tb=short -rf $files > /tmp/logs/$name.log 2>&1 &
done
wait
echo "took $(( $(date +%s) - start ))"
cat /tmp/logs/*.tsv | cut -f1 | sort | uniq -c | sort -rn | head -40
grep -h "^failed" /tmp/logs/*.tsv | cut -f3 | cut -c1-150 | head -60
ls $CUTE_OPS_CACHE_DIR | wc -l
(cd /tmp && tar cJf $OUT/logs.tar.xz logs)
