"""Routing of a mixture-of-experts layer for its LoRA kernels: which pairs share an adapter's matrices.

A pair p = t * top_k + k is one token with one of its experts. The pairs that get a delta are sorted by (adapter slot,
expert) and cut into tiles of at most `block_rows`; one tile is one line of an int32 table that all of the layer's LoRA
kernels read:

    [ slot | expert | rank | used tiles (line 0 alone) | pair 0 | pair 1 | ... ]        missing pairs are -1

A pair gets no delta, and is in no tile, if its token has no slot, if the rank in its slot is 0, or if its expert has no
adapter: experts are numbered from 0, ids past the last one with an adapter are shared experts fused into the routed
ones, and -1 is an expert on another rank.

One block does it all (count, prefix sum, scatter), from device memory: a CUDA graph is captured while no adapter is
active and replayed with any. It runs on the side stream, beside the base layer's own alignment. The order of pairs in
a group differs from run to run, which no result depends on: rows of a tile do not mix.
"""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl

from lora_fastpath.kernels.launch import launch, power_of_2

CHUNK = 1024
"""Pairs that are counted at a time; one size for all batches, so that serving compiles nothing."""

TILE_PROGRAMS = 256
"""Most blocks that go over the tiles: a table has lines for the worst mix of adapters, far more than a batch uses. Not tuned."""

_HEADER = 4
HEADER = tl.constexpr(_HEADER)


@dataclasses.dataclass(frozen=True)
class Route:
    """One batch's routing through one layer. All tensors int32, contiguous, on the layer's device."""

    topk_ids: torch.Tensor  # [T, top_k]
    row_slots: torch.Tensor  # [>= T] adapter slot of a token, -1 none
    slot_ranks: torch.Tensor  # [S] rank of the adapter in a slot, 0 or less: none
    experts: int  # how many have adapters; buffers hold as many, or one that all of them share
    tiles: torch.Tensor  # [lines, HEADER + block_rows], written by moe_route; lines past the used ones are undefined
    counts: torch.Tensor  # [2, bins] scratch of moe_route

    @property
    def pairs(self) -> int:
        return self.topk_ids.numel()

    @property
    def top_k(self) -> int:
        return self.topk_ids.shape[1]

    @property
    def block_rows(self) -> int:
        return self.tiles.shape[1] - _HEADER


