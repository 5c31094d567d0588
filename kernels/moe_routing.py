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
