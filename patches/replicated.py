"""Site `replicated`: ReplicatedLinearWithLoRA, unsharded projections (MLA's fused q_a and kv_a, two slices)."""

from __future__ import annotations

from lora_fastpath.patches import dense

WRAPPERS = {
    "ReplicatedLinearWithLoRA.forward": dense.forward,
    "ReplicatedLinearWithLoRA.apply_lora": dense.apply_lora,
}
