"""Mixture-of-experts delta: shrink and expand of one projection, for every pair of a token and one of its experts.

    delta[p, s * N + n] = w[p] * sum over r < rank of B[slot(p), expert(p), s * N + n, r] * h[p, s, r]
            h[p, s, r]  = sum over k of x[p // rows_share, k] * A[slot(p), expert(p), s * R + r, k]

    s        slice: gate and up are slices 0 and 1 of one projection, down has one slice
    x        [P or T, K]               BF16 or FP16, unit stride along K; rows_share is 1 for a row a pair (down), top_k
                                       for a row a token (gate and up)
    A        [S, E or 1, slices R, K]  same dtype, each expert's matrix contiguous, a slice every R lines whatever the
                                       adapter's rank (sglang's layout of experts; its dense buffers are packed)
    B        [S, E or 1, slices N, R]  same dtype, likewise contiguous, scaling folded in
    w        [P]                       float32, the router's weight of each pair; with two slices there is none
    out      [P, slices N]             same dtype, unit stride along its columns: the delta is written to it, or added
    routing  see moe_routing.py

What A and B hold past an adapter's rank has no influence. h is rounded to B's dtype once; both products are float32,
and out is rounded once. Rows of pairs that get no delta are not touched.

A block walks all of K for its rows' few columns of h, and then goes on to the expand by itself: beside a base GEMM that
takes far longer, few long blocks cost it less than two launches of many short ones, the second waiting for the first.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lora_fastpath.kernels.launch import cdiv, launch, power_of_2
from lora_fastpath.kernels.moe_routing import Routing, expert_stride

FEW_PROGRAMS = 64
"""Columns are divided among blocks until there are so many; each repeats the shrink."""

ADAPTER_PROGRAMS = 4
"""Blocks that share the adapters of the same rows."""


@triton.jit
def _load_b(b_ptr, n, n_live, rank, R: tl.constexpr, BLOCK_R: tl.constexpr):
    """Lines n of one matrix B, [lines, BLOCK_R], 0 past the rank."""
    r = tl.arange(0, BLOCK_R)
    # What lies past the adapter's rank is stale. It is loaded and then dropped: a mask that depends on the rank would
    # turn 16-byte loads into 2-byte ones.
    b = tl.load(b_ptr + n[:, None] * R + r[None, :], mask=n_live[:, None] & (r < R)[None, :], other=0.0)
    return tl.where((r < rank)[None, :], b, 0.0)


@triton.jit
def _put(out_ptr, delta, live, ADD: tl.constexpr):
    if ADD:
        delta += tl.load(out_ptr, mask=live, other=0.0).to(tl.float32)
    tl.store(out_ptr, delta.to(out_ptr.dtype.element_ty), mask=live)


# The number of pairs changes with every prefill: specializing on it would compile in the middle of serving. The others are
# left open so that the self-check, which makes do with few experts, compiles what will be launched.
@triton.jit(do_not_specialize=["pairs", "top_k", "experts", "block_size", "rows_share", "slots"])
def _moe_delta_kernel(
    x_ptr,
    a_ptr,
    b_ptr,
    weights_ptr,
    out_ptr,
    sorted_pairs_ptr,
    block_experts_ptr,
    padded_ptr,
    row_slots_ptr,
    slot_ranks_ptr,
    pairs,
    top_k,
    experts,
    block_size,
    rows_share,
    slots,
    x_row_stride,
    a_slot_stride,
    a_expert_stride,
    b_slot_stride,
    b_expert_stride,
    out_row_stride,
    K: tl.constexpr,
    N: tl.constexpr,
    R: tl.constexpr,
    SLICES: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    ADD: tl.constexpr,
):
    start = tl.program_id(0) * BLOCK_ROWS
    # All asked for before the first is looked at. Most blocks of a launch may find nothing to do, and they stand in the
    # way of the base GEMM's for as long as it takes them to see it.
    padded = tl.load(padded_ptr)
    every = tl.arange(0, SLOTS)
    ranks = tl.load(slot_ranks_ptr + every, mask=every < slots, other=0)
    pair = tl.load(sorted_pairs_ptr + start + tl.arange(0, BLOCK_ROWS))
    expert = tl.load(block_experts_ptr + start // block_size)
    if (start >= padded) | (tl.program_id(1) >= tl.sum((ranks > 0).to(tl.int32), axis=0)):
        return
    adapted = (pair < pairs) & (expert >= 0) & (expert < experts)
    slot = tl.load(row_slots_ptr + pair // top_k, mask=adapted, other=-1)
    here = (tl.max((slot[:, None] == every[None, :]).to(tl.int32), axis=0) > 0) & (ranks > 0)
    turns = tl.sum(here.to(tl.int32), axis=0)
    turn_of = tl.where(here, tl.cumsum(here.to(tl.int32), axis=0) - 1, -1)
    pair = pair.to(tl.int64)
    dtype: tl.constexpr = b_ptr.dtype.element_ty
    even: tl.constexpr = K % BLOCK_K == 0
    r = tl.arange(0, BLOCK_R)
    x_lines = x_ptr + (pair // rows_share)[:, None] * x_row_stride
    for turn in tl.range(tl.program_id(1), turns, tl.num_programs(1), num_stages=1):
        own = tl.max(tl.where(turn_of == turn, every, 0), axis=0)
        rank = tl.max(tl.where(turn_of == turn, ranks, 0), axis=0)
        live, r_live = slot == own, r < rank
        a_lines = a_ptr + own.to(tl.int64) * a_slot_stride + expert.to(tl.int64) * a_expert_stride + r[:, None] * K
        h0 = tl.zeros((BLOCK_ROWS, BLOCK_R), dtype=tl.float32)
        h1 = tl.zeros((BLOCK_ROWS, BLOCK_R), dtype=tl.float32)
        for first in tl.range(0, K, BLOCK_K):
            k = first + tl.arange(0, BLOCK_K)
            k_live = (k < K) | even
            x = tl.load(x_lines + k[None, :], mask=live[:, None] & k_live[None, :], other=0.0)
            a = tl.load(a_lines + k[None, :], mask=r_live[:, None] & k_live[None, :], other=0.0)
            h0 = tl.dot(x, tl.trans(a), h0)
            if SLICES == 2:
                a = tl.load(a_lines + R * K + k[None, :], mask=r_live[:, None] & k_live[None, :], other=0.0)
                h1 = tl.dot(x, tl.trans(a), h1)
        h0, h1 = h0.to(dtype), h1.to(dtype)

        b_matrix = b_ptr + own.to(tl.int64) * b_slot_stride + expert.to(tl.int64) * b_expert_stride
        if SLICES == 1:
            weight = tl.load(weights_ptr + pair, mask=live, other=0.0)
        for first in tl.range(tl.program_id(2) * BLOCK_N, N, tl.num_programs(2) * BLOCK_N, num_stages=2):
            n = first + tl.arange(0, BLOCK_N)
            n_live = n < N
            out = out_ptr + pair[:, None] * out_row_stride + n[None, :]
            out_live = live[:, None] & n_live[None, :]
            delta = tl.dot(h0, tl.trans(_load_b(b_matrix, n, n_live, rank, R, BLOCK_R)))
            if SLICES == 1:
                delta *= weight[:, None]
            _put(out, delta, out_live, ADD)
            if SLICES == 2:
                delta = tl.dot(h1, tl.trans(_load_b(b_matrix + N * R, n, n_live, rank, R, BLOCK_R)))
                _put(out + N, delta, out_live, ADD)


def moe_delta(
    x: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    weights: torch.Tensor | None,
    routing: Routing,
    out: torch.Tensor,
    *,
    add: bool,
    block_rows: int,
    block_n: int | None = None,
    block_k: int | None = None,
) -> None:
    """Launch one delta (shapes above): of gate and up, without `weights`, or of down.

    add: whether `out` is added to or written. block_rows: 16 or more, and no more than the routing's block size.
    """
    slices = 2 if weights is None else 1
    n, r, k = b.shape[2] // slices, b.shape[3], a.shape[3]
    block_r = max(16, power_of_2(r))
    lines = block_rows + slices * block_r  # of x and A that a step of the shrink holds in shared memory
    block_k = block_k or max(32, min(128, power_of_2(9216 // lines + 1) // 2))
    block_n = block_n or max(16, min(256, 4096 // block_rows, 8192 // block_r))
    slots, tokens = len(routing.slot_ranks), len(routing.topk_ids)
    strides = (x.stride(0), a.stride(0), expert_stride(a), b.stride(0), expert_stride(b), out.stride(0))
    launch(
        _moe_delta_kernel,
        (x.dtype, strides),
        (
            routing.sorted_pairs.numel() // block_rows,
            min(slots, tokens, ADAPTER_PROGRAMS),  # an expert has a token once
            max(1, min(cdiv(n, block_n), FEW_PROGRAMS // routing.pairs)),
        ),
        (x, a, b, weights, out, routing.sorted_pairs, routing.block_experts, routing.padded, routing.row_slots,
         routing.slot_ranks),
        (routing.pairs, routing.top_k, routing.experts, routing.block_size, routing.pairs // x.shape[0], slots, *strides),
        (k, n, r, slices, power_of_2(max(2, slots)), block_rows, block_k, block_n, block_r, add),
        {"num_warps": 2 if block_rows == 32 else 4, "num_stages": 4},
    )  # fmt: skip
