"""What a base expert layer does before its first GEMM, for a small batch in one launch: pairs sorted by expert into
blocks, and the rows of x as FP8 codes. It takes the place of sglang's alignment (two launches) and quantization.

    x              [T, H]         BF16 or FP16, contiguous
    topk_ids       [T, top_k]     int32, contiguous, -1 for an expert on another rank; at most MOST_PAIRS
    sorted_pairs   [>= padded]    int32: pairs p = t * top_k + k sorted by expert, -1 first, each expert's padded with P to
                                  full blocks; order within an expert is that of the pairs
    block_experts  [blocks]       int32: the expert of each block
    padded         [1]            int32: how many of sorted_pairs are in use; the rest is padded with P too
    codes, scales  [T, H], [T, H / 128]  see moe_activate.py; or None

One block does the sorting, by comparing every pair with every other: no counters in memory, no second pass. The others
quantize one row each. It is launched with programmatic dependent launch where the GPU has it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lora_fastpath.kernels.launch import launch, power_of_2
from lora_fastpath.kernels.moe_activate import quantize

MOST_PAIRS = 256


@triton.jit
def _sort_pairs(
    topk_ids_ptr, sorted_pairs_ptr, block_experts_ptr, padded_ptr, pairs, places, block_size,
    BINS: tl.constexpr, MOST_PAIRS: tl.constexpr,
):  # fmt: skip
    pair = tl.arange(0, MOST_PAIRS)
    bin = tl.load(topk_ids_ptr + pair, mask=pair < pairs, other=BINS) + 1  # -1 is the first
    place = tl.zeros((MOST_PAIRS,), dtype=tl.int32)
    for start in range(0, pairs, 32):
        other = start + tl.arange(0, 32)
        same = tl.load(topk_ids_ptr + other, mask=other < pairs, other=BINS)[None, :] + 1 == bin[:, None]
        place += tl.sum((same & (other[None, :] < pair[:, None])).to(tl.int32), axis=1)
    count = tl.histogram(bin, BINS, mask=pair < pairs)
    blocks = (count + block_size - 1) // block_size
    first = tl.cumsum(blocks, axis=0) - blocks
    tl.store(padded_ptr, tl.sum(blocks, axis=0) * block_size)
    expert = tl.arange(0, BINS) - 1
    for turn in range(tl.max(blocks, axis=0)):
        tl.store(block_experts_ptr + first + turn, expert, mask=turn < blocks)
    for start in range(0, places, 1024):
        at = start + tl.arange(0, 1024)
        tl.store(sorted_pairs_ptr + at, pairs, mask=at < places)
    tl.debug_barrier()  # of the padding before the pairs
    own = tl.gather(first, tl.where(pair < pairs, bin, 0), axis=0)
    tl.store(sorted_pairs_ptr + own * block_size + place, pair, mask=pair < pairs)


# The number of pairs changes with every batch: specializing on it would compile in the middle of serving.
@triton.jit(do_not_specialize=["pairs", "places", "block_size"])
def _moe_prepare_kernel(
    x_ptr,
    topk_ids_ptr,
    sorted_pairs_ptr,
    block_experts_ptr,
    padded_ptr,
    codes_ptr,
    scales_ptr,
    pairs,
    places,
    block_size,
    H: tl.constexpr,
    BINS: tl.constexpr,
    MOST_PAIRS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    FAST_MATH: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if tl.program_id(0) == 0:
        _sort_pairs(
            topk_ids_ptr, sorted_pairs_ptr, block_experts_ptr, padded_ptr, pairs, places, block_size, BINS, MOST_PAIRS
        )
    elif codes_ptr is not None:
        row = (tl.program_id(0) - 1).to(tl.int64)
        h = tl.arange(0, BLOCK_H)[None, :]
        x = tl.load(x_ptr + row * H + h, mask=h < H, other=0.0).to(tl.float32)
        codes, scales = quantize(x, FAST_MATH)
        tl.store(codes_ptr + row * H + h, codes.to(codes_ptr.dtype.element_ty), mask=h < H)
        group = tl.arange(0, BLOCK_H // 128)[None, :]
        tl.store(scales_ptr + row * (H // 128) + group, scales, mask=group < H // 128)


def moe_prepare(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    experts: int,
    sorted_pairs: torch.Tensor,
    block_experts: torch.Tensor,
    padded: torch.Tensor,
    block_size: int,
    codes: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
    *,
    fast_math: bool = False,
    pdl: bool = False,
) -> None:
    """Launch one preparation (shapes above) for ids below `experts`."""
    tokens, hidden = x.shape
    launch(
        _moe_prepare_kernel,
        (x.dtype, codes is None),
        (1 if codes is None else 1 + tokens,),
        (x, topk_ids, sorted_pairs, block_experts, padded, codes, scales),
        (topk_ids.numel(), sorted_pairs.numel(), block_size),
        (hidden, power_of_2(experts + 1), MOST_PAIRS, max(128, power_of_2(hidden)), fast_math, pdl),
        {"num_warps": 8, "num_stages": 1} | ({"launch_pdl": True} if pdl else {}),
    )
