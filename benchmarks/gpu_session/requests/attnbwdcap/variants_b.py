import cutlass
import cutlass.cute as cute
from cute_ops.kernels.attention import softmax as S
from cute_ops.kernels.attention.bwd import AttentionBackward
NEW = S.Weights.of_scores
class Old:
    @cute.jit
    def of_scores(self, rS, rWeights, place: cutlass.Constexpr, lse: cutlass.Constexpr, whole):
        if cutlass.const_expr(not self.mods.is_changed_by_column):
            self._in_steps(rS, rWeights, place, lse, whole)
        elif whole & (place.last_query < place.sizes.seqlen_q):
            self._by_column(rS, rWeights, place, lse)
        else:
            self._in_steps(rS, rWeights, place, lse, whole)
def main(variant):
    S.Weights.of_scores = Old.of_scores
    return AttentionBackward(variant)
def near(variant):
    S.Weights.of_scores = NEW
    return AttentionBackward(variant)
