"""For programs that tests start as root: become another user, who can still read the checkout and the interpreter."""

from __future__ import annotations

import ctypes
import os
import struct

KEEP_CAPABILITIES, AMBIENT, RAISE = 8, 47, 2  # of prctl
CAPSET, VERSION = 126 if os.uname().machine == "x86_64" else 91, 0x20080522
DAC_OVERRIDE = 1


def become(user: int) -> None:
    """Give up all of root's rights but one, to enter and read any folder: homes, where clones lie, usually keep others
    out. The programs that this process starts have it, too.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    os.setgroups([])
    os.setresgid(user, user, user)
    libc.prctl(KEEP_CAPABILITIES, 1, 0, 0, 0)
    os.setresuid(user, user, user)
    bit = 1 << DAC_OVERRIDE
    # Effective, permitted and inheritable, of the first 32 capabilities and of the others.
    if libc.syscall(CAPSET, struct.pack("=Ii", VERSION, 0), struct.pack("=6I", bit, bit, bit, 0, 0, 0)):
        raise OSError(ctypes.get_errno(), "capset")
    if libc.prctl(AMBIENT, RAISE, DAC_OVERRIDE, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")
