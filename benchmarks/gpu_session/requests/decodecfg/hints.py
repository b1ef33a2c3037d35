import cutlass.cute as cute
from cutlass import Int32
from cute_ops.kernels.attention import pages
from cute_ops.kernels.attention.decode_attention import DecodeAttention
def hinted(hint):
    def copy_bytes(target, source, size):
        (address, offset), said = target, ""
        arguments = [Int32(address), source]
        if size is not None:
            arguments.append(size)
            said = ", {$r2}"
        ptx = f"cp.async.cg.shared.global{hint} [{{$r0}}+{offset}], [{{$r1}}], 16{said};"
        cute.arch.inline_ptx(ptx, read_only_args=arguments)
    return copy_bytes
def none(variant):
    pages.copy_bytes = hinted("")
    return DecodeAttention(variant)
def l128(variant):
    pages.copy_bytes = hinted(".L2::128B")
    return DecodeAttention(variant)
def l256(variant):
    pages.copy_bytes = hinted(".L2::256B")
    return DecodeAttention(variant)
