#!/usr/bin/env bash
# v.sh SECONDS DIR: the requests of DIR in the order of DIR/order, each with its LIMIT, until SECONDS are over
total=$1; dir=$2; start=$(date +%s); root=$PWD
export CUTE_OPS_CACHE_DIR=/tmp/cache; mkdir -p /tmp/cache /tmp/results
export TORCHINDUCTOR_CACHE_DIR=/tmp/inductor_$(basename $dir)
for name in $(cat $dir/order); do
  export REQ=$root/$dir/$name OUT_DIR=/tmp/results/$name; mkdir -p $OUT_DIR
  limit=$(sed -n 's/^# LIMIT \([0-9]*\).*/\1/p' $REQ/run.sh | head -1); limit=${limit:-60}
  left=$(( total - ( $(date +%s) - start ) ))
  [ $left -gt 10 ] || { echo "## $name: no time left"; continue; }
  [ $limit -lt $left ] || limit=$left
  tree=$root
  if [ -f $REQ/change.patch ]; then
    tree=/tmp/tree_$name; mkdir -p $tree; (tar c --exclude=.gpu --exclude=session --exclude=.git .) | tar x -C $tree
    (cd $tree && git init -q . 2>/dev/null; git apply --whitespace=nowarn $REQ/change.patch) || { echo "## $name: patch does not apply"; continue; }
  fi
  begin=$(date +%s)
  (cd $tree && PYTHONPATH=$tree:${PYTHONPATH#$root:} timeout -k 5 -s INT $limit bash $REQ/run.sh) > $OUT_DIR/log.txt 2>&1
  rc=$?
  pkill -9 -f "$REQ" 2>/dev/null
  echo "## $name rc=$rc $(( $(date +%s) - begin )) s of $limit; tail:"; tail -n ${TAIL:-3} $OUT_DIR/log.txt | cut -c1-160
done
echo "$dir took $(( $(date +%s) - start ))"
