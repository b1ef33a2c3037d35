# LIMIT 150
# Official Llama: Liger, patched, patched + compile, untouched graph pass + compile; then kernels of the patched step.
export TORCHINDUCTOR_COMPILE_THREADS=4
python3 -c "import zipfile,glob; zipfile.ZipFile(glob.glob('$REQ/*.whl')[0]).extractall('$OUT_DIR/../liger_unpacked_$$')"
export PYTHONPATH=$OUT_DIR/../liger_unpacked_$$:$PYTHONPATH
python3 - <<'P' > $OUT_DIR/versions.txt 2>&1
import torch, importlib.util; print(torch.__version__, torch.cuda.get_device_name(), importlib.util.find_spec("liger_kernel"))
P
timeout 115 python3 benchmarks/llama_step.py --warm --out $OUT_DIR --steps 4 --rounds 6 --contenders "Liger" "ours" "ours + compile" "graph pass + compile" 2>&1
cat $OUT_DIR/llama_step.csv | cut -d, -f1-10
timeout 30 python3 $REQ/kernels.py > $OUT_DIR/kernels.txt 2>&1; head -3 $OUT_DIR/kernels.txt; tail -2 $OUT_DIR/kernels.txt
rm -rf $OUT_DIR/../liger_unpacked_$$
