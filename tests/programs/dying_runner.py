"""A runner of sweeps, see :class:`cute_ops.tools.verify.Runner`: wrong at even lengths, dead at some."""

import os
import signal


def device():
    return "cpu"


def broken():
    return False


def check(op, arrays, attrs, base, others):
    n = arrays["x"].shape[-1]
    if n % 50 == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    if n % 2 == 0:
        raise AssertionError(f"length {n}")
