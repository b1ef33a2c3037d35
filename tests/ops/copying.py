"""Kernels for the tests of the cache and the worker: one that works, and some that fail on purpose."""

import os
import sys
import time
from pathlib import Path

import cutlass.cute as cute


class Copy:
    """out = x, one thread block a row."""

    def __init__(self, variant):
        self.n = variant.dims["n"]

    @cute.kernel
    def kernel(self, mX: cute.Tensor, mOut: cute.Tensor):
        tidx, _, _ = cute.arch.thread_idx()
        row, _, _ = cute.arch.block_idx()
        for i in range(tidx, self.n, 32):
            mOut[row, i] = mX[row, i]

    @cute.jit
    def __call__(self, mX: cute.Tensor, mOut: cute.Tensor, stream):
        self.kernel(mX, mOut).launch(grid=[mX.shape[0], 1, 1], block=[32, 1, 1], stream=stream)


class Broken(Copy):
    def __init__(self, variant):
        raise ValueError("this kernel is broken on purpose")


class Telling(Copy):
    """Fails with its threads, and with what of this package is imported, once the entry is traced."""

    @cute.jit
    def __call__(self, mX: cute.Tensor, mOut: cute.Tensor, stream):
        imported = [name for name in sys.modules if name.split(".")[0] == "cute_ops"]
        threads = [*Path("/proc/self/task").iterdir()]
        raise ValueError(f"threads: {len(threads)}, imported: {imported}")


class Aborting(Copy):
    def __init__(self, variant):
        print("about to abort", flush=True)
        os.abort()


class Slow(Copy):
    """Takes longer than a client waits before it looks whether its compiler lives."""

    def __init__(self, variant):
        super().__init__(variant)
        print("slow kernel begins", flush=True)
        time.sleep(1.5)


class Hanging(Copy):
    """Tells in a file which process compiles it, the first time that it is compiled, and hangs."""

    def __init__(self, variant):
        super().__init__(variant)
        path = Path(os.environ["CUTE_OPS_TEST_BEGUN"])
        if not path.exists():
            path.with_suffix(".part").write_text(str(os.getpid()))
            path.with_suffix(".part").rename(path)
            time.sleep(600)


class Meeting(Copy):
    """Waits until a second process compiles one of these, too."""

    def __init__(self, variant):
        super().__init__(variant)
        folder = Path(os.environ["CUTE_OPS_TEST_MEETING"])
        (folder / f"{os.getpid()}.met").touch()
        deadline = time.monotonic() + 200
        while len(list(folder.glob("*.met"))) < 2:
            if time.monotonic() > deadline:
                raise TimeoutError("nobody else came")
            time.sleep(0.02)
