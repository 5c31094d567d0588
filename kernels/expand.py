"""Grouped expand: the second half of a LoRA delta, added into the base layer's output in place.

    y[t, n] += scaling(slot(t)) * sum over r < rank of h[t, s * R + r] * B[slot(t), n, r]

where s is the slice that output column n belongs to (q, k and v of one fused layer, gate and up, ...) and h is what the
shrink kernel wrote. The product is made in float32 and rounded once, when it is added to y. Rows without an adapter are
in no tile and keep the base layer's bits.

    h      [T, slices * R]        BF16 or FP16, a slice every R columns
    B      [S, >= ends[-1], R]    same dtype, unit stride along R
    tiles  [tiles, HEADER + BLOCK_ROWS] int32, see tiles.py
    y      [T, >= ends[-1]]       same dtype, unit stride along its columns; columns past ends[-1] stay as they are
    ends   where each slice ends in y and in B's lines: one to four increasing numbers, widths may differ

This kernel is what a LoRA layer adds to the critical path, so it is launched with programmatic dependent launch where
the GPU has it: header and B are on their way before the base GEMM has ended, only h and y wait for it.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from lora_fastpath.kernels.launch import cdiv, launch, power_of_2
from lora_fastpath.kernels.tiles import HEADER as _HEADER

HEADER = tl.constexpr(_HEADER)
MAX_SLICES = 4


@triton.jit
def _expand_tile(
    tile,
    piece,
    n,
    n_live,
    h_ptr,
    b_ptr,
    y_ptr,
    tiles_ptr,
    y_row_stride,
    b_slot_stride,
    b_row_stride,
    R: tl.constexpr,
    SLICES: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PDL: tl.constexpr,
):
    line = tiles_ptr + tile * (HEADER + BLOCK_ROWS)
    slot = tl.load(line)
    rank = tl.load(line + 1)
    scaling = tl.load(line + 2).to(tl.float32, bitcast=True)
    token = tl.load(line + HEADER + tl.arange(0, BLOCK_ROWS)).to(tl.int64)
    live = token >= 0
    r = tl.arange(0, BLOCK_R)
    # What lies past the adapter's rank is stale. It is loaded and then dropped: a mask that depends on the rank would
    # turn 16-byte loads into 2-byte ones.
    in_buffer = r < R
    r_live = r < rank
    b = tl.load(
        b_ptr + slot.to(tl.int64) * b_slot_stride + n.to(tl.int64)[:, None] * b_row_stride + r[None, :],
        mask=n_live[:, None] & in_buffer[None, :],
        other=0.0,
    )
    b = tl.where(r_live[None, :], b, 0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    h = tl.load(
        h_ptr + token[:, None] * (SLICES * R) + (piece * R + r)[None, :],
        mask=live[:, None] & in_buffer[None, :],
        other=0.0,
    )
    h = tl.where(r_live[None, :], h, 0.0)
    y_tile = y_ptr + token[:, None] * y_row_stride + n[None, :]
    y_live = live[:, None] & n_live[None, :]
    y = tl.load(y_tile, mask=y_live, other=0.0)
    if BLOCK_ROWS == 1:
        delta = tl.sum(b.to(tl.float32) * h.to(tl.float32), axis=1)[None, :]
    else:
        delta = tl.dot(h, tl.trans(b))
    tl.store(y_tile, (y.to(tl.float32) + delta * scaling).to(y.dtype), mask=y_live)


@triton.jit
def _expand_kernel(
    h_ptr,
    b_ptr,
    y_ptr,
    tiles_ptr,
    y_row_stride,
    b_slot_stride,
    b_row_stride,
    R: tl.constexpr,
    SLICES: tl.constexpr,
    END0: tl.constexpr,
    END1: tl.constexpr,
    END2: tl.constexpr,
    END3: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    # Blocks are counted slice by slice, so that no block straddles two slices.
    block = tl.program_id(0)
    piece = 0
    start = block * BLOCK_N
    end = END0
    if SLICES > 1:
        before1: tl.constexpr = (END0 + BLOCK_N - 1) // BLOCK_N
        later = block >= before1
        piece = tl.where(later, 1, piece)
        start = tl.where(later, END0 + (block - before1) * BLOCK_N, start)
        end = tl.where(later, END1, end)
    if SLICES > 2:
        before2: tl.constexpr = before1 + (END1 - END0 + BLOCK_N - 1) // BLOCK_N
        later = block >= before2
        piece = tl.where(later, 2, piece)
        start = tl.where(later, END1 + (block - before2) * BLOCK_N, start)
        end = tl.where(later, END2, end)
    if SLICES > 3:
        before3: tl.constexpr = before2 + (END2 - END1 + BLOCK_N - 1) // BLOCK_N
        later = block >= before3
        piece = tl.where(later, 3, piece)
        start = tl.where(later, END2 + (block - before3) * BLOCK_N, start)
        end = tl.where(later, END3, end)
    n = start + tl.arange(0, BLOCK_N)
    n_live = n < end

    # A table has lines for the worst mix of adapters and a batch uses few of them: blocks of unused lines leave here,
    # before they wait for anything. One stage: pipelining would load h ahead of the wait that makes it valid.
    used = tl.load(tiles_ptr + 3)
    if PDL:
        if used <= 0:
            # The kernel after this one waits for this one alone, so this one must not end before the base GEMM has.
            tl.extra.cuda.gdc_wait()
    for tile in tl.range(tl.program_id(1), used, tl.num_programs(1), num_stages=1):
        _expand_tile(
            tile, piece, n, n_live, h_ptr, b_ptr, y_ptr, tiles_ptr, y_row_stride, b_slot_stride, b_row_stride,
            R, SLICES, BLOCK_ROWS, BLOCK_R, PDL,
        )  # fmt: skip


@functools.cache
def _columns(ends: tuple[int, ...], block_n: int) -> tuple[int, tuple[int, ...]]:
    """Blocks along the slices, and their ends made up to MAX_SLICES."""
    blocks = sum(cdiv(end - start, block_n) for start, end in zip((0, *ends), ends))
    return blocks, (*ends, *(ends[-1],) * (MAX_SLICES - len(ends)))


def expand(
    h: torch.Tensor,
    b: torch.Tensor,
    tiles: torch.Tensor,
    y: torch.Tensor,
    *,
    ends: tuple[int, ...],
    block_n: int = 128,
    pdl: bool = False,
) -> None:
    """Launch one expand (shapes above), in place on `y`."""
    blocks, padded = _columns(ends, block_n)
    rank = b.shape[2]
    strides = (y.stride(0), b.stride(0), b.stride(1))
    constants = (
        rank, len(ends), *padded, tiles.shape[1] - _HEADER, block_n, max(16, power_of_2(rank)), pdl,
    )  # fmt: skip
    launch(
        _expand_kernel,
        (y.dtype, strides),
        (blocks, tiles.shape[0]),
        (h, b, y, tiles),
        strides,
        constants,
        {"num_warps": 4, "num_stages": 1} | ({"launch_pdl": True} if pdl else {}),
    )
