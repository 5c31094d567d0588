"""Mixture-of-experts expand: the second half of a LoRA delta, for gate and up together or for down.

    delta[p, s * N + n] = w[p] * sum over r < rank of B[slot(p), expert(p), s * N + n, r] * h[p, s * R + r]

    s        slice: gate and up are slices 0 and 1 of one projection, down has one slice
    h        [SPLIT_K, P, slices R]    float32, what the shrink wrote; undefined rows and columns are not used
    B        [S, E or 1, slices N, R]  BF16 or FP16, each expert's matrix contiguous, scaling folded in; may hold
                                       anything past the adapter's rank
    w        [P]                       float32, the router's weight of each pair; with two slices there is none
    out      [P, slices N]             dtype of B, unit stride along its columns: the delta is written to it, or added
    routing  see moe_routing.py

h is rounded to B's dtype once; the product is float32, and out is rounded once. Rows that get no delta are not touched.

It is launched with programmatic dependent launch where the GPU has it, right after the shrink: only h waits for that.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lora_fastpath.kernels.launch import cdiv, launch, power_of_2
from lora_fastpath.kernels.moe_routing import Routing, adapter_at, expert_stride, load_block


@triton.jit
def _load_h(
    h_ptr, pair, slot, ranks, start, part_stride, dtype: tl.constexpr,
    N: tl.constexpr, R: tl.constexpr, BLOCK_R: tl.constexpr, SPLIT_K: tl.constexpr,
):  # fmt: skip
    """h[pair, start : start + R], [rows, BLOCK_R]: the shrink's parts added in order and rounded once; 0 past the rank."""
    r = tl.arange(0, BLOCK_R)
    mask = (slot >= 0)[:, None] & (r < R)[None, :]
    at = h_ptr + pair[:, None] * N + (start + r)[None, :]
    h = tl.load(at, mask=mask, other=0.0)
    for part in tl.static_range(1, SPLIT_K):
        h += tl.load(at + part * part_stride, mask=mask, other=0.0)
    return tl.where(r[None, :] < ranks[:, None], h, 0.0).to(dtype)


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


# Left open for the reasons that moe_shrink.py gives.
@triton.jit(do_not_specialize=["pairs", "top_k", "experts", "block_size"])
def _moe_expand_kernel(
    h_ptr,
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
    b_slot_stride,
    b_expert_stride,
    out_row_stride,
    N: tl.constexpr,
    R: tl.constexpr,
    SLICES: tl.constexpr,
    SPLIT_K: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    ADD: tl.constexpr,
    PDL: tl.constexpr,
):
    start = tl.program_id(0) * BLOCK_ROWS
    expert, pair, slot, ranks, place = load_block(
        start, sorted_pairs_ptr, block_experts_ptr, padded_ptr, row_slots_ptr, slot_ranks_ptr,
        pairs, top_k, experts, block_size, SLOTS, BLOCK_ROWS,
    )  # fmt: skip
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    n_live = n < N
    dtype: tl.constexpr = b_ptr.dtype.element_ty
    part_stride = pairs.to(tl.int64) * (SLICES * R)
    out = out_ptr + pair[:, None] * out_row_stride + n[None, :]
    if PDL:
        tl.extra.cuda.gdc_wait()
    h0 = _load_h(h_ptr, pair, slot, ranks, 0, part_stride, dtype, SLICES * R, R, BLOCK_R, SPLIT_K)
    if SLICES == 2:
        h1 = _load_h(h_ptr, pair, slot, ranks, R, part_stride, dtype, SLICES * R, R, BLOCK_R, SPLIT_K)
    else:
        weight = tl.load(weights_ptr + pair, mask=slot >= 0, other=0.0)
    for turn in tl.range(0, tl.max(place, axis=0) + 1, num_stages=1):
        own, rank = adapter_at(turn, place, slot, ranks, SLOTS)
        live = (slot == own)[:, None] & n_live[None, :]
        b_matrix = b_ptr + own.to(tl.int64) * b_slot_stride + expert.to(tl.int64) * b_expert_stride
        b0 = _load_b(b_matrix, n, n_live, rank, R, BLOCK_R)
        if SLICES == 2:
            b1 = _load_b(b_matrix + N * R, n, n_live, rank, R, BLOCK_R)
            _put(out, tl.dot(h0, tl.trans(b0)), live, ADD)
            _put(out + N, tl.dot(h1, tl.trans(b1)), live, ADD)
        else:
            _put(out, tl.dot(h0, tl.trans(b0)) * weight[:, None], live, ADD)


def moe_expand(
    h: torch.Tensor,
    b: torch.Tensor,
    weights: torch.Tensor | None,
    routing: Routing,
    out: torch.Tensor,
    *,
    add: bool,
    block_rows: int,
    block_n: int | None = None,
    pdl: bool = False,
) -> None:
    """Launch one expand (shapes above): of gate and up, without `weights`, or of down.

    add: whether `out` is added to or written. block_rows: 16 or more, and no more than the routing's block size.
    pdl: it may begin beside the shrink that was launched just before, with pdl too.
    """
    slices = 2 if weights is None else 1
    n, r = b.shape[2] // slices, b.shape[3]
    block_r = max(16, power_of_2(r))
    # B and the product are held in registers: this many columns fit without spilling.
    block_n = block_n or max(16, min(256, 8192 // slices // max(block_r, block_rows)))
    slots = len(routing.slot_ranks)
    strides = (b.stride(0), expert_stride(b), out.stride(0))
    launch(
        _moe_expand_kernel,
        (out.dtype, strides),
        (routing.sorted_pairs.numel() // block_rows, cdiv(n, block_n)),
        (h, b, weights, out, routing.sorted_pairs, routing.block_experts, routing.padded, routing.row_slots,
         routing.slot_ranks),
        (routing.pairs, routing.top_k, routing.experts, routing.block_size, *strides),
        (n, r, slices, h.shape[0], power_of_2(max(2, slots)), block_rows, block_n, block_r, add, pdl),
        {"num_warps": 4, "num_stages": 1} | ({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip
