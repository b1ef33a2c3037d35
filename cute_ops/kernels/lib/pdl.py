"""Launching a kernel while its predecessor on the stream drains.

A chained kernel may start early, so it waits before it touches memory, and lets its successor start early in turn.
Both are promises between neighbours only: beside a kernel that is not chained, the usual order holds.
"""

import cutlass.cute as cute


def can_chain(arch):
    """Hopper and later."""
    return int(arch.removeprefix("sm_").rstrip("af")) >= 90


def wait_for_previous(chained):
    """Everything the stream's earlier kernels wrote is there after this."""
    if chained:
        cute.arch.griddepcontrol_wait()


def let_next_start(chained):
    if chained:
        cute.arch.griddepcontrol_launch_dependents()
