"""Mixture-of-experts expand: the second half of a LoRA delta, added into the down projection's output in place.

    y[p, n] += weights[p] * sum over r < rank of h[p, r] * B[slot(p), expert(p), n, r]

    h        [SPLIT_K, P, R]   float32, what the shrink kernel wrote; undefined rows and columns are not used
    B        [S, E or 1, H, R] BF16 or FP16, each expert's matrix contiguous, scaling folded in; may hold anything past
                               the adapter's rank
    weights  [P]               float32, the router's weight of each pair, contiguous
    route    see moe_route.py
    y        [P, H]            dtype of B, unit stride along H

h is rounded to B's dtype once; the product is float32 and rounded once, when it is added to y. Rows that get no delta
are in no tile and keep the base GEMM's bits.

It is launched with programmatic dependent launch where the GPU has it, which hides the launch; nothing is read before
the wait, as the routing comes from the side stream.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lora_fastpath.kernels.launch import cdiv, launch, power_of_2
from lora_fastpath.kernels.moe_route import TILE_PROGRAMS, Route, expert_stride, load_b, load_h, load_tile


# The number of pairs changes with every prefill: specializing on it would compile in the middle of serving.
@triton.jit(do_not_specialize=["pairs"])
def _moe_expand_kernel(
    h_ptr,
    b_ptr,
    weights_ptr,
    y_ptr,
    tiles_ptr,
    pairs,
    b_slot_stride,
    b_expert_stride,
    y_row_stride,
    H: tl.constexpr,
    R: tl.constexpr,
    SPLIT_K: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    n_live = n < H
    dtype: tl.constexpr = b_ptr.dtype.element_ty
    part_stride = pairs.to(tl.int64) * R
    for tile in tl.range(tl.program_id(1), tl.load(tiles_ptr + 3), tl.num_programs(1), num_stages=1):
        slot, expert, rank, pair, live = load_tile(tiles_ptr, tile, BLOCK_ROWS)
        y_tile = y_ptr + pair[:, None] * y_row_stride + n[None, :]
        y_live = live[:, None] & n_live[None, :]
        y = tl.load(y_tile, mask=y_live, other=0.0)
        weight = tl.load(weights_ptr + pair, mask=live, other=0.0)
        b = load_b(b_ptr, slot, expert, rank, n, n_live, b_slot_stride, b_expert_stride, R, BLOCK_R)
        h = load_h(h_ptr, pair, live, rank, 0, part_stride, dtype, R, R, BLOCK_R, SPLIT_K)
        delta = tl.dot(h, tl.trans(b)) * weight[:, None]
        tl.store(y_tile, (y.to(tl.float32) + delta).to(y.dtype), mask=y_live)


def moe_expand(
    h: torch.Tensor,
    b: torch.Tensor,
    weights: torch.Tensor,
    route: Route,
    y: torch.Tensor,
    *,
    block_n: int | None = None,
    pdl: bool = False,
) -> None:
    """Launch one expand (shapes above), in place on `y`."""
    hidden, r = b.shape[2], b.shape[3]
    block_r = max(16, power_of_2(r))
    # B, y and the product are held in registers at once: this many columns fit without spilling.
    block_n = block_n or max(16, min(128, 8192 // max(block_r, route.block_rows)))
    strides = (b.stride(0), expert_stride(b), y.stride(0))
    launch(
        _moe_expand_kernel,
        (y.dtype, strides),
        (cdiv(hidden, block_n), min(route.tiles.shape[0], TILE_PROGRAMS)),
        (h, b, weights, y, route.tiles),
        (route.pairs, *strides),
        (hidden, r, h.shape[0], route.block_rows, block_n, block_r, pdl),
        {"num_warps": 4, "num_stages": 1} | ({"launch_pdl": True} if pdl else {}),
    )
