"""Mixture-of-experts activation with the gate and up deltas added on the way: it takes the place of the base activation.

    out[p, i] = silu(g + dg) * (u + du)        silu(z) = z / (1 + exp(-z))

    g, u     gate_up[p, i], gate_up[p, I + i]
    dg, du   delta[p, i], delta[p, I + i]; nothing for pairs that get no delta

    gate_up  [P, 2I]  BF16 or FP16, unit stride along its columns
    delta    [P, 2I]  same dtype, contiguous; undefined in rows of pairs that get no delta. Or None: there is no delta
    routing  see moe_routing.py
    out      [P, I]   dtype of gate_up, unit stride along I; pairs of experts on other ranks are left unwritten
    codes    [P, I]         float8 e4m3, contiguous: out over its scale, for a base GEMM of FP8 blocks. Or None
    scales   [P, I / 128]   float32, contiguous: of each 128 columns, their largest magnitude / 448

Sums and silu are float32 and rounded once, in out. Rows without a delta have the bits of a batch without adapters.

It is launched with programmatic dependent launch where the GPU has it, which hides the launch; nothing is read before
the wait, as the delta comes from the side stream.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lora_fastpath.kernels.launch import cdiv, launch
from lora_fastpath.kernels.moe_routing import Routing, gets_delta

FEW_PAIRS = 256
"""Up to so many a block has one row, past it 8. Not tuned."""

BLOCK_N = 256


@triton.jit
def silu_and_mul(gate, up, FAST_MATH: tl.constexpr):
    """gate / (1 + exp(-gate)) * up; FAST_MATH as for moe_activate."""
    if FAST_MATH:
        return tl.inline_asm_elementwise(
            """{
            .reg .f32 t;
            mul.ftz.f32 t, $1, 0fBFB8AA3B;
            ex2.approx.ftz.f32 t, t;
            add.ftz.f32 t, t, 0f3F800000;
            div.approx.ftz.f32 t, $1, t;
            mul.ftz.f32 $0, t, $2;
            }""",
            "=f,f,f",
            [gate, up],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def quantize(x, FAST_MATH: tl.constexpr):
    """x [rows, columns] float32 as codes [rows, columns] and scales [rows, columns / 128].

    FAST_MATH: with the GPU's approximate reciprocal, as sglang's own kernel is compiled; the codes have its bits.
    """
    groups: tl.constexpr = x.shape[1] // 128
    x = tl.reshape(x, (x.shape[0], groups, 128))
    largest = tl.maximum(tl.max(tl.abs(x), axis=2), 1e-10)
    if FAST_MATH:
        factor = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [largest], dtype=tl.float32, is_pure=True, pack=1
        )
        factor *= 448.0
    else:
        factor = 448.0 / largest
    codes = tl.minimum(tl.maximum(x * factor[:, :, None], -448.0), 448.0)
    return tl.reshape(codes, (x.shape[0], groups * 128)), largest * (1.0 / 448.0)


@triton.jit
def with_delta(
    gate, up, pair, n, expert, inside, delta_ptr, row_slots_ptr, slot_ranks_ptr, pairs, experts, top_k, I: tl.constexpr  # noqa: E741
):  # fmt: skip
    """gate and up [rows, columns] float32 with the deltas of the pairs [rows] that get one, at columns n of I."""
    if delta_ptr is not None:
        # Asked for before it is known which rows have one: a load that waits for another is most of this kernel's time.
        at = pair.to(tl.int64)[:, None] * (2 * I) + n[None, :]
        gate_delta = tl.load(delta_ptr + at, mask=inside, other=0.0).to(tl.float32)
        up_delta = tl.load(delta_ptr + I + at, mask=inside, other=0.0).to(tl.float32)
        changed = gets_delta(pair, expert, pair < pairs, row_slots_ptr, slot_ranks_ptr, experts, top_k)[:, None]
        # Not 0 for rows without: -0.0 + 0.0 is not -0.0.
        gate = tl.where(changed, gate + gate_delta, gate)
        up = tl.where(changed, up + up_delta, up)
    return gate, up


# Left open for the reasons that moe_delta.py gives.
@triton.jit(do_not_specialize=["pairs", "experts", "top_k"])
def _moe_activate_kernel(
    gate_up_ptr,
    delta_ptr,
    out_ptr,
    codes_ptr,
    scales_ptr,
    topk_ids_ptr,
    row_slots_ptr,
    slot_ranks_ptr,
    pairs,
    experts,
    top_k,
    gate_up_row_stride,
    out_row_stride,
    I: tl.constexpr,  # noqa: E741
    BLOCK_ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    FAST_MATH: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    pair = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    inside = (pair < pairs)[:, None] & (n < I)[None, :]
    at = pair.to(tl.int64)[:, None] * gate_up_row_stride + n[None, :]
    gate = tl.load(gate_up_ptr + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + I + at, mask=inside, other=0.0).to(tl.float32)
    expert = tl.load(topk_ids_ptr + pair, mask=pair < pairs, other=-1)
    gate, up = with_delta(
        gate, up, pair, n, expert, inside, delta_ptr, row_slots_ptr, slot_ranks_ptr, pairs, experts, top_k, I
    )
    out = silu_and_mul(gate, up, FAST_MATH)
    out = out.to(out_ptr.dtype.element_ty)
    pair, here = pair.to(tl.int64)[:, None], (expert >= 0)[:, None]
    tl.store(out_ptr + pair * out_row_stride + n[None, :], out, mask=inside & here)
    if codes_ptr is not None:
        codes, scales = quantize(out.to(tl.float32), FAST_MATH)
        tl.store(codes_ptr + pair * I + n[None, :], codes.to(codes_ptr.dtype.element_ty), mask=inside & here)
        group = tl.program_id(1) * (BLOCK_N // 128) + tl.arange(0, BLOCK_N // 128)[None, :]
        tl.store(scales_ptr + pair * (I // 128) + group, scales, mask=here & (group < I // 128))


def moe_activate(
    gate_up: torch.Tensor,
    delta: torch.Tensor | None,
    routing: Routing,
    out: torch.Tensor,
    codes: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
    *,
    fast_math: bool = False,
    pdl: bool = False,
) -> None:
    """Launch one activation (shapes above).

    fast_math: silu with the GPU's approximate exponential and quotient, denormals flushed: the instructions that nvcc
    makes of x / (1 + expf(-x)) * y under --use_fast_math, so the bits of a base activation that is compiled that way.
    """
    intermediate = out.shape[1]
    block_rows = 1 if routing.pairs <= FEW_PAIRS else 8
    strides = (gate_up.stride(0), out.stride(0))
    launch(
        _moe_activate_kernel,
        (gate_up.dtype, strides, delta is None, codes is None),
        (cdiv(routing.pairs, block_rows), cdiv(intermediate, BLOCK_N)),
        (gate_up, delta, out, codes, scales, routing.topk_ids, routing.row_slots, routing.slot_ranks),
        (routing.pairs, routing.experts, routing.top_k, *strides),
        (intermediate, block_rows, BLOCK_N, fast_math, pdl),
        {"num_warps": 4, "num_stages": 1} | ({"launch_pdl": True} if pdl else {}),
    )
