"""Mixture-of-experts activation with the gate and up deltas added on the way: it takes the place of the base activation.

    out[p, i] = silu(g + dg) * (u + du)        silu(z) = z / (1 + exp(-z))

    g  = gate_up[p, i]        dg = sum over r < rank of h[p, r]     * B[slot(p), expert(p), i, r]
    u  = gate_up[p, I + i]    du = sum over r < rank of h[p, R + r] * B[slot(p), expert(p), I + i, r]

    gate_up  [P, 2I]            BF16 or FP16, unit stride along its columns
    h        [SPLIT_K, P, 2R]   float32, what the shrink kernel wrote; undefined rows and columns are not used
    B        [S, E or 1, 2I, R] dtype of gate_up, each expert's matrix contiguous, scaling folded in; may hold anything
                                past the adapter's rank
    route    see moe_route.py
    out      [P, I]             dtype of gate_up, unit stride along I; pairs of experts on other ranks are left unwritten

h is rounded to B's dtype once; the rest is float32 and rounded once, in out: g + dg is never rounded. The first blocks
of a launch take the route's tiles, the others rows in order and of them those that get no delta: their bits are those of
a batch without adapters.

It is launched with programmatic dependent launch where the GPU has it, which hides the launch; nothing is read before
the wait, as the routing comes from the side stream.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lora_fastpath.kernels.launch import cdiv, launch, power_of_2
from lora_fastpath.kernels.moe_route import TILE_PROGRAMS, Route, expert_stride, load_b, load_h, load_tile, slot_of


@triton.jit
def _silu_and_mul(gate, up, FAST_MATH: tl.constexpr):
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
def _activate_tile(
    tile, n, n_live, gate_up_ptr, h_ptr, b_ptr, out_ptr, tiles_ptr, pairs,
    gate_up_row_stride, b_slot_stride, b_expert_stride, out_row_stride,
    I: tl.constexpr, R: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_R: tl.constexpr, SPLIT_K: tl.constexpr,  # noqa: E741
    FAST_MATH: tl.constexpr,
):  # fmt: skip
    slot, expert, rank, pair, live = load_tile(tiles_ptr, tile, BLOCK_ROWS)
    dtype: tl.constexpr = b_ptr.dtype.element_ty
    part_stride = pairs.to(tl.int64) * (2 * R)
    at = pair[:, None] * gate_up_row_stride + n[None, :]
    at_live = live[:, None] & n_live[None, :]
    # All six are asked for before the first is used.
    gate = tl.load(gate_up_ptr + at, mask=at_live, other=0.0)
    up = tl.load(gate_up_ptr + I + at, mask=at_live, other=0.0)
    b_gate = load_b(b_ptr, slot, expert, rank, n, n_live, b_slot_stride, b_expert_stride, R, BLOCK_R)
    b_up = load_b(b_ptr, slot, expert, rank, I + n, n_live, b_slot_stride, b_expert_stride, R, BLOCK_R)
    h_gate = load_h(h_ptr, pair, live, rank, 0, part_stride, dtype, 2 * R, R, BLOCK_R, SPLIT_K)
    h_up = load_h(h_ptr, pair, live, rank, R, part_stride, dtype, 2 * R, R, BLOCK_R, SPLIT_K)
    gate = gate.to(tl.float32) + tl.dot(h_gate, tl.trans(b_gate))
    up = up.to(tl.float32) + tl.dot(h_up, tl.trans(b_up))
    out = _silu_and_mul(gate, up, FAST_MATH)
    tl.store(out_ptr + pair[:, None] * out_row_stride + n[None, :], out.to(out_ptr.dtype.element_ty), mask=at_live)


# Left open for the reasons that moe_route.py gives.
@triton.jit(do_not_specialize=["pairs", "tile_programs", "experts", "top_k"])
def _moe_activate_kernel(
    gate_up_ptr,
    h_ptr,
    b_ptr,
    out_ptr,
    topk_ids_ptr,
    row_slots_ptr,
    slot_ranks_ptr,
    tiles_ptr,
    pairs,
    tile_programs,
    experts,
    top_k,
    gate_up_row_stride,
    b_slot_stride,
    b_expert_stride,
    out_row_stride,
    I: tl.constexpr,  # noqa: E741
    R: tl.constexpr,
    SPLIT_K: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    FAST_MATH: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    n_live = n < I
    program = tl.program_id(1)
    if program < tile_programs:
        for tile in tl.range(program, tl.load(tiles_ptr + 3), tile_programs, num_stages=1):
            _activate_tile(
                tile, n, n_live, gate_up_ptr, h_ptr, b_ptr, out_ptr, tiles_ptr, pairs,
                gate_up_row_stride, b_slot_stride, b_expert_stride, out_row_stride,
                I, R, BLOCK_ROWS, BLOCK_R, SPLIT_K, FAST_MATH,
            )  # fmt: skip
    else:
        pair = (program - tile_programs) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        slot, expert = slot_of(pair, pair < pairs, topk_ids_ptr, row_slots_ptr, slot_ranks_ptr, experts, top_k)
        live = (slot < 0) & (expert >= 0)
        pair = pair.to(tl.int64)
        at = pair[:, None] * gate_up_row_stride + n[None, :]
        at_live = live[:, None] & n_live[None, :]
        gate = tl.load(gate_up_ptr + at, mask=at_live, other=0.0)
        up = tl.load(gate_up_ptr + I + at, mask=at_live, other=0.0)
        out = _silu_and_mul(gate.to(tl.float32), up.to(tl.float32), FAST_MATH)
        tl.store(out_ptr + pair[:, None] * out_row_stride + n[None, :], out.to(out_ptr.dtype.element_ty), mask=at_live)


def moe_activate(
    gate_up: torch.Tensor,
    h: torch.Tensor,
    b: torch.Tensor,
    route: Route,
    out: torch.Tensor,
    *,
    block_n: int | None = None,
    fast_math: bool = False,
    pdl: bool = False,
) -> None:
    """Launch one activation (shapes above).

    fast_math: silu with the GPU's approximate exponential and quotient, denormals flushed: the instructions that nvcc
    makes of x / (1 + expf(-x)) * y under --use_fast_math, so the bits of a base activation that is compiled that way.
    """
    r, intermediate = b.shape[3], b.shape[2] // 2
    block_r = max(16, power_of_2(r))
    # Gate, up and their B are held in registers at once: this many columns fit without spilling.
    block_n = block_n or max(16, min(128, 4096 // max(block_r, route.block_rows)))
    tile_programs = min(route.tiles.shape[0], TILE_PROGRAMS)
    strides = (gate_up.stride(0), b.stride(0), expert_stride(b), out.stride(0))
    launch(
        _moe_activate_kernel,
        (gate_up.dtype, strides),
        (cdiv(intermediate, block_n), tile_programs + cdiv(route.pairs, route.block_rows)),
        (gate_up, h, b, out, route.topk_ids, route.row_slots, route.slot_ranks, route.tiles),
        (route.pairs, tile_programs, route.experts, route.top_k, *strides),
        (intermediate, r, h.shape[0], route.block_rows, block_n, block_r, fast_math, pdl),
        {"num_warps": 4, "num_stages": 1} | ({"launch_pdl": True} if pdl else {}),
    )
