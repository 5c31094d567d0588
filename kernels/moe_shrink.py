"""Mixture-of-experts shrink: the first half of a LoRA delta for every pair of a token and one of its experts.

    h[p, n] = sum over i of x[p // rows_share, i] * A[slot(p), expert(p), n, i]

    x      [P or T, K]       BF16 or FP16, unit stride along K; rows_share is 1 for a row a pair (down), top_k for a row
                             a token (gate and up)
    A      [S, E or 1, N, K] same dtype, each expert's matrix contiguous; N = slices * R, a slice every R lines whatever
                             the adapter's rank (sglang's layout of experts; its dense buffers are packed)
    route  see moe_route.py
    h      [P, N]            same dtype, unit stride along N; rows that get no delta and columns past the adapter's rank
                             in each slice are undefined

Sums are float32, rounded once. Lines of A past the adapter's rank are not read.

It runs on a side stream beside the base GEMM, so K is not split: blocks of many experts fill what that leaves free.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lora_fastpath.kernels.moe_route import NO_SLOT, Route, expert_stride, load_block, next_slot


# The number of pairs changes with every prefill: specializing on it would compile in the middle of serving.
@triton.jit(do_not_specialize=["pairs"])
def _moe_shrink_kernel(
    x_ptr,
    a_ptr,
    h_ptr,
    sorted_pairs_ptr,
    block_experts_ptr,
    padded_ptr,
    row_slots_ptr,
    slot_ranks_ptr,
    pairs,
    experts,
    x_row_stride,
    a_slot_stride,
    a_expert_stride,
    h_row_stride,
    K: tl.constexpr,
    N: tl.constexpr,
    R: tl.constexpr,
    TOP_K: tl.constexpr,
    ROWS_SHARE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    expert, pair, _, slots = load_block(
        tl.program_id(0), sorted_pairs_ptr, block_experts_ptr, padded_ptr, row_slots_ptr, slot_ranks_ptr,
        pairs, experts, TOP_K, BLOCK_ROWS,
    )  # fmt: skip
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    x_tile = x_ptr + (pair // ROWS_SHARE)[:, None] * x_row_stride + k[None, :]
    slot = next_slot(slots, -1)
    while slot != NO_SLOT:
        # Rows of other slots are neither read nor stored, so one adapter's infinities stay out of another's rows.
        rows = slots == slot
        lines = (n < N) & (n % R < tl.load(slot_ranks_ptr + slot))
        a_tile = a_ptr + slot.to(tl.int64) * a_slot_stride + expert.to(tl.int64) * a_expert_stride
        a_tile += n[:, None] * K + k[None, :]
        if tl.max(lines.to(tl.int32), axis=0) > 0:
            h = tl.zeros((BLOCK_ROWS, BLOCK_N), dtype=tl.float32)
            for start in range(0, K, BLOCK_K):
                if K % BLOCK_K == 0:
                    x = tl.load(x_tile + start, mask=rows[:, None], other=0.0)
                    a = tl.load(a_tile + start, mask=lines[:, None], other=0.0)
                else:
                    k_live = k < K - start
                    x = tl.load(x_tile + start, mask=rows[:, None] & k_live[None, :], other=0.0)
                    a = tl.load(a_tile + start, mask=lines[:, None] & k_live[None, :], other=0.0)
                h = tl.dot(x, tl.trans(a), h)
            h_tile = h_ptr + pair[:, None] * h_row_stride + n[None, :]
            tl.store(h_tile, h.to(h_ptr.dtype.element_ty), mask=rows[:, None] & lines[None, :])
        slot = next_slot(slots, slot)


def moe_shrink(
    x: torch.Tensor,
    a: torch.Tensor,
    route: Route,
    h: torch.Tensor,
    *,
    rows_share: int,
    slices: int,
    block_n: int | None = None,
    block_k: int | None = None,
    num_warps: int = 4,
    num_stages: int = 3,
) -> None:
    """Launch one shrink (shapes above); `slices` is 2 for gate and up, 1 for down."""
    n, k = a.shape[2], a.shape[3]
    block_n = block_n or max(16, min(32, triton.next_power_of_2(n)))
    # Bytes in flight: few rows leave room for long tiles. Not tuned.
    block_k = block_k or (256 if route.block_rows <= 32 else 64)
    _moe_shrink_kernel[(route.blocks, triton.cdiv(n, block_n))](
        x,
        a,
        h,
        route.sorted_pairs,
        route.block_experts,
        route.padded,
        route.row_slots,
        route.slot_ranks,
        route.pairs,
        route.experts,
        x.stride(0),
        a.stride(0),
        expert_stride(a),
        h.stride(0),
        K=k,
        N=n,
        R=n // slices,
        TOP_K=route.top_k,
        ROWS_SHARE=rows_share,
        BLOCK_ROWS=route.block_rows,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        num_warps=num_warps,
        num_stages=num_stages,
    )
