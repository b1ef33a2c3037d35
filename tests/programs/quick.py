"""Kernels of which only the constructors run: they report what a compile process sees, or end it, in milliseconds.

The compiler beside them, ``without_compiler``, is an empty package.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path


def begin():
    """Tell the test that a compile has begun, and which process it is."""
    path = Path(os.environ["CUTE_OPS_TEST_BEGUN"])
    path.with_suffix(".part").write_text(str(os.getpid()))
    path.with_suffix(".part").rename(path)
    return path


class Raising:
    """Its error names the variant: whose answer came."""

    def __init__(self, variant):
        raise ValueError(f"n is {variant.dims['n']}")


class Waiting:
    """Takes until the test has deleted the file that tells of its beginning."""

    def __init__(self, variant):
        path, deadline = begin(), time.monotonic() + 200
        while path.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        raise ValueError(f"n is {variant.dims['n']}")


class Spinning:
    def __init__(self, variant):
        begin()
        while True:
            pass


class Telling:
    """Its error says what the process imports from, and how it is set."""

    def __init__(self, variant):
        import cute_ops

        ignored = [number for number in signal.Signals if signal.getsignal(number) == signal.SIG_IGN]
        told = {
            "json": json.__file__, "cute_ops": cute_ops.__file__, "cwd": str(Path.cwd()), "path": sys.path,
            "user": os.geteuid(), "ignored": [number.name for number in ignored],
            "blocked": len(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        }  # fmt: skip
        raise ValueError(json.dumps(told))


class Leaving:
    def __init__(self, variant):
        sys.exit(0)


class Dying:
    def __init__(self, variant):
        os.abort()


class Chatting:
    """Prints more than a pipe holds, and goes on."""

    def __init__(self, variant):
        for i in range(100_000):
            print("a line of the kernel's", i)
        raise ValueError(f"n is {variant.dims['n']}")


class Parting:
    """Dies, and leaves a child that holds its pipes."""

    def __init__(self, variant):
        if os.fork() == 0:
            begin()
            time.sleep(600)
            os._exit(0)
        os.abort()
