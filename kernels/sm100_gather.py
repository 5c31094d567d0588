"""NVFP4 rows of tokens, and their scales, into FlashInfer's permuted rows: what an unrouted gate_up GEMM reads.

    permuted    int32 [P]       row of a pair p = t * top_k + k, -1 for an expert on another rank
    x           uint8 [T, H / 2]   codes, contiguous; see fp4.py
    scales      uint8 [T, H / 16]  E4M3, contiguous
    rows        uint8 [rows, H / 2], contiguous
    row_scales  uint8, laid out for a GEMM whose tiles have so many rows (fp4.py)

Rows that pad an expert's tiles are left unwritten. A token is read once, however many experts it has.

Launched with programmatic dependent launch it waits for what is before it and does not let the next kernel start early:
FlashInfer's unrouted GEMMs do not wait for what they read.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lora_fastpath.kernels.fp4 import GROUP, scale_offset, span
from lora_fastpath.kernels.launch import cdiv, launch

BLOCK = 2048
"""Columns, two a byte."""


@triton.jit
def _sm100_gather_kernel(
    x_ptr,
    scales_ptr,
    rows_ptr,
    row_scales_ptr,
    permuted_ptr,
    H: tl.constexpr,
    TOP_K: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    byte = tl.program_id(1) * (BLOCK // 2) + tl.arange(0, BLOCK // 2)
    group = tl.program_id(1) * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)
    codes = tl.load(x_ptr + token * (H // 2) + byte, mask=byte < H // 2)
    scales = tl.load(scales_ptr + token * (H // GROUP) + group, mask=group < H // GROUP)
    for k in tl.static_range(TOP_K):
        row = tl.load(permuted_ptr + token * TOP_K + k).to(tl.int64)
        tl.store(rows_ptr + row * (H // 2) + byte, codes, mask=(row >= 0) & (byte < H // 2))
        at = scale_offset(row, group, H // GROUP, SPAN)
        tl.store(row_scales_ptr + at, scales, mask=(row >= 0) & (group < H // GROUP))


def sm100_gather(
    x: torch.Tensor,
    scales: torch.Tensor,
    permuted: torch.Tensor,
    rows: torch.Tensor,
    row_scales: torch.Tensor,
    tile: int,
    *,
    pdl: bool = False,
) -> None:
    """Launch one gather (shapes above; H a multiple of 64)."""
    tokens, hidden = x.shape[0], 2 * x.shape[1]
    launch(
        _sm100_gather_kernel,
        (),
        (tokens, cdiv(hidden, BLOCK)),
        (x, scales, rows, row_scales, permuted),
        (),
        (hidden, permuted.numel() // tokens, span(tile), BLOCK, pdl),
        {"num_warps": 4, "num_stages": 1} | ({"launch_pdl": True} if pdl else {}),
    )
