"""Activation of a mixture-of-experts layer in FlashInfer's permuted rows, with gate's and up's deltas added on the way.

    out[p, i] = silu(gate + gate_delta) * (up + up_delta)        silu(z) = z / (1 + exp(-z))

A pair p = t * top_k + k has the row permuted[p] in what FlashInfer's GEMMs read and write, and its own place in what the
LoRA kernels read and write. Rows that pad an expert's tiles are left unwritten.

    permuted  int32 [P]  row of a pair, -1 for an expert on another rank: out is 0 there
    delta     [P, 2I]    dtype of out, gate first, contiguous; undefined for pairs that get no delta. Or None
    routing   see moe_routing.py; its ids are those of this rank's experts
    out       [P, I]     BF16 or FP16, contiguous: what the down shrink reads

FP8 blocks:

    gate_up         float8 e4m3 [rows, 2I], contiguous, up in a row's first half
    gate_up_scales  float32 [2I / 128, rows in use], see below
    codes           float8 e4m3 [rows, I], contiguous
    code_scales     float32 [I / 128, rows in use]: the largest magnitude / 448, no less than the smallest normal number
    in_use          int32 [1]: the scales' row stride, which only the device knows. No more than the allocation's rows

NVFP4 (see fp4.py):

    gate_up       BF16 or FP16 [rows, 2I], contiguous, up's and gate's columns in turn, up first; gate_up_scales and in_use None
    codes         uint8 [rows, I / 2], contiguous
    code_scales   uint8, laid out for a GEMM whose tiles have so many rows
    global_scale  float32 [1]

All is float32 until out, codes and scales are rounded, each from the same float32 value, as FlashInfer's are. It is launched
with programmatic dependent launch where the GPU has it; nothing is read before the wait, as the delta comes from the side
stream.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lora_fastpath.kernels.fp4 import GROUP, quantize_fp4, scale_offset, span
from lora_fastpath.kernels.launch import cdiv, launch
from lora_fastpath.kernels.moe_activate import BLOCK_N, FEW_PAIRS, silu_and_mul, with_delta
from lora_fastpath.kernels.moe_routing import Routing


@triton.jit
def _divide(x, y, FAST_MATH: tl.constexpr):
    """x / y; FAST_MATH: as nvcc makes it under --use_fast_math."""
    if FAST_MATH:
        return tl.inline_asm_elementwise(
            "div.approx.ftz.f32 $0, $1, $2;",
            "=f,f,f",
            [x, y + tl.zeros_like(x)],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    return x / y


# Left open for the reasons that moe_delta.py gives.
@triton.jit(do_not_specialize=["pairs", "experts", "top_k"])
def _sm100_activate_kernel(
    gate_up_ptr,
    gate_up_scales_ptr,
    delta_ptr,
    out_ptr,
    codes_ptr,
    code_scales_ptr,
    global_scale_ptr,
    permuted_ptr,
    in_use_ptr,
    topk_ids_ptr,
    row_slots_ptr,
    slot_ranks_ptr,
    pairs,
    experts,
    top_k,
    I: tl.constexpr,  # noqa: E741
    SPAN: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    FAST_MATH: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    BLOCKS: tl.constexpr = BLOCK_N // 128
    SHAPE: tl.constexpr = (BLOCK_ROWS, BLOCKS, 128)
    first = tl.program_id(1) * BLOCK_N
    n = first + tl.arange(0, BLOCK_N)
    block = first // 128 + tl.arange(0, BLOCKS)[None, :]
    pair = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    live = pair < pairs
    row = tl.load(permuted_ptr + pair, mask=live, other=-1).to(tl.int64)[:, None]
    inside = live[:, None] & (n < I)[None, :]
    here = inside & (row >= 0)
    if gate_up_scales_ptr is not None:
        stride = tl.load(in_use_ptr).to(tl.int64)
        scale_at = row + stride * block
        scaled = (row >= 0) & (block < I // 128)
        at = row * (2 * I) + n[None, :]
        up = tl.load(gate_up_ptr + at, mask=here, other=0.0).to(tl.float32)
        gate = tl.load(gate_up_ptr + I + at, mask=here, other=0.0).to(tl.float32)
        up_scale = tl.load(gate_up_scales_ptr + scale_at, mask=scaled, other=0.0)
        gate_scale = tl.load(gate_up_scales_ptr + stride * (I // 128) + scale_at, mask=scaled, other=0.0)
        up = tl.reshape(tl.reshape(up, SHAPE) * up_scale[:, :, None], (BLOCK_ROWS, BLOCK_N))
        gate = tl.reshape(tl.reshape(gate, SHAPE) * gate_scale[:, :, None], (BLOCK_ROWS, BLOCK_N))
    else:
        column = (2 * first + tl.arange(0, 2 * BLOCK_N))[None, :]
        both = tl.load(gate_up_ptr + row * (2 * I) + column, mask=(row >= 0) & (column < 2 * I), other=0.0)
        up, gate = tl.split(tl.reshape(both.to(tl.float32), (BLOCK_ROWS, BLOCK_N, 2)))
    expert = tl.load(topk_ids_ptr + pair, mask=live, other=-1)
    gate, up = with_delta(
        gate, up, pair, n, expert, here, delta_ptr, row_slots_ptr, slot_ranks_ptr, pairs, experts, top_k, I
    )
    out = tl.where(here, silu_and_mul(gate, up, FAST_MATH), 0.0)
    tl.store(out_ptr + pair.to(tl.int64)[:, None] * I + n[None, :], out.to(out_ptr.dtype.element_ty), mask=inside)
    if gate_up_scales_ptr is not None:
        out = tl.reshape(out, SHAPE)
        scale = tl.maximum(_divide(tl.max(tl.abs(out), axis=2), 448.0, FAST_MATH), 1.1754943508222875e-38)
        codes = tl.reshape(_divide(out, scale[:, :, None], FAST_MATH), (BLOCK_ROWS, BLOCK_N))
        codes = tl.minimum(tl.maximum(codes, -448.0), 448.0)
        tl.store(codes_ptr + row * I + n[None, :], codes.to(codes_ptr.dtype.element_ty), mask=here)
        tl.store(code_scales_ptr + scale_at, scale, mask=scaled)
    else:
        codes, scale = quantize_fp4(out, tl.load(global_scale_ptr))
        byte = first // 2 + tl.arange(0, BLOCK_N // 2)[None, :]
        mask = (row >= 0) & (byte < I // 2)
        tl.store(codes_ptr + row * (I // 2) + byte, codes.to(tl.uint8), mask=mask)
        group = first // GROUP + tl.arange(0, BLOCK_N // GROUP)[None, :]
        mask = (row >= 0) & (group < I // GROUP)
        tl.store(code_scales_ptr + scale_offset(row, group, I // GROUP, SPAN), scale.to(tl.uint8), mask=mask)


def sm100_activate(
    gate_up: torch.Tensor,
    gate_up_scales: torch.Tensor | None,
    delta: torch.Tensor | None,
    permuted: torch.Tensor,
    in_use: torch.Tensor | None,
    routing: Routing,
    out: torch.Tensor,
    codes: torch.Tensor,
    code_scales: torch.Tensor,
    global_scale: torch.Tensor | None = None,
    tile: int = 8,
    *,
    fast_math: bool = False,
    pdl: bool = False,
) -> None:
    """Launch one activation (shapes above; I a multiple of 128 for FP8 blocks, of 64 for NVFP4).

    tile: rows of a tile of the GEMM that reads the codes; NVFP4's scales are laid out by it.
    fast_math: as for moe_activate, and FP8's quotients too.
    """
    intermediate = out.shape[1]
    block_rows = 1 if routing.pairs <= FEW_PAIRS else 8
    tables = (permuted, in_use, routing.topk_ids, routing.row_slots, routing.slot_ranks)
    launch(
        _sm100_activate_kernel,
        (out.dtype, gate_up.dtype, delta is None),
        (cdiv(routing.pairs, block_rows), cdiv(intermediate, BLOCK_N)),
        (gate_up, gate_up_scales, delta, out, codes, code_scales, global_scale, *tables),
        (routing.pairs, routing.experts, routing.top_k),
        (intermediate, span(tile), block_rows, BLOCK_N, fast_math, pdl),
        {"num_warps": 4, "num_stages": 1} | ({"launch_pdl": True} if pdl else {}),
    )
