"""Site `column`: ColumnParallelLinearWithLoRA, plain column-parallel projections (MLA's q_b and the like)."""

from __future__ import annotations

from lora_fastpath.patches import dense

WRAPPERS = {
    "ColumnParallelLinearWithLoRA.forward": dense.forward,
    "ColumnParallelLinearWithLoRA.apply_lora": dense.apply_lora,
}
