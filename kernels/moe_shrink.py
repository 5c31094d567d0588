"""Mixture-of-experts shrink: the first half of a LoRA delta for every pair of a token and one of its experts.

    sum over s of h[s, p, n] = sum over k of x[p // rows_share, k] * A[slot(p), expert(p), n, k]

    x        [P or T, K]      BF16 or FP16, unit stride along K; rows_share is 1 for a row a pair (down), top_k for a row
                              a token (gate and up)
    A        [S, E or 1, N, K]  same dtype, each expert's matrix contiguous; N = slices * R, a slice every R lines
                              whatever the adapter's rank (sglang's layout of experts; its dense buffers are packed)
    routing  see moe_routing.py
    h        [SPLIT_K, P, N]  float32, contiguous: part s is the sum over the s-th piece of K. Rows that get no delta and
                              columns past the adapter's rank in each slice are undefined

K is split over blocks, or a block would walk all of it alone for a few columns of h. The expand adds the parts, in
order: no counters, nothing to clear. Lines of A past the adapter's rank are not read.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lora_fastpath.kernels.launch import launch, power_of_2
from lora_fastpath.kernels.moe_routing import Routing, adapter_at, expert_stride, load_block


# The number of pairs changes with every prefill: specializing on it would compile in the middle of serving. The others are
# left open so that the self-check, which makes do with few experts, compiles what will be launched.
@triton.jit(do_not_specialize=["pairs", "top_k", "experts", "block_size", "rows_share"])
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
    top_k,
    experts,
    block_size,
    rows_share,
    x_row_stride,
    a_slot_stride,
    a_expert_stride,
    K: tl.constexpr,
    N: tl.constexpr,
    R: tl.constexpr,
    SPLIT_K: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    start = tl.program_id(0) * BLOCK_ROWS
    expert, pair, slot, ranks, place = load_block(
        start, sorted_pairs_ptr, block_experts_ptr, padded_ptr, row_slots_ptr, slot_ranks_ptr,
        pairs, top_k, experts, block_size, SLOTS, BLOCK_ROWS,
    )  # fmt: skip
    part = tl.program_id(2)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    steps: tl.constexpr = (K + BLOCK_K * SPLIT_K - 1) // (BLOCK_K * SPLIT_K)
    even: tl.constexpr = K % (BLOCK_K * SPLIT_K) == 0
    x_lines = x_ptr + (pair // rows_share)[:, None] * x_row_stride
    h_lines = h_ptr + part * pairs.to(tl.int64) * N + pair[:, None] * N + n[None, :]
    for turn in tl.range(0, tl.max(place, axis=0) + 1, num_stages=1):
        own, rank = adapter_at(turn, place, slot, ranks, SLOTS)
        live = slot == own
        n_live = (n < N) & (n % R < rank)
        a_lines = a_ptr + own.to(tl.int64) * a_slot_stride + expert.to(tl.int64) * a_expert_stride + n[:, None] * K
        h = tl.zeros((BLOCK_ROWS, BLOCK_N), dtype=tl.float32)
        for step in tl.range(0, steps):
            k = (part * steps + step) * BLOCK_K + tl.arange(0, BLOCK_K)
            k_live = (k < K) | even
            x = tl.load(x_lines + k[None, :], mask=live[:, None] & k_live[None, :], other=0.0)
            a = tl.load(a_lines + k[None, :], mask=n_live[:, None] & k_live[None, :], other=0.0)
            h = tl.dot(x, tl.trans(a), h)
        tl.store(h_lines, h, mask=live[:, None] & n_live[None, :])


def moe_shrink(
    x: torch.Tensor,
    a: torch.Tensor,
    routing: Routing,
    h: torch.Tensor,
    *,
    slices: int,
    block_rows: int,
    block_n: int | None = None,
    block_k: int | None = None,
    pdl: bool = False,
) -> None:
    """Launch one shrink (shapes above); `slices` is 2 for gate and up, 1 for down.

    block_rows: 16 or more, and no more than the routing's block size. pdl: the launch that follows may begin early.
    """
    n, k = a.shape[2], a.shape[3]
    block_n = block_n or max(16, min(32, power_of_2(n)))
    block_k = block_k or (256 if block_rows == 16 else 128)
    slots = len(routing.slot_ranks)
    strides = (x.stride(0), a.stride(0), expert_stride(a))
    launch(
        _moe_shrink_kernel,
        (x.dtype, strides),
        (routing.sorted_pairs.numel() // block_rows, -(-n // block_n), h.shape[0]),
        (x, a, h, routing.sorted_pairs, routing.block_experts, routing.padded, routing.row_slots, routing.slot_ranks),
        (routing.pairs, routing.top_k, routing.experts, routing.block_size, routing.pairs // x.shape[0], *strides),
        (k, n, n // slices, h.shape[0], power_of_2(max(2, slots)), block_rows, block_n, block_k, pdl),
        {"num_warps": 4, "num_stages": 3},
    )
