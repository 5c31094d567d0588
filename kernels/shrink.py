"""Grouped shrink: the first half of a LoRA delta, h = x @ A[slot].T, for every row that has an adapter.

    h[t, s * R + r] = sum over i of x[t, i] * A[slot(t), s * rank + r, i]        r < rank(slot(t)), s < slices

K is split over blocks: at decode one block per tile would walk thousands of columns alone. Each block writes its part
in float32; the last block of a tile to arrive adds the parts in order and rounds once, so a replay gives the same bits
every time, nothing needs zeroing, and the expand kernel (which is on the critical path, this one is not) reads one
number where it would read SPLIT_K.

    x         [T, K]              BF16 or FP16, unit stride along K
    A         [S, slices * R, K]  same dtype, unit stride along K; slot s uses its first slices * rank(s) lines (sglang
                                  packs the slices at the adapter's own rank and leaves the tail stale)
    tiles     [tiles, HEADER + BLOCK_ROWS] int32, see tiles.py
    h         [T, slices * R]     same dtype, a slice every R columns; lines of rows without an adapter and columns past
                                  the adapter's rank in each slice are left unwritten: what they hold is undefined
    parts     [SPLIT_K, T, slices * R] float32 scratch
    arrivals  int32, at least tiles * blocks along slices * R, all zero before and after; not shared by two launches
              that may run at the same time

Tiles of one row (decode with few rows) multiply and add on the CUDA cores; a tensor-core tile would be 15/16 padding.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lora_fastpath.kernels.launch import cdiv, launch
from lora_fastpath.kernels.tiles import HEADER as _HEADER

HEADER = tl.constexpr(_HEADER)


# The row count changes with every prefill: specializing on it would compile in the middle of serving.
@triton.jit(do_not_specialize=["tokens"])
def _shrink_kernel(
    x_ptr,
    a_ptr,
    h_ptr,
    parts_ptr,
    arrivals_ptr,
    tiles_ptr,
    tokens,
    x_row_stride,
    a_slot_stride,
    a_row_stride,
    K: tl.constexpr,
    N: tl.constexpr,
    SLICES: tl.constexpr,
    SPLIT_K: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    tile = tl.program_id(0)
    line = tiles_ptr + tile * (HEADER + BLOCK_ROWS)
    slot = tl.load(line)
    if slot < 0:
        return
    rank = tl.load(line + 1)
    columns = rank * SLICES
    first = tl.program_id(1) * BLOCK_N
    if first >= columns:
        return
    token = tl.load(line + HEADER + tl.arange(0, BLOCK_ROWS)).to(tl.int64)
    live = token >= 0
    n = first + tl.arange(0, BLOCK_N)
    n_live = n < columns
    part = tl.program_id(2)
    steps: tl.constexpr = (K + BLOCK_K * SPLIT_K - 1) // (BLOCK_K * SPLIT_K)
    even: tl.constexpr = K % (BLOCK_K * SPLIT_K) == 0
    k = part * (steps * BLOCK_K) + tl.arange(0, BLOCK_K)
    x_lines = x_ptr + token[:, None] * x_row_stride
    a_lines = a_ptr + slot.to(tl.int64) * a_slot_stride + n[:, None] * a_row_stride

    if BLOCK_ROWS == 1:
        products = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
        for _ in range(steps):
            k_live = (k < K) | even
            x = tl.load(x_lines + k[None, :], mask=k_live[None, :], other=0.0)
            a = tl.load(a_lines + k[None, :], mask=n_live[:, None] & k_live[None, :], other=0.0)
            products += a.to(tl.float32) * x.to(tl.float32)
            k += BLOCK_K
        h = tl.sum(products, axis=1)[None, :]
    else:
        h = tl.zeros((BLOCK_ROWS, BLOCK_N), dtype=tl.float32)
        for _ in range(steps):
            k_live = (k < K) | even
            x = tl.load(x_lines + k[None, :], mask=live[:, None] & k_live[None, :], other=0.0)
            a = tl.load(a_lines + k[None, :], mask=n_live[:, None] & k_live[None, :], other=0.0)
            h = tl.dot(x, tl.trans(a), h)
            k += BLOCK_K

    place = token[:, None] * N + n[None, :]
    place_live = live[:, None] & n_live[None, :]
    if SPLIT_K > 1:
        part_size = tokens.to(tl.int64) * N
        tl.store(parts_ptr + part * part_size + place, h, mask=place_live)
        tl.debug_barrier()  # every thread's part is written before one thread announces it
        arrival = arrivals_ptr + tile * tl.num_programs(1) + tl.program_id(1)
        if tl.atomic_add(arrival, 1, sem="acq_rel") != SPLIT_K - 1:
            return
        tl.store(arrival, 0)
        # Columns past the adapter's own are read too (and dropped by the last store): their mask is known at compile
        # time, so these are 16-byte loads. Past the L1 cache, which other blocks' writes do not reach.
        readable = live[:, None] & (n < N)[None, :]
        h = tl.load(parts_ptr + place, mask=readable, other=0.0, cache_modifier=".cg")
        for other in tl.static_range(1, SPLIT_K):
            h += tl.load(parts_ptr + other * part_size + place, mask=readable, other=0.0, cache_modifier=".cg")
    spread = n // rank * (N // SLICES) + n % rank
    tl.store(h_ptr + token[:, None] * N + spread[None, :], h.to(h_ptr.dtype.element_ty), mask=place_live)


def shrink(
    x: torch.Tensor,
    a: torch.Tensor,
    tiles: torch.Tensor,
    h: torch.Tensor,
    parts: torch.Tensor | None,
    arrivals: torch.Tensor | None,
    *,
    slices: int,
    block_n: int = 16,
    block_k: int = 256,
) -> None:
    """Launch one shrink (shapes above); `parts` gives SPLIT_K (None: 1), `tiles` the rows a tile."""
    tokens, n = h.shape
    split_k = 1 if parts is None else parts.shape[0]
    strides = (x.stride(0), a.stride(0), a.stride(1))
    constants = (x.shape[1], n, slices, split_k, tiles.shape[1] - _HEADER, block_n, block_k)
    launch(
        _shrink_kernel,
        (x.dtype, strides),
        (tiles.shape[0], cdiv(n, block_n), split_k),
        (x, a, h, parts, arrivals, tiles),
        (tokens, *strides),
        constants,
        {"num_warps": 4, "num_stages": 3},
    )
