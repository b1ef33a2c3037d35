"""What the emulator of PTX refuses, as a card does: instructions, each beside one that differs little and is right."""

from __future__ import annotations

import numpy as np
import pytest

from tests.emulator import ptx_sm90
from tests.emulator.launches import Launch

MEMORY, LAST = 1 << 32, ptx_sm90.SHARED_BYTES
OF_TWO = "mbarrier.init.shared.b64 [1024], 1; mbarrier.arrive.expect_tx.shared.b64 %rd1, [1024], {bytes}; "
ADDED = "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [4294967296], [{at}], {bytes}; "
READ = "cp.async.bulk.commit_group; cp.async.bulk.wait_group.read 0;"
WAITED = "await.b32 [1024], 0;"
BULK = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{to}], [{of}], {bytes}, [1024]; "
TILE = "cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes [{to}], [map, {{{at}, 1}}], [1024]; "
STORED = "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [map, {{{at}, 1}}], [{to}]; "
PRODUCT = "multiply.sync.aligned.m64n8k16.f32.bf16.bf16 {{%f1, %f2, %f3, %f4}}, 0, {b}, 1, 0, 0;"


def run(body: str) -> None:
    """One warp, in which every thread executes each instruction but those that only one may, beside 4 KB of memory."""
    alone = ("mbarrier", "cp.reduce", "cp.async.bulk.shared", "cp.async.bulk.tensor")
    lines = [line.strip() for line in body.split(";") if line.strip()]
    text = ";\n".join(f"@%p1 {line}" if line.startswith(alone) else line for line in lines)
    kernel = ptx_sm90.Kernel(
        f".visible .entry kernel(.param .b64 map)\n.reqntid 32\n{{\nsetp.eq.s32 %p1, %tid.x, 0;\n{text};\nret;\n}}"
    )
    memory = np.zeros(4096, np.uint8)
    maps = {0: ptx_sm90.Map(memory.view(np.float16).reshape(32, 64), 8, 32, set())}
    ptx_sm90.Cluster(kernel, 0, 1, (1, 1), [bytes(8)], maps, [memory]).run(seed=0)


# Of each kind of instruction a right one, and what is wrong: values in its place, and what is said.
CASES = {
    "named barriers": ("bar.sync {id}, {count};", {"id": 1, "count": 32}, [({"count": 48}, "48"), ({"id": 16}, "16")]),
    "mbarriers": (
        "mbarrier.init.shared.b64 [{at}], {count};", {"at": 8, "count": 1},
        [({"at": 4}, "at 4"), ({"count": 0}, "of 0")],
    ),
    "bytes of an mbarrier": (
        OF_TWO + "mbarrier.arrive.expect_tx.shared.b64 %rd1, [1024], 0;", {"bytes": 0},
        [({"bytes": 1 << 20}, "counts")],
    ),
    "words": ("ld.{space}.b32 %r1, [{at}];", {"space": "global", "at": MEMORY + 4092}, [
        ({"at": MEMORY + 2}, "byte 2"), ({"at": MEMORY + 4096}, "4096"), ({"space": "shared", "at": LAST}, f"{LAST}"),
    ]),
    "vectors": (
        "ld.global.v4.b32 {{%r1, %r2, %r3, %r4}}, [{at}];", {"at": MEMORY + 16}, [({"at": MEMORY + 8}, "byte 8")],
    ),
    "additions": ("red.global.add.v4.f32 [{at}], {{%f1, %f1, %f1, %f1}};", {"at": MEMORY}, [({"at": MEMORY + 8}, "8")]),
    "rows of matrices": (
        "stmatrix.sync.aligned.m8n8.x1.shared.b16 [{at}], {{%r1}};", {"at": 16}, [({"at": 8}, "stmatrix")],
    ),
    "asynchronous copies": (
        "cp.async.{kind}.shared.global [{to}], [{of}], {width}, {size}; cp.async.wait_group 0;",
        {"kind": "ca", "to": 16, "of": MEMORY + 8, "width": 8, "size": 3},
        [
            ({"width": 2, "size": 2}, "bytes"), ({"kind": "cg"}, "bytes"), ({"size": 9}, "bytes"), ({"to": 4}, "to 4"),
            ({"of": MEMORY + 4}, "byte 4"), ({"to": LAST}, "shared memory"), ({"of": MEMORY + 4096}, "byte 4096"),
        ],
    ),
    "bulk copies": (
        OF_TWO + BULK + WAITED, {"to": 16, "of": MEMORY + 16, "bytes": 32},
        [
            ({"bytes": 24}, "24 bytes"), ({"to": 8}, "to 8"), ({"of": MEMORY + 8}, "byte 8"),
            ({"to": LAST - 16}, "shared"),
        ],
    ),
    "bulk sums": (
        ADDED + READ, {"at": 16, "bytes": 32}, [({"bytes": 24}, "24"), ({"at": 8}, "8"), ({"at": LAST - 16}, "shared")],
    ),
    "tiles": (
        OF_TWO + TILE + WAITED, {"to": 2048, "at": 8, "bytes": 512},
        [({"at": 4}, "4, 1"), ({"to": 64}, "byte 64"), ({"to": LAST - 128}, "shared memory")],
    ),
    "stored tiles": (STORED + READ, {"to": 2048, "at": 8}, [({"at": 4}, "4, 1"), ({"to": 64}, "byte 64")]),
    "operands": (PRODUCT, {"b": 0}, [({"b": 1 << 49}, "swizzle")]),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_a_card_faults_on_is_refused(name: str) -> None:
    body, right, wrong = CASES[name]
    run(body.format(**right))
    for changed, said in wrong:
        with pytest.raises((IndexError, RuntimeError), match=said):
            run(body.format(**{**right, **changed}))


def test_what_reads_and_fills_shared_memory_ends_before_its_cta() -> None:
    """Bulk stores have read it, and what TMA brings has come."""
    sums, copy = ADDED.format(at=0, bytes=16), (OF_TWO + BULK).format(to=16, of=MEMORY, bytes=32)
    run(sums + READ)
    run(copy + WAITED)
    for unread in ("", "cp.async.bulk.commit_group;", READ + sums + "cp.async.bulk.commit_group;"):
        with pytest.raises(RuntimeError, match="before its bulk stores have read"):
            run(sums + unread)
    with pytest.raises(RuntimeError, match="ends before TMA's copies"):
        run(copy)


def test_invalid_launches_are_refused() -> None:
    right = Launch("kernel", (132, 4, 1), (384, 1, 1), (1, 4, 1), 232448, early=False, arguments=[])
    right.check()
    for wrong in (
        {"block": (1025, 1, 1)}, {"shared": 232449}, {"grid": (0, 4, 1)}, {"grid": (1, 65536, 1)},
        {"cluster": (1, 3, 1)}, {"cluster": (33, 1, 1)},
    ):  # fmt: skip
        with pytest.raises(ValueError, match="an invalid launch"):
            right._replace(**wrong).check()
