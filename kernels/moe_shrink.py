"""Mixture-of-experts shrink: the first half of a LoRA delta for every pair of a token and one of its experts.

    sum over s of h[s, p, n] = sum over i of x[p // rows_share, i] * A[slot(p), expert(p), n, i]

    x      [P or T, K]       BF16 or FP16, unit stride along K; rows_share is 1 for a row a pair (down), top_k for a row
                             a token (gate and up)
    A      [S, E or 1, N, K] same dtype, each expert's matrix contiguous; N = slices * R, a slice every R lines whatever
                             the adapter's rank (sglang's layout of experts; its dense buffers are packed)
    route  see moe_route.py
    h      [SPLIT_K, P, N]   float32, contiguous: part s is the sum over the s-th piece of K. Rows that get no delta and
                             columns past the adapter's rank in each slice are undefined

With few pairs K is split over blocks, or a block would walk all of it alone while most of the GPU is idle. The kernels
that read h add its parts, in order: no counters, nothing to clear. Lines of A past the adapter's rank are not read.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lora_fastpath.kernels.launch import cdiv, launch, power_of_2
from lora_fastpath.kernels.moe_route import Route, expert_stride, load_tile


# Left open for the reasons that moe_route.py gives.
@triton.jit(do_not_specialize=["pairs", "rows_share"])
def _moe_shrink_kernel(
    x_ptr,
    a_ptr,
    h_ptr,
    tiles_ptr,
    pairs,
    rows_share,
    x_row_stride,
    a_slot_stride,
    a_expert_stride,
    K: tl.constexpr,
    N: tl.constexpr,
    R: tl.constexpr,
    SPLIT_K: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    if tl.program_id(0) >= tl.load(tiles_ptr + 3):
        return
    slot, expert, rank, pair, live = load_tile(tiles_ptr, tl.program_id(0), BLOCK_ROWS)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    n_live = (n < N) & (n % R < rank)
    part = tl.program_id(2)
    steps: tl.constexpr = (K + BLOCK_K * SPLIT_K - 1) // (BLOCK_K * SPLIT_K)
    even: tl.constexpr = K % (BLOCK_K * SPLIT_K) == 0
    k = part * (steps * BLOCK_K) + tl.arange(0, BLOCK_K)
    x_lines = x_ptr + (pair // rows_share)[:, None] * x_row_stride
    a_lines = a_ptr + slot.to(tl.int64) * a_slot_stride + expert.to(tl.int64) * a_expert_stride + n[:, None] * K
    h = tl.zeros((BLOCK_ROWS, BLOCK_N), dtype=tl.float32)
    for _ in range(steps):
        k_live = (k < K) | even
        x = tl.load(x_lines + k[None, :], mask=live[:, None] & k_live[None, :], other=0.0)
        a = tl.load(a_lines + k[None, :], mask=n_live[:, None] & k_live[None, :], other=0.0)
        h = tl.dot(x, tl.trans(a), h)
        k += BLOCK_K
    place = part * pairs.to(tl.int64) * N + pair[:, None] * N + n[None, :]
    tl.store(h_ptr + place, h, mask=live[:, None] & n_live[None, :])


def moe_shrink(
    x: torch.Tensor,
    a: torch.Tensor,
    route: Route,
    h: torch.Tensor,
    *,
    slices: int,
    block_n: int | None = None,
    block_k: int | None = None,
) -> None:
    """Launch one shrink (shapes above); `slices` is 2 for gate and up, 1 for down."""
    n, k = a.shape[2], a.shape[3]
    block_n = block_n or max(16, min(32, power_of_2(n)))
    block_k = block_k or (256 if route.block_rows <= 32 else 64)
    strides = (x.stride(0), a.stride(0), expert_stride(a))
    launch(
        _moe_shrink_kernel,
        (x.dtype, strides),
        (route.tiles.shape[0], cdiv(n, block_n), h.shape[0]),
        (x, a, h, route.tiles),
        (route.pairs, route.pairs // x.shape[0], *strides),
        (k, n, n // slices, h.shape[0], route.block_rows, block_n, block_k),
        {"num_warps": 4, "num_stages": 3},
    )
