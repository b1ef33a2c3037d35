"""Sizes of the tensor cores' instructions, and registers by role. Integers only, for configs too."""

from typing import NamedTuple

from cute_ops.hardware import WARP as WARP

WARPGROUP = 4 * WARP  # threads
MMA_M = 64  # rows of a warpgroup's instruction
SM_REGISTERS = 65536


class RegisterBudget(NamedTuple):
    """Registers of a thread by the role of its warpgroup; ``setmaxnreg`` moves them once roles are taken.

    Attributes:
        load: of warps that issue TMA loads.
        multiply: of warpgroups that multiply and compute epilogues.
    """

    load: int
    multiply: int

    def check(self, multiplying: int) -> None:
        """Raise ValueError unless an SM has enough for one loading warpgroup and so many that multiply."""
        total = WARPGROUP * (self.load + multiplying * self.multiply)
        if total > SM_REGISTERS or self.load % 8 or self.multiply % 8:
            raise ValueError(f"{self} for {multiplying} multiplying warpgroups takes {total} of {SM_REGISTERS}")
