"""Forms of kernels of rows, as configs that tests ask for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from cute_ops.jit.plan import Plan
from cute_ops.kernels.rows.config import FusedRowConfig

FORMS = {
    "registers of a CTA": {"form": "one_pass", "threads": 512, "threads_per_row": 512},
    "registers of a cluster": {"form": "one_pass", "threads": 64, "threads_per_row": 64, "cluster": 2},
    "values kept": {"form": "one_pass", "threads": 64, "threads_per_row": 16, "keep": True},
    "shared memory": {"form": "ring", "threads": 64, "threads_per_row": 64},
    "shared memory of a cluster": {"form": "ring", "threads": 96, "threads_per_row": 96, "cluster": 4},
    "persistent": {"form": "ring", "threads": 64, "threads_per_row": 32, "stages": 2, "clusters": 64},
    "persistent cluster": {
        "form": "ring", "threads": 64, "threads_per_row": 64, "cluster": 2, "stages": 3, "clusters": 64
    },
    "passes": {"form": "passes", "threads": 64, "clusters": 64},
}  # fmt: skip


def in_form(planned: Plan, form: str) -> dict[str, Any]:
    plain: dict[str, Any] = {"threads_per_row": 0, "cluster": 1, "resident": 1, "stages": 1, "clusters": 0}
    return replace(FusedRowConfig.of(planned.variant.config), **(plain | FORMS[form])).flat()
