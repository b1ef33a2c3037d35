"""Subtiles of an output whose rows TMA cannot take, since they do not begin at vectors: stored by threads."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int16, Int32, Int64

SECTOR = 32  # bytes of memory that are written at once
WORDS = {2: Int16, 4: Int32, 8: Int64}  # by their bytes


class Subtile(NamedTuple):
    """A subtile of an output, in shared memory and in memory.

    Attributes:
        sD: stages of subtiles, whose swizzle has so many ``bits``.
        gD: the subtile in memory.
        shape: rows and columns of a subtile.
        size: bytes of an element, and of a word, which rows consist of.
        stages: the subtile's stage, and that of the subtile before.
        room: rows and columns of the output from the subtile's first element on.
        first, last: whether it is the first and the last one of a tile's row.
    """

    sD: Any
    bits: int
    gD: Any
    shape: tuple[int, int]
    size: tuple[int, int]
    stages: tuple[Any, Any]
    room: tuple[Any, Any]
    first: bool
    last: bool

    @classmethod
    def of(cls, subtiles, tensor, output, sD, tile, i):
        """The i-th subtile of a tile of an output."""
        at, across, whole = subtiles.coordinate(tile.coordinate, i), subtiles.across, output.tensor.shape
        origin = cute.local_tile(cute.make_identity_tensor(whole), subtiles.shape, at)[0, 0]
        return cls(
            sD, output.layout.inner.num_bits, cute.local_tile(output.tensor, subtiles.shape, at), subtiles.shape,
            (tensor.key.itemsize, tensor.word), (subtiles.stage(tile, i), subtiles.stage(tile, max(i - 1, 0))),
            (whole[0] - origin[0], whole[1] - origin[1]), i % across == 0, i % across == across - 1,
        )  # fmt: skip

    def store(self, thread, threads):
        """Store it, by these threads, in words that its rows' alignment allows.

        Memory takes parts of sectors at a fraction of its rate. So a row is stored from where a sector begins: its
        last elements wait for the next subtile, which stores them out of the stage before its own.
        """
        (rows, columns), (itemsize, word) = self.shape, self.size
        # Then, of a row's last subtile, the words that no other one stores.
        for more in (False, True) if self.last else (False,):
            wide = (SECTOR if more else columns * itemsize) // word
            step = threads // wide
            # Rows so many apart lie alike in their sectors, and are swizzled alike.
            apart = max(SECTOR // itemsize, step)
            further = Int64(cute.crd2idx((apart, 0), self.gD.layout)) * itemsize
            for first in range(0, apart, step):
                row = thread // wide + first
                address = self.gD.iterator.toint() + Int64(cute.crd2idx((row, 0), self.gD.layout)) * itemsize
                past = (Int32(address) & (SECTOR - 1)) // itemsize
                column = thread % wide * (word // itemsize) + (columns - past if more else -past)
                inside, of, stage = column < self.room[1], column, self.stages[0]
                if more:
                    inside = inside & (column < columns)
                elif self.first:
                    inside = inside & (column >= 0)
                else:
                    of = cutlass.select_(column < 0, column + columns, column)
                    stage = cutlass.select_(column < 0, self.stages[1], stage)
                source, target = self._address(row, of, stage), address + Int64(column) * itemsize
                each = apart * columns * itemsize
                words = [_word(word, source + k * each) for k in range(rows // apart)]
                for k, value in enumerate(words):
                    _store_word(word, inside & (row + k * apart < self.room[0]), target, value)
                    target += further

    def _address(self, row, column, stage):
        """The address in shared memory of an element."""
        found = self.sD.iterator.toint() + cute.crd2idx((row, column, stage), self.sD.layout) * self.size[0]
        return found ^ ((found >> 7 & (1 << self.bits) - 1) << 4)


def _word(size, address):
    """A word of so many bytes in shared memory."""
    pointer = cute.make_ptr(WORDS[size], address, cute.AddressSpace.smem, assumed_align=size)
    return cute.make_tensor(pointer, cute.make_layout(1))[0]


def _store_word(size, valid, address, word):
    """Store a word if ``valid``, without a branch: the compiler would compute each address anew in its own."""
    cute.arch.inline_ptx(f"st.global.b{8 * size} [{{$r0}}], {{$r1}};", read_only_args=[address, word], predicate=valid)
