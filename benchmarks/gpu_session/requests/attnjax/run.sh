# LIMIT 110
export SITE=$(mktemp -d)
python3 - <<'P'
import glob, lzma, os, tarfile, zipfile
R, S = os.environ["REQ"], os.environ["SITE"]
for w in glob.glob(R + "/*.whl"): zipfile.ZipFile(w).extractall(S)
for t in ("tokamax", "fa3"): tarfile.open(f"{R}/{t}.tar.xz").extractall(S)
n = "flash_api.cpython-312-x86_64-linux-gnu.so"
os.makedirs(S + "/flash_attn3_jax_lib", exist_ok=True)
open(f"{S}/flash_attn3_jax_lib/{n}", "wb").write(lzma.open(f"{R}/{n}.xz").read())
os.makedirs(S + "/xprof/cli/tools")  # a profiler, which attention does not use
for p in ("xprof", "xprof/cli", "xprof/cli/tools"): open(f"{S}/{p}/__init__.py", "w").write("get_kernel_stats_tool = None\n")
P
echo "unpacked after $SECONDS s"
export PYTHONPATH=$PYTHONPATH:$PWD:$PWD/benchmarks:$SITE PYTHONUNBUFFERED=1 XLA_PYTHON_CLIENT_PREALLOCATE=false
timeout 100 python3 $REQ/bench.py $OUT_DIR
