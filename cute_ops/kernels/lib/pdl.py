"""Programmatic dependent launch (PDL): a kernel starts while its predecessor on the stream drains.

A kernel that is launched this way waits before it touches memory, and lets its successor start early. This holds
between two such neighbours only: next to a kernel that is launched otherwise, the usual order holds.
"""

import cutlass.cute as cute


def can_use_pdl(arch):
    """Hopper and later."""
    return int(arch.removeprefix("sm_").rstrip("af")) >= 90


def wait_for_previous(pdl):
    """Wait until all that the stream's earlier kernels wrote can be read."""
    if pdl:
        cute.arch.griddepcontrol_wait()


def let_next_start(pdl):
    if pdl:
        cute.arch.griddepcontrol_launch_dependents()
