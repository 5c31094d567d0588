"""Per-head product of a LoRA delta: for attention that applies a layer's weight head by head (absorbed MLA).

    add = False:    y[t, h, n]  =                     sum over k of        x[t, h, k] * W[slot(t), h, n, k]     n < rank
    add = True:     y[t, h, n] += scaling(slot(t)) * sum over k < rank of  x[t, h, k] * W[slot(t), h, n, k]

so the first is a shrink (N is the rank) and the second an expand (K is the rank). The product is float32 and rounded
once. Rows without an adapter are in no tile: their lines of y are not written. Shrunk columns past the adapter's rank
are undefined, and an expand does not use them.

    x      [T, heads, K]       BF16 or FP16, unit stride along K
    W      [S, heads, N, K]    same dtype, any strides: a transposed view, or one matrix for all heads (stride 0)
    tiles  int32, see tiles.py
    y      [T, heads, N]       same dtype, unit stride along N
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lora_fastpath.kernels.launch import cdiv, launch, power_of_2
from lora_fastpath.kernels.tiles import HEADER as _HEADER

HEADER = tl.constexpr(_HEADER)


# The rows' and heads' strides can be the batch's size: specializing on them would compile in the middle of serving.
@triton.jit(do_not_specialize=["x_row_stride", "x_head_stride", "y_row_stride", "y_head_stride"])
def _heads_kernel(
    x_ptr,
    w_ptr,
    y_ptr,
    tiles_ptr,
    x_row_stride,
    x_head_stride,
    y_row_stride,
    y_head_stride,
    w_slot_stride,
    w_head_stride,
    w_n_stride,
    w_k_stride,
    K: tl.constexpr,
    N: tl.constexpr,
    ADD: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    tile = tl.program_id(0)
    if tile >= tl.load(tiles_ptr + 3):
        return
    line = tiles_ptr + tile * (HEADER + BLOCK_ROWS)
    slot = tl.load(line)
    rank = tl.load(line + 1)
    scaling = tl.load(line + 2).to(tl.float32, bitcast=True)
    token = tl.load(line + HEADER + tl.arange(0, BLOCK_ROWS)).to(tl.int64)
    live = token >= 0
    head = tl.program_id(1).to(tl.int64)
    n = tl.program_id(2) * BLOCK_N + tl.arange(0, BLOCK_N)
    n_live = n < N if ADD else n < rank
    last = rank if ADD else K
    w_tile = w_ptr + slot.to(tl.int64) * w_slot_stride + head * w_head_stride + n[:, None] * w_n_stride
    x_tile = x_ptr + token[:, None] * x_row_stride + head * x_head_stride
    y = tl.zeros((BLOCK_ROWS, BLOCK_N), dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        w = tl.load(w_tile + k[None, :] * w_k_stride, mask=n_live[:, None] & (k < last)[None, :], other=0.0)
        x = tl.load(x_tile + k[None, :], mask=live[:, None] & (k < last)[None, :], other=0.0)
        if BLOCK_ROWS == 1:
            y += tl.sum(w.to(tl.float32) * x.to(tl.float32), axis=1)[None, :]
        else:
            y = tl.dot(x, tl.trans(w), y)
    to = y_ptr + token[:, None] * y_row_stride + head * y_head_stride + n[None, :]
    to_live = live[:, None] & n_live[None, :]
    if ADD:
        y = tl.load(to, mask=to_live, other=0.0).to(tl.float32) + y * scaling
    tl.store(to, y.to(y_ptr.dtype.element_ty), mask=to_live)


def heads_product(
    x: torch.Tensor, w: torch.Tensor, tiles: torch.Tensor, y: torch.Tensor, *, add: bool, pdl: bool = False
) -> None:
    """Launch one product (shapes above)."""
    _, heads, n, k = w.shape
    block_n = max(16, min(128 if add else 32, power_of_2(n)))
    block_k = max(16, min(128, power_of_2(k)))
    launch(
        _heads_kernel,
        (x.dtype, w.stride()),
        (tiles.shape[0], heads, cdiv(n, block_n)),
        (x, w, y, tiles),
        (x.stride(0), x.stride(1), y.stride(0), y.stride(1), *w.stride()),
        (k, n, add, tiles.shape[1] - _HEADER, block_n, block_k, pdl),
        {"num_warps": 4, "num_stages": 2} | ({"launch_pdl": True} if pdl else {}),
    )
