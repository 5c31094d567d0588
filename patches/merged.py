"""Site `merged`: MergedColumnParallelLinearWithLoRA, gate_up and its kin (two to four slices)."""

from __future__ import annotations

from lora_fastpath.patches import dense

WRAPPERS = {
    "MergedColumnParallelLinearWithLoRA.forward": dense.forward,
    "MergedColumnParallelLinearWithLoRA.apply_lora": dense.apply_lora,
}
