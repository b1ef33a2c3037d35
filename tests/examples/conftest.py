"""The example folders as a user has them, the benchmarks and the release script: on the module search path."""

from __future__ import annotations

import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"
# For the whole session: an op can be registered once only, so its module must be imported once only.
sys.path += [str(EXAMPLES / name) for name in ("custom_op", "gallery", "llama", "optax_decoder")]
sys.path += [str(EXAMPLES.parent / name) for name in ("benchmarks", "release")]
