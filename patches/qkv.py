"""Site `qkv`: QKVParallelLinearWithLoRA, the fused q, k and v projection (three slices of unequal widths)."""

from __future__ import annotations

from lora_fastpath.patches import dense

WRAPPERS = {
    "QKVParallelLinearWithLoRA.forward": dense.forward,
    "QKVParallelLinearWithLoRA.apply_lora": dense.apply_lora,
}
