"""Scores in a thread's registers: by rows, exponentiated, and rounded to operands of 16 bits."""

import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

PART = 16  # columns of weights that one instruction multiplies


def by_row(rX):
    """A thread's accumulators by its two rows: (row, column). Neighbours are two columns of one row."""
    count = cute.size(rX) // 4
    return cute.make_tensor(rX.iterator, cute.make_layout((2, (2, count)), stride=(2, (1, 4))))


@dsl_user_op
def exp2(x, *, loc=None, ip=None):
    """``ex2.approx``, once: LLVM computes a pure function again where that saves a register."""
    value = llvm.inline_asm(
        T.f32(), [Float32(x).ir_value(loc=loc, ip=ip)], "ex2.approx.ftz.f32 $0, $1;", "=f,f",
        has_side_effects=True, is_align_stack=False, asm_dialect=llvm.AsmDialect.AD_ATT,
    )  # fmt: skip
    return Float32(value)


@dsl_user_op
def rounded_product(x, y, *, loc=None, ip=None):
    """``x * y``, rounded: not fused with an addition that follows."""
    operands = [Float32(each).ir_value(loc=loc, ip=ip) for each in (x, y)]
    value = llvm.inline_asm(
        T.f32(), operands, "mul.rn.f32 $0, $1, $2;", "=f,f,f",
        has_side_effects=False, is_align_stack=False, asm_dialect=llvm.AsmDialect.AD_ATT,
    )  # fmt: skip
    return Float32(value)


@dsl_user_op
def pack(low, high, dtype, *, loc=None, ip=None):
    """Two numbers as 16-bit floats in one register, here: LLVM moves a conversion to where its result is used, past
    instructions that multiply, and keeps twice the registers until then.
    """
    name = {"Float16": "f16x2", "BFloat16": "bf16x2"}[dtype.__name__]
    operands = [Float32(x).ir_value(loc=loc, ip=ip) for x in (high, low)]
    value = llvm.inline_asm(
        T.i32(), operands, f"cvt.rn.{name}.f32 $0, $1, $2;", "=r,f,f",
        has_side_effects=True, is_align_stack=False, asm_dialect=llvm.AsmDialect.AD_ATT,
    )  # fmt: skip
    return Int32(value)


def store_packed(rX, rP):
    """Convert a thread's accumulators to 16-bit floats, in their order."""
    pairs = cute.recast_tensor(rP, Int32)
    for i in range(cute.size(pairs)):
        pairs[i] = pack(rX[2 * i], rX[2 * i + 1], rP.element_type)


def into_pairs(rP):
    """A function that converts weights of neighbouring columns, one after another, and stores them in pairs; it does
    nothing without ``rP``.
    """
    pairs, first = None if rP is None else cute.recast_tensor(rP, Int32), {}

    def put(r, c, weight):
        if pairs is not None and c % 2 == 0:
            first[r] = weight
        elif pairs is not None:
            pairs[c // 2 * 2 + r] = pack(first[r], weight, rP.element_type)

    return put


def columns_of_part(part):
    """A thread's columns of those that one instruction multiplies."""
    return range(PART // 4 * part, PART // 4 * (part + 1))


def store_part(rX, rP, part):
    """:func:`store_packed` of the columns that one instruction multiplies."""
    scores, pairs = by_row(rX), cute.recast_tensor(rP, Int32)
    for c in columns_of_part(part)[::2]:
        for r in range(2):
            pairs[c + r] = pack(scores[r, c], scores[r, c + 1], rP.element_type)