def new_route(
    topk_ids: torch.Tensor, row_slots: torch.Tensor, slot_ranks: torch.Tensor, experts: int, block_rows: int
) -> Route:
    """Allocate for one batch, for any mix of adapters."""
    pairs, groups = topk_ids.numel(), len(slot_ranks) * experts
    lines = max(1, min(pairs, pairs // block_rows + min(pairs, groups)))
    tiles = topk_ids.new_empty((lines, _HEADER + block_rows))
    counts = topk_ids.new_empty((2, power_of_2(groups)))
    return Route(topk_ids, row_slots, slot_ranks, experts, tiles, counts)


@triton.jit
def slot_of(pair, live, topk_ids_ptr, row_slots_ptr, slot_ranks_ptr, experts, top_k):
    """(slot, expert) of each pair; slot is -1 where the pair gets no delta, expert -1 where it is on another rank."""
    expert = tl.load(topk_ids_ptr + pair, mask=live, other=-1)
    adapted = (expert >= 0) & (expert < experts)
    slot = tl.load(row_slots_ptr + pair // top_k, mask=live & adapted, other=-1)
    rank = tl.load(slot_ranks_ptr + slot, mask=slot >= 0, other=0)
    return tl.where(rank > 0, slot, -1), expert


# The number of pairs changes with every prefill, and specializing on it would compile in the middle of serving; the other
# two are left open so that the self-check, which makes do with few experts, compiles what will be launched.
@triton.jit(do_not_specialize=["pairs", "experts", "top_k"])
def _moe_route_kernel(
    topk_ids_ptr,
    row_slots_ptr,
    slot_ranks_ptr,
    tiles_ptr,
    counts_ptr,
    pairs,
    experts,
    top_k,
    BINS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    group = tl.arange(0, BINS)
    first_ptr = counts_ptr + BINS
    tl.store(counts_ptr + group, tl.zeros_like(group))
    tl.debug_barrier()
    for start in range(0, pairs, CHUNK):
        pair = start + tl.arange(0, CHUNK)
        slot, expert = slot_of(pair, pair < pairs, topk_ids_ptr, row_slots_ptr, slot_ranks_ptr, experts, top_k)
        tl.atomic_add(counts_ptr + slot * experts + expert, 1, mask=slot >= 0, sem="relaxed")
    tl.debug_barrier()

    # Past the L1 cache, which atomics do not reach.
    count = tl.load(counts_ptr + group, cache_modifier=".cg")
    lines = (count + BLOCK_ROWS - 1) // BLOCK_ROWS
    first = tl.cumsum(lines, axis=0) - lines
    tl.store(tiles_ptr + 3, tl.sum(lines, axis=0))
    tl.store(first_ptr + group, first)
    tl.debug_barrier()  # every thread has its counts before they are cleared for the second pass
    tl.store(counts_ptr + group, tl.zeros_like(group))
    rank = tl.load(slot_ranks_ptr + group // experts, mask=lines > 0, other=0)
    line = tiles_ptr + first * (HEADER + BLOCK_ROWS)
    for t in range(0, tl.max(lines, axis=0)):
        tl.store(line, group // experts, mask=t < lines)
        tl.store(line + 1, group % experts, mask=t < lines)
        tl.store(line + 2, rank, mask=t < lines)
        line += tl.where(t + 1 < lines, HEADER + BLOCK_ROWS, 0)
    in_last = count - (lines - 1) * BLOCK_ROWS
    for row in range(1, BLOCK_ROWS):
        tl.store(line + HEADER + row, tl.full((BINS,), -1, tl.int32), mask=(lines > 0) & (row >= in_last))
    tl.debug_barrier()

    for start in range(0, pairs, CHUNK):
        pair = start + tl.arange(0, CHUNK)
        slot, expert = slot_of(pair, pair < pairs, topk_ids_ptr, row_slots_ptr, slot_ranks_ptr, experts, top_k)
        own = slot * experts + expert
        place = tl.atomic_add(counts_ptr + own, 1, mask=slot >= 0, sem="relaxed")
        tile = tl.load(first_ptr + own, mask=slot >= 0, other=0, cache_modifier=".cg") + place // BLOCK_ROWS
        to = tiles_ptr + tile * (HEADER + BLOCK_ROWS) + HEADER + place % BLOCK_ROWS
        tl.store(to, pair, mask=slot >= 0)


def moe_route(route: Route) -> None:
    """Fill route.tiles."""
    bins = route.counts.shape[1]
    launch(
        _moe_route_kernel,
        (),
        (1,),
        (route.topk_ids, route.row_slots, route.slot_ranks, route.tiles, route.counts),
        (route.pairs, route.experts, route.top_k),
        (bins, route.block_rows, CHUNK),
        {"num_warps": 16 if bins <= 1024 else 32},
    )


def expert_stride(buffer: torch.Tensor) -> int:
    """Elements from one expert's matrix to the next, 0 where the buffer [S, E or 1, ...] has one for all experts."""
    return buffer.stride(1) if buffer.shape[1] > 1 else 0


@triton.jit
def load_tile(tiles_ptr, tile, BLOCK_ROWS: tl.constexpr):
    """Slot, expert and rank of a tile, its pairs (int64) and which of them exist."""
    line = tiles_ptr + tile * (HEADER + BLOCK_ROWS)
    pair = tl.load(line + HEADER + tl.arange(0, BLOCK_ROWS))
    return tl.load(line), tl.load(line + 1), tl.load(line + 2), pair.to(tl.int64), pair >= 0


@triton.jit
def load_b(
    b_ptr, slot, expert, rank, line, line_live, slot_stride, expert_stride, R: tl.constexpr, BLOCK_R: tl.constexpr
):
    """Lines of B[slot, expert], [lines, BLOCK_R], 0 past the rank."""
    r = tl.arange(0, BLOCK_R)
    matrix = b_ptr + slot.to(tl.int64) * slot_stride + expert.to(tl.int64) * expert_stride
    # What lies past the adapter's rank is stale. It is loaded and then dropped: a mask that depends on the rank would
    # turn 16-byte loads into 2-byte ones.
    b = tl.load(matrix + line[:, None] * R + r[None, :], mask=line_live[:, None] & (r < R)[None, :], other=0.0)
    return tl.where((r < rank)[None, :], b, 0.0)


@triton.jit
def load_h(
    h_ptr, pair, live, rank, start, part_stride, dtype: tl.constexpr,
    N: tl.constexpr, R: tl.constexpr, BLOCK_R: tl.constexpr, SPLIT_K: tl.constexpr,
):  # fmt: skip
    """h[pair, start : start + R], [pairs, BLOCK_R]: the shrink's parts added in order and rounded once; 0 past the rank."""
    r = tl.arange(0, BLOCK_R)
    at = h_ptr + pair[:, None] * N + (start + r)[None, :]
    mask = live[:, None] & (r < R)[None, :]
    h = tl.load(at, mask=mask, other=0.0)
    for part in tl.static_range(1, SPLIT_K):
        h += tl.load(at + part * part_stride, mask=mask, other=0.0)
    return tl.where((r < rank)[None, :], h, 0.0).to(dtype)
