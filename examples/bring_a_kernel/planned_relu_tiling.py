"""The tilings of planned_relu, apart from the kernel: programs that call the op do not import the compiler."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Tiling:
    threads: int = 256
    vec: int = 8

    def validate(self, problem) -> bool:
        """Whether vectors of this many elements neither cross the end of a row nor miss their alignment."""
        size = {"float32": 4}.get(problem.dtypes["x"], 2)
        aligned = min(problem.aligns["x"], problem.aligns["out"])
        return self.vec * size <= aligned and problem.dims["n"] % self.vec == 0


TILINGS = [Tiling(threads, vec) for threads in (128, 256, 512) for vec in (8, 4, 2, 1)]
