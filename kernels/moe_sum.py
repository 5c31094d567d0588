"""Mixture-of-experts sum with the down deltas added on the way: it takes the place of the base layer's reduction.

    out[t, n] = scaling * (sum over k of y[t, k, n] + sum over k of delta[t, k, n])

    y        [T, top_k, H]  BF16 or FP16, contiguous: the down projection times the routing weight
    delta    [T, top_k, H]  same dtype, contiguous, the weight in it; undefined for pairs that get no delta. Or None
    routing  see moe_routing.py
    out      [T, H]         same dtype, contiguous

Where the base GEMMs have rows of their own (FlashInfer's), the weights are not in y yet, and weights[t, k] * y[permuted[t, k], n]
is added:

    y         [rows, at least H]  unit stride in a row
    permuted  int32 [T, top_k]    row of a pair, -1 for an expert on another rank, which adds nothing
    weights   [T, top_k]          float32, BF16 or FP16

Sums are float32, in the order of k, and rounded once: the bits of sglang's reductions for a token that gets no delta.

It is launched with programmatic dependent launch where the GPU has it, which hides the launch; nothing is read before
the wait, as the delta comes from the side stream.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lora_fastpath.kernels.launch import cdiv, launch
from lora_fastpath.kernels.moe_routing import Routing

BLOCK_N = 512


@triton.jit(do_not_specialize=["experts"])
def _moe_sum_kernel(
    y_ptr,
    delta_ptr,
    out_ptr,
    topk_ids_ptr,
    row_slots_ptr,
    slot_ranks_ptr,
    permuted_ptr,
    weights_ptr,
    experts,
    scaling,
    y_row_stride,
    H: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    slot = tl.load(row_slots_ptr + token)
    total = tl.zeros((BLOCK_N,), dtype=tl.float32)
    delta = tl.zeros((BLOCK_N,), dtype=tl.float32)
    for k in tl.static_range(TOP_K):
        pair = token * TOP_K + k
        if permuted_ptr is None:
            total += tl.load(y_ptr + pair * y_row_stride + n, mask=n < H, other=0.0).to(tl.float32)
        else:
            row = tl.load(permuted_ptr + pair).to(tl.int64)
            weight = tl.load(weights_ptr + pair).to(tl.float32)
            y = tl.load(y_ptr + row * y_row_stride + n, mask=(row >= 0) & (n < H), other=0.0).to(tl.float32)
            total += tl.where(row >= 0, weight * y, 0.0)
        if delta_ptr is not None:
            expert = tl.load(topk_ids_ptr + pair)
            # Asked for before it is known whether there is one: a load that waits for another is most of this kernel's time.
            here = tl.load(delta_ptr + pair * H + n, mask=n < H, other=0.0).to(tl.float32)
            delta += tl.where((expert >= 0) & (expert < experts), here, 0.0)
    if delta_ptr is not None:
        rank = tl.load(slot_ranks_ptr + slot, mask=slot >= 0, other=0)
        total = tl.where(rank > 0, total + delta, total)
    tl.store(out_ptr + token * H + n, (total * scaling).to(out_ptr.dtype.element_ty), mask=n < H)


def moe_sum(
    y: torch.Tensor,
    delta: torch.Tensor | None,
    routing: Routing,
    scaling: float,
    out: torch.Tensor,
    permuted: torch.Tensor | None = None,
    weights: torch.Tensor | None = None,
    *,
    pdl: bool = False,
) -> None:
    """Launch one sum (shapes above)."""
    tokens, hidden = out.shape
    row_stride = y.stride(-2)
    launch(
        _moe_sum_kernel,
        (y.dtype, row_stride, delta is None, weights.dtype if weights is not None else None),
        (tokens, cdiv(hidden, BLOCK_N)),
        (y, delta, out, routing.topk_ids, routing.row_slots, routing.slot_ranks, permuted, weights),
        (routing.experts, float(scaling), row_stride),
        (hidden, routing.top_k, BLOCK_N, pdl),
        {"num_warps": 4, "num_stages": 1} | ({"launch_pdl": True} if pdl else {}),
    )
