"""Routing of a mixture-of-experts layer as its LoRA kernels see it: the base GEMM's own alignment, used again.

A pair p = t * top_k + k is one token with one of its experts. The base GEMM has the pairs sorted by expert, each
expert's group padded to whole blocks of `block_rows`; one block of a LoRA kernel takes one such block. Its rows share
the expert but not the adapter, so a kernel goes over the slots that occur in the block, smallest first (`next_slot`).
Nothing is routed a second time.

All of it is read from device memory: a CUDA graph is captured while no adapter is active and replayed with any.

A row gets no delta if it has no slot, if its slot's rank is 0, or if its expert has no adapter: experts are numbered
from 0, and the ids past the last one with an adapter are shared experts fused into the routed ones.
"""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl

NO_SLOT = tl.constexpr(2**31 - 1)
"""Slot of a row that gets no delta; larger than all others, so that the smallest slot of a block is the next one."""


@dataclasses.dataclass(frozen=True)
class Route:
    """One batch's routing through one layer. All tensors int32, on the layer's device."""

    sorted_pairs: torch.Tensor  # pairs by expert, padded with numbers >= pairs; what lies past `padded` is undefined
    block_experts: torch.Tensor  # [blocks] expert of a block of sorted_pairs, -1: on another rank, skip
    padded: torch.Tensor  # [1] how much of sorted_pairs is in use, a multiple of block_rows
    row_slots: torch.Tensor  # [>= T] adapter slot of a token, -1 none
    slot_ranks: torch.Tensor  # [S] rank of the adapter in a slot, 0 none
    block_rows: int
    top_k: int
    pairs: int  # T * top_k
    experts: int  # how many have adapters; buffers hold as many, or one that all of them share

    @property
    def blocks(self) -> int:
        """Blocks to launch. The last expert of block_experts may stand for a block that sorted_pairs has no room for."""
        return min(len(self.block_experts), len(self.sorted_pairs) // self.block_rows)


def expert_stride(buffer: torch.Tensor) -> int:
    """Elements from one expert's matrix to the next, 0 where the buffer [S, E or 1, ...] has one for all experts."""
    return buffer.stride(1) if buffer.shape[1] > 1 else 0


@triton.jit
def load_block(
    block,
    sorted_pairs_ptr,
    block_experts_ptr,
    padded_ptr,
    row_slots_ptr,
    slot_ranks_ptr,
    pairs,
    experts,
    TOP_K: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    """The block's expert (-1: nothing to do), its pairs, which of them exist, and the slot of each or NO_SLOT."""
    # Three loads that do not wait for each other; an unused block reads undefined pairs and drops them.
    used = tl.load(padded_ptr)
    expert = tl.load(block_experts_ptr + block)
    pair = tl.load(sorted_pairs_ptr + block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS))
    expert = tl.where(block * BLOCK_ROWS < used, expert, -1)
    live = (pair >= 0) & (pair < pairs) & (expert >= 0)
    slot = tl.load(row_slots_ptr + pair // TOP_K, mask=live & (expert < experts), other=-1)
    rank = tl.load(slot_ranks_ptr + slot, mask=slot >= 0, other=0)
    return expert, pair.to(tl.int64), live, tl.where(rank > 0, slot, NO_SLOT)


@triton.jit
def next_slot(slots, after):
    """The smallest slot of the block past `after`, NO_SLOT after the last."""
    return tl.min(tl.where(slots > after, slots, NO_SLOT), axis=0)


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
def load_h(h_ptr, pair, pair_live, rank, start, row_stride, R: tl.constexpr, BLOCK_R: tl.constexpr):
    """h[pair, start : start + R], [pairs, BLOCK_R], 0 past the rank and in rows that are not live."""
    r = tl.arange(0, BLOCK_R)
    h = tl.load(
        h_ptr + pair[:, None] * row_stride + (start + r)[None, :], mask=pair_live[:, None] & (r < R)[None, :], other=0.0
    )
    return tl.where((r < rank)[None, :], h, 0.0)
