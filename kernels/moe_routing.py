"""Routing of a mixture-of-experts layer as its LoRA kernels see it: sglang's own blocks, and which adapter a row has.

The base GEMMs' blocks hold pairs of one expert, so the LoRA kernels need no sorting of their own: a block of theirs
takes some rows of one of those and, one after the other, the adapters that it finds there.
"""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl


@dataclasses.dataclass(frozen=True)
class Routing:
    """One batch's routing through one layer. All tensors int32, contiguous, on the layer's device.

    A pair p = t * top_k + k is one token with one of its experts. It gets no delta if its token has no slot, if the
    rank in its slot is 0, or if its expert has no adapter: experts are numbered from 0, ids past the last one with an
    adapter are shared experts fused into the routed ones, and -1 is an expert on another rank.
    """

    topk_ids: torch.Tensor  # [T, top_k]
    row_slots: torch.Tensor  # [>= T] adapter slot of a token, -1 none
    slot_ranks: torch.Tensor  # [S] rank of the adapter in a slot, 0 or less: none
    experts: int  # how many have adapters; buffers hold as many, or one that all of them share
    sorted_pairs: torch.Tensor  # [blocks * block_size] pairs sorted by expert, each expert's padded with P to full blocks
    block_experts: torch.Tensor  # [blocks] -1 for an expert on another rank
    padded: torch.Tensor  # [1] how many of sorted_pairs are in use; the rest is undefined
    block_size: int

    @property
    def pairs(self) -> int:
        return self.topk_ids.numel()

    @property
    def top_k(self) -> int:
        return self.topk_ids.shape[1]


def expert_stride(buffer: torch.Tensor) -> int:
    """Elements from one expert's matrix to the next, 0 where the buffer [S, E or 1, ...] has one for all experts."""
    return buffer.stride(1) if buffer.shape[1] > 1 else 0


@triton.jit
def gets_delta(pair, expert, live, row_slots_ptr, slot_ranks_ptr, experts, top_k):
    """Whether each pair does (see Routing)."""
    slot = tl.load(row_slots_ptr + pair // top_k, mask=live & (expert >= 0) & (expert < experts), other=-1)
    return tl.load(slot_ranks_ptr + slot, mask=slot >= 0, other=0) > 0


@triton.jit
def load_block(
    start, sorted_pairs_ptr, block_experts_ptr, padded_ptr, row_slots_ptr, slot_ranks_ptr,
    pairs, top_k, experts, block_size, SLOTS: tl.constexpr, BLOCK_ROWS: tl.constexpr,
):  # fmt: skip
    """Rows [start, start + BLOCK_ROWS) of the sorted pairs, all of one expert.

    Returns that expert; each row's pair (int64), slot (-1: it gets no delta) and rank; and for each slot its place
    among the slots that the rows have, -1 for any other.
    """
    padded = tl.load(padded_ptr)
    pair = tl.load(sorted_pairs_ptr + start + tl.arange(0, BLOCK_ROWS))
    expert = tl.load(block_experts_ptr + start // block_size)
    live = (pair < pairs) & (start < padded) & (expert >= 0) & (expert < experts)
    slot = tl.load(row_slots_ptr + pair // top_k, mask=live, other=-1)
    rank = tl.load(slot_ranks_ptr + slot, mask=slot >= 0, other=0)
    slot = tl.where(rank > 0, slot, -1)
    present = tl.max((slot[:, None] == tl.arange(0, SLOTS)[None, :]).to(tl.int32), axis=0)
    place = tl.where(present > 0, tl.cumsum(present, axis=0) - 1, -1)
    return expert, pair.to(tl.int64), slot, rank, place


@triton.jit
def adapter_at(turn, place, slot, rank, SLOTS: tl.constexpr):
    """(slot, rank) of the adapter whose place is `turn`."""
    own = tl.max(tl.where(place == turn, tl.arange(0, SLOTS), 0), axis=0)
    return own, tl.max(tl.where(slot == own, rank, 0), axis=0)
