# Source it: quack and what it needs on the path, as if in site-packages, which quack's digests of epilogues ask for.
mkdir -p /tmp/q
if [ ! -e /tmp/q/site-packages ] && [ ! -e /tmp/q/none ]; then
  found=$(python3 -c 'import os, nvidia_cutlass_dsl as n; print(os.path.dirname(n.__path__[0]))')
  case $found in */site-packages*|*/dist-packages*) touch /tmp/q/none;; *) ln -sfn "$found" /tmp/q/site-packages;; esac
  mkdir -p /tmp/q2/site-packages && (cd /tmp/q2/site-packages && for w in "$REQ"/*.whl; do python3 -m zipfile -e "$w" .; done)
fi
OLD=$PYTHONPATH
export PYTHONPATH=$PWD:/tmp/q2/site-packages
[ -e /tmp/q/site-packages ] && PYTHONPATH=$PYTHONPATH:/tmp/q/site-packages
PYTHONPATH=$PYTHONPATH:$OLD
python3 - <<'P' || { echo "quack does not import: without it"; export PYTHONPATH=$OLD; }
import cutlass, quack, os
print("cutlass", os.path.dirname(cutlass.__file__), "quack", quack.__file__)
from quack.linear import linear_act_func, linear_func
from quack.mlp import mlp_func
P
