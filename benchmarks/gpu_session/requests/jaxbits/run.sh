# LIMIT 105
set -u
export XLA_PYTHON_CLIENT_PREALLOCATE=false PYTHONUNBUFFERED=1 XLA_PYTHON_CLIENT_MEM_FRACTION=0.05
P="python3 -m pytest -q -p no:cacheprovider -m gpu -rfp --all"
one() { name=$1; shift; (timeout -s INT 98 $P "$@" > $OUT_DIR/$name.txt 2>&1; echo "rc $?" >> $OUT_DIR/$name.txt) & }
for part in 0 1 2 3; do
  one bits$part tests/jax/test_jax_attention.py -k "bits_are_those_of_pytorch and (${part}])"
  one functions$part tests/jax/test_jax_attention.py tests/jax/test_jax_attention_packed.py -k "(functions_give or packed) and pytorch and (${part}])"
done
for lane in 0 1 2 3 4 5; do
  (PYTHONPATH=$PWD:${PYTHONPATH:-} timeout 99 python3 $REQ/expressions.py $lane 6 84 > $OUT_DIR/expressions$lane.txt 2>&1) &
done
wait
for f in bits0 bits1 bits2 bits3 functions0 functions1 functions2 functions3; do echo "== $f $(grep -E "^(FAILED|ERROR|PASSED)|passed|failed|rc |^E  |Interrupt" $OUT_DIR/$f.txt | cut -c1-200 | tail -6 | tr '\n' ';')"; done
for lane in 0 1 2 3 4 5; do grep -E "WRONG|compile|lane|Error" $OUT_DIR/expressions$lane.txt | cut -c1-400 | tail -8; done
