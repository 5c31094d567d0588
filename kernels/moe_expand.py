"""Mixture-of-experts expand: the second half of a LoRA delta, added into the down projection's output in place.

    y[p, n] += weights[p] * sum over r < rank of h[p, r] * B[slot(p), expert(p), n, r]

    h        [P, R]            BF16 or FP16, what the shrink kernel wrote; undefined rows and columns are not used
    B        [S, E or 1, H, R] same dtype, each expert's matrix contiguous, scaling folded in; may hold anything past
                               the adapter's rank
    weights  [P]               float32, the router's weight of each pair, contiguous
    route    see moe_route.py
    y        [P, H]            same dtype, unit stride along H

The product is made in float32 and rounded once, when it is added to y. Rows that get no delta are not stored and keep
the base GEMM's bits.

It is launched with programmatic dependent launch where the GPU has it: routing, weights and the first slot's B are on
their way before the base GEMM has ended, only h and y wait for it. So whatever wrote the routing must have ended before
the base GEMM began.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lora_fastpath.kernels.moe_route import NO_SLOT, Route, expert_stride, load_b, load_block, load_h, next_slot


@triton.jit
def _add(
    y_ptr, h_ptr, b, weight, pair, rows, n, n_live, rank, y_row_stride, h_row_stride,
    R: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    h = load_h(h_ptr, pair, rows, rank, 0, h_row_stride, R, BLOCK_R)
    y_tile = y_ptr + pair[:, None] * y_row_stride + n[None, :]
    y_live = rows[:, None] & n_live[None, :]
    y = tl.load(y_tile, mask=y_live, other=0.0)
    delta = tl.dot(h, tl.trans(b)) * weight[:, None]
    tl.store(y_tile, (y.to(tl.float32) + delta).to(y.dtype), mask=y_live)


# The number of pairs changes with every prefill: specializing on it would compile in the middle of serving.
@triton.jit(do_not_specialize=["pairs"])
def _moe_expand_kernel(
    h_ptr,
    b_ptr,
    weights_ptr,
    y_ptr,
    sorted_pairs_ptr,
    block_experts_ptr,
    padded_ptr,
    row_slots_ptr,
    slot_ranks_ptr,
    pairs,
    experts,
    h_row_stride,
    b_slot_stride,
    b_expert_stride,
    y_row_stride,
    H: tl.constexpr,
    R: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    expert, pair, live, slots = load_block(
        tl.program_id(0), sorted_pairs_ptr, block_experts_ptr, padded_ptr, row_slots_ptr, slot_ranks_ptr,
        pairs, experts, TOP_K, BLOCK_ROWS,
    )  # fmt: skip
    slot = next_slot(slots, -1)
    if slot == NO_SLOT:
        if PDL:
            # The kernel after this one waits for this one alone, so this one must not end before the base GEMM has.
            tl.extra.cuda.gdc_wait()
        return
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    n_live = n < H
    weight = tl.load(weights_ptr + pair, mask=live, other=0.0)

    # The first slot stands outside the loop, with the wait between its loads of B and of h: a wait inside a loop is one
    # that the compiler moves loads across.
    rank = tl.load(slot_ranks_ptr + slot)
    b = load_b(b_ptr, slot, expert, rank, n, n_live, b_slot_stride, b_expert_stride, R, BLOCK_R)
    if PDL:
        tl.extra.cuda.gdc_wait()
    _add(y_ptr, h_ptr, b, weight, pair, slots == slot, n, n_live, rank, y_row_stride, h_row_stride, R, BLOCK_R)

    slot = next_slot(slots, slot)
    while slot != NO_SLOT:
        rank = tl.load(slot_ranks_ptr + slot)
        b = load_b(b_ptr, slot, expert, rank, n, n_live, b_slot_stride, b_expert_stride, R, BLOCK_R)
        _add(y_ptr, h_ptr, b, weight, pair, slots == slot, n, n_live, rank, y_row_stride, h_row_stride, R, BLOCK_R)
        slot = next_slot(slots, slot)


def moe_expand(
    h: torch.Tensor,
    b: torch.Tensor,
    weights: torch.Tensor,
    route: Route,
    y: torch.Tensor,
    *,
    block_n: int | None = None,
    num_warps: int = 4,
    pdl: bool = False,
) -> None:
    """Launch one expand (shapes above), in place on `y`."""
    hidden, r = b.shape[2], b.shape[3]
    block_r = max(16, triton.next_power_of_2(r))
    # B is held in registers across the wait, y and the product after it: this many columns fit without spilling.
    block_n = block_n or max(16, min(128, 8192 // max(block_r, route.block_rows)))
    _moe_expand_kernel[(route.blocks, triton.cdiv(hidden, block_n))](
        h,
        b,
        weights,
        y,
        route.sorted_pairs,
        route.block_experts,
        route.padded,
        route.row_slots,
        route.slot_ranks,
        route.pairs,
        route.experts,
        h.stride(0),
        b.stride(0),
        expert_stride(b),
        y.stride(0),
        H=hidden,
        R=r,
        TOP_K=route.top_k,
        BLOCK_ROWS=route.block_rows,
        BLOCK_N=block_n,
        BLOCK_R=block_r,
        PDL=pdl,
        num_warps=num_warps,
        num_stages=1,
        **({"launch_pdl": True} if pdl else {}),
    )
