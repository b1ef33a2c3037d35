"""torch.compile: the pass that puts ops into graphs, the lowerings of ops, and the key of compiled programs."""

from cute_ops.fusion.own import Own
from cute_ops_torch.inductor.graph_pass import disable, enable, replaced, report

__all__ = ["Own", "disable", "enable", "replaced", "report"]
