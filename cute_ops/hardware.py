"""Facts about GPUs: architectures, and the limits of an SM and of a CTA.

Source: CUDA C++ Programming Guide, technical specifications per compute capability.
"""

from __future__ import annotations

from typing import NamedTuple

WARP, MAX_THREADS, MAX_REGISTERS = 32, 1024, 255  # threads; of a CTA; of a thread
VECTOR_BYTES = 16  # the widest load and store of one thread
_REGISTERS, _REGISTER_UNIT = 65_536, 256  # of an SM; the unit in which a warp's are allocated
_RESERVED_SHARED, _SHARED_UNIT = 1024, 128  # bytes that the system keeps of each CTA's shared memory; allocated at once


class SM(NamedTuple):
    """The resources of one SM of an architecture.

    Attributes:
        number: SMs of the usual GPU, for building on machines without one.
        threads: the most resident threads.
        ctas: the most resident CTAs.
        shared: bytes of shared memory for all CTAs.
        cluster: CTAs of the largest cluster.
    """

    number: int
    threads: int
    ctas: int
    shared: int
    cluster: int

    @property
    def shared_per_cta(self) -> int:
        """Bytes of shared memory that one CTA may take."""
        return self.shared - _RESERVED_SHARED


ARCHES = {
    "sm_80": SM(108, 2048, 32, 167_936, 1), "sm_86": SM(84, 1536, 16, 102_400, 1),
    "sm_89": SM(128, 1536, 24, 102_400, 1),
    "sm_90a": SM(132, 2048, 32, 233_472, 16), "sm_100a": SM(148, 2048, 32, 233_472, 16),
    "sm_103a": SM(148, 2048, 32, 233_472, 16), "sm_120a": SM(170, 1536, 24, 102_400, 8),
}  # fmt: skip
# By NVIDIA's list of compute capabilities.
GPUS = {
    "sm_80": "A100, A30", "sm_86": "A10, A40, RTX 30", "sm_89": "L4, L40, RTX 40", "sm_90a": "H100, H200, GH200",
    "sm_100a": "B200, GB200", "sm_103a": "B300, GB300", "sm_120a": "RTX 50, RTX PRO Blackwell",
}  # fmt: skip


def sm(arch: str) -> int:
    """``sm_90a`` -> ``90``."""
    return int(arch.removeprefix("sm_").rstrip("af"))


def arch_of(major: int, minor: int) -> str | None:
    """The architecture of a compute capability; None where no kernel is built for it."""
    return next((arch for arch in ARCHES if sm(arch) == 10 * major + minor), None)


def occupancy(arch: str, threads: int, registers: int, shared: int) -> int:
    """CTAs that fit an SM at once; ``shared`` is static and dynamic shared memory in bytes."""
    limits = ARCHES[arch]
    warps = -(-threads // WARP)
    per_warp = -(-registers * WARP // _REGISTER_UNIT) * _REGISTER_UNIT
    return min(
        limits.ctas, limits.threads // (warps * WARP), _REGISTERS // (per_warp * warps),
        limits.shared // (-(-shared // _SHARED_UNIT) * _SHARED_UNIT + _RESERVED_SHARED),
    )  # fmt: skip


def own_shared(arch: str, shared: int) -> int:
    """A kernel's static shared memory without the system's share, which cubins include from Hopper on."""
    return max(shared - (_RESERVED_SHARED if sm(arch) >= 90 else 0), 0)
