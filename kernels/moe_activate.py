"""Mixture-of-experts activation with the gate and up deltas added on the way: it takes the place of the base activation.

    out[p, i] = silu(g + dg) * (u + du)        silu(z) = z / (1 + exp(-z))

    g  = gate_up[p, i]        dg = sum over r < rank of h[p, r]     * B[slot(p), expert(p), i, r]
    u  = gate_up[p, I + i]    du = sum over r < rank of h[p, R + r] * B[slot(p), expert(p), I + i, r]

    gate_up  [P, 2I]            BF16 or FP16, unit stride along its columns
    h        [P, 2R]            same dtype, what the shrink kernel wrote; undefined rows and columns are not used
    B        [S, E or 1, 2I, R] same dtype, each expert's matrix contiguous, scaling folded in; may hold anything past
                                the adapter's rank
    route    see moe_route.py
    out      [P, I]             same dtype, unit stride along I; pairs of experts on other ranks are left unwritten

All of it is float32 and rounded once, in out: g + dg is never rounded. A row that gets no delta has the bits of a batch
without adapters, whatever shares its block.

It is launched with programmatic dependent launch where the GPU has it: routing and the first slot's B are on their way
before the base GEMM has ended, only h and gate_up wait for it. So whatever wrote the routing must have ended before the
base GEMM began.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lora_fastpath.kernels.moe_route import NO_SLOT, Route, expert_stride, load_b, load_block, load_h, next_slot


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


# The number of pairs changes with every prefill: specializing on it would compile in the middle of serving.
@triton.jit(do_not_specialize=["pairs"])
def _moe_activate_kernel(
    gate_up_ptr,
    h_ptr,
    b_ptr,
    out_ptr,
    sorted_pairs_ptr,
    block_experts_ptr,
    padded_ptr,
    row_slots_ptr,
    slot_ranks_ptr,
    pairs,
    experts,
    gate_up_row_stride,
    h_row_stride,
    b_slot_stride,
    b_expert_stride,
    out_row_stride,
    I: tl.constexpr,  # noqa: E741
    R: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    FAST_MATH: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    expert, pair, live, slots = load_block(
        tl.program_id(0), sorted_pairs_ptr, block_experts_ptr, padded_ptr, row_slots_ptr, slot_ranks_ptr,
        pairs, experts, TOP_K, BLOCK_ROWS,
    )  # fmt: skip
    if expert < 0:
        if PDL:
            # The kernel after this one waits for this one alone, so this one must not end before the base GEMM has.
            tl.extra.cuda.gdc_wait()
        return
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    n_live = n < I

    # The first slot stands outside the loop, with the wait between its loads of B and of h: a wait inside a loop is one
    # that the compiler moves loads across. A block without an adapter masks all of them off.
    slot = next_slot(slots, -1)
    some = slot != NO_SLOT
    rank = tl.load(slot_ranks_ptr + slot, mask=some, other=0)
    b_gate = load_b(b_ptr, slot, expert, rank, n, n_live & some, b_slot_stride, b_expert_stride, R, BLOCK_R)
    b_up = load_b(b_ptr, slot, expert, rank, I + n, n_live & some, b_slot_stride, b_expert_stride, R, BLOCK_R)
    if PDL:
        tl.extra.cuda.gdc_wait()
    rows = (slots == slot) & some
    tile = pair[:, None] * gate_up_row_stride + n[None, :]
    tile_live = live[:, None] & n_live[None, :]
    # All four are asked for before the first is used.
    base_gate = tl.load(gate_up_ptr + tile, mask=tile_live, other=0.0)
    base_up = tl.load(gate_up_ptr + I + tile, mask=tile_live, other=0.0)
    h_gate = load_h(h_ptr, pair, rows, rank, 0, h_row_stride, R, BLOCK_R)
    h_up = load_h(h_ptr, pair, rows, rank, R, h_row_stride, R, BLOCK_R)
    gate = base_gate.to(tl.float32)
    up = base_up.to(tl.float32)
    gate = tl.where(rows[:, None], gate + tl.dot(h_gate, tl.trans(b_gate)), gate)
    up = tl.where(rows[:, None], up + tl.dot(h_up, tl.trans(b_up)), up)

    slot = next_slot(slots, slot)
    while slot != NO_SLOT:
        rows = slots == slot
        rank = tl.load(slot_ranks_ptr + slot)
        b_gate = load_b(b_ptr, slot, expert, rank, n, n_live, b_slot_stride, b_expert_stride, R, BLOCK_R)
        b_up = load_b(b_ptr, slot, expert, rank, I + n, n_live, b_slot_stride, b_expert_stride, R, BLOCK_R)
        h_gate = load_h(h_ptr, pair, rows, rank, 0, h_row_stride, R, BLOCK_R)
        h_up = load_h(h_ptr, pair, rows, rank, R, h_row_stride, R, BLOCK_R)
        gate = tl.where(rows[:, None], gate + tl.dot(h_gate, tl.trans(b_gate)), gate)
        up = tl.where(rows[:, None], up + tl.dot(h_up, tl.trans(b_up)), up)
        slot = next_slot(slots, slot)

    out = _silu_and_mul(gate, up, FAST_MATH)
    out_tile = out_ptr + pair[:, None] * out_row_stride + n[None, :]
    tl.store(out_tile, out.to(out_ptr.dtype.element_ty), mask=tile_live)


def moe_activate(
    gate_up: torch.Tensor,
    h: torch.Tensor,
    b: torch.Tensor,
    route: Route,
    out: torch.Tensor,
    *,
    block_n: int | None = None,
    num_warps: int | None = None,
    fast_math: bool = False,
    pdl: bool = False,
) -> None:
    """Launch one activation (shapes above).

    fast_math: silu with the GPU's approximate exponential and quotient, denormals flushed: the instructions that nvcc
    makes of x / (1 + expf(-x)) * y under --use_fast_math, so the bits of a base activation that is compiled that way.
    """
    r = b.shape[3]
    block_r = max(16, triton.next_power_of_2(r))
    # Gate, up and their B are held in registers across the wait: this many columns fit without spilling.
    block_n = block_n or max(16, min(128, 4096 // max(block_r, route.block_rows)))
    intermediate = b.shape[2] // 2
    _moe_activate_kernel[(route.blocks, triton.cdiv(intermediate, block_n))](
        gate_up,
        h,
        b,
        out,
        route.sorted_pairs,
        route.block_experts,
        route.padded,
        route.row_slots,
        route.slot_ranks,
        route.pairs,
        route.experts,
        gate_up.stride(0),
        h.stride(0),
        b.stride(0),
        expert_stride(b),
        out.stride(0),
        I=intermediate,
        R=r,
        TOP_K=route.top_k,
        BLOCK_ROWS=route.block_rows,
        BLOCK_N=block_n,
        BLOCK_R=block_r,
        FAST_MATH=fast_math,
        PDL=pdl,
        num_warps=num_warps or (8 if route.block_rows >= 128 else 4),
        num_stages=1,
        **({"launch_pdl": True} if pdl else {}),
    )
