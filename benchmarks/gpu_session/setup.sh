if [ ! -f /tmp/site/.ready ]; then
  [ -f /tmp/part1/dsl.tar.xz.00 ] || { echo "part1 is missing"; exit 9; }
  cp -r .gpu/part2 /tmp/part2
  python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target /tmp/site /tmp/part2/*.whl &
  mkdir -p /tmp/cu13; cat /tmp/part1/dsl.tar.xz.00 /tmp/part2/dsl.tar.xz.01 | xz -dc -T0 | tar x -C /tmp/cu13
  wait; cp -r /tmp/cu13/. /tmp/site/
  echo "import site; site.addsitedir('/tmp/site')" > "$(python3 -c 'import site; print(site.getsitepackages()[0])')/zz_tmp_site.pth"
  python3 -c 'import cutlass.cute, tvm_ffi, array_api_compat; print("CuTe DSL ready")' || { echo "DSL is broken"; exit 9; }
  touch /tmp/site/.ready
fi
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 XLA_PYTHON_CLIENT_PREALLOCATE=false
