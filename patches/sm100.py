"""FlashInfer's TRT-LLM-gen mixture of experts with LoRA inside, for Blackwell. Not a site yet: nothing of sglang calls it.

    main stream                                             side stream
    route (FlashInfer)
    [gather, NVFP4] gate_up GEMM (FlashInfer)               pairs into blocks, moe_delta
    sm100_activate: silu(g + dg) * (u + du), quantized
    down GEMM (FlashInfer)                                  moe_delta
    moe_sum over a token's experts

The deltas are the `moe` site's; see patches/moe.py.
"""

from __future__ import annotations

import torch

from lora_fastpath import stock
from lora_fastpath.kernels.moe_prepare import MOST_PAIRS
from lora_fastpath.kernels.moe_routing import Routing
from lora_fastpath.kernels.sm100 import BaseExperts
from lora_fastpath.patches import moe
from lora_fastpath.streams import Lane

BLOCK_ROWS = 16
MANY_BLOCK_ROWS = 64


def run(
    base: BaseExperts,
    experts: moe.Experts,
    x: torch.Tensor,
    codes: torch.Tensor,
    codes_scale: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    row_slots: torch.Tensor,
    slot_ranks: torch.Tensor,
    lane: Lane | None = None,
) -> torch.Tensor:
    """The layer's output [T, H] on this rank.

    x                   [T, H]          what the adapters multiply, dtype of theirs
    codes, codes_scale                  x quantized as BaseExperts.gate_up takes it
    topk_ids            int32 [T, top_k] numbers among all ranks' experts
    topk_weights        [T, top_k]      routed scaling factor in them; rounded to BF16, as FlashInfer does it
    row_slots, slot_ranks               see moe_routing.py
    lane                                for two streams, else None
    """
    pairs, top_k = topk_ids.numel(), topk_ids.shape[1]
    out = torch.empty_like(x)
    if not pairs:
        return out
    rounded = topk_weights.to(torch.bfloat16)
    weights = rounded.float()
    local = topk_ids
    if base.local_experts < base.num_experts:
        local = topk_ids - base.local_expert_offset
        local = torch.where((local >= 0) & (local < base.local_experts), local, -1)
    block_size = BLOCK_ROWS if pairs <= moe.MANY_PAIRS else MANY_BLOCK_ROWS
    rows = base.route(topk_ids, rounded)
    gate_up_delta = x.new_empty(pairs, 2 * base.intermediate)
    activated = x.new_empty(pairs, base.intermediate)
    y_delta = x.new_empty(pairs, base.hidden)
    align = experts.prepare(x, local, None) if pairs <= MOST_PAIRS else stock.align
    sorted_pairs, block_experts, padded = align(local, block_size, base.local_experts)
    routing = Routing(local, row_slots, slot_ranks, experts.count, sorted_pairs, block_experts, padded, block_size)
    block_rows = moe.block_rows(routing)
    moe.fork(lane)
    gate_up, gate_up_scales = base.gate_up(codes, codes_scale, rows)
    with moe.side(lane):
        experts.gate_up_delta(x, routing, block_rows, gate_up_delta, add=False)
    codes, codes_scale = base.activate(gate_up, gate_up_scales, gate_up_delta, routing, rows, activated)
    moe.fork(lane)
    y = base.down(codes, codes_scale, rows)
    with moe.side(lane):
        experts.down_delta(activated, weights, routing, block_rows, y_delta, add=False)
    base.finalize(y, y_delta.view(-1, top_k, base.hidden), weights, routing, rows, out)
    return out
