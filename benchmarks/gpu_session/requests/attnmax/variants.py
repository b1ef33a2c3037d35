from cute_ops.kernels.attention.fwd import attention_fwd
from cute_ops.kernels.attention.softmax import CappedSoftmax, Near, QUINTIC
def main(variant):
    k = attention_fwd(variant)
    k.softmax.largest_of = k.softmax.largest
    return k
def max3(variant):
    return attention_fwd(variant)
def signed3(variant):
    k = attention_fwd(variant)
    s = k.softmax
    k.softmax = CappedSoftmax((s.outer, s.inner), s.scale, s.offset, s.growth, True)
    return k
def wide(variant):
    k = main(variant)
    k.softmax.near = (WIDE, QUINTIC)
    return k
WIDE = Near((0.99998507, -0.33018603), 0.138)
