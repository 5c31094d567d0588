"""Random mixture-of-experts layers for the self-check and the tests: what each LoRA kernel has to compute, in float64."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch

from lora_fastpath.kernels.moe_routing import Routing


@dataclasses.dataclass
class MoeCase:
    """One batch for one layer. NaN stands where a kernel must not let what it reads reach a result."""

    x: torch.Tensor  # [T, H]
    gate_up: torch.Tensor  # [P, 2I], of the base GEMM
    activated: torch.Tensor  # [P, I]
    y: torch.Tensor  # [T, top_k, H], of the base GEMM, 0 for experts on other ranks
    weights: torch.Tensor  # float32 [T, top_k]
    topk_ids: torch.Tensor  # int32 [T, top_k]
    gate_up_a: torch.Tensor  # [S, E or 1, 2R, H], NaN in each slice's lines past the rank
    gate_up_b: torch.Tensor  # [S, E, 2I, R], NaN past the rank
    down_a: torch.Tensor  # [S, E, R, I], NaN past the rank
    down_b: torch.Tensor  # [S, E or 1, H, R], NaN past the rank
    row_slots: torch.Tensor  # int32 [T], -1 for none
    slot_ranks: torch.Tensor  # int32 [S]
    experts: int  # with adapters; a fused shared expert has the id after the last of them

    def routing(self, block_size: int) -> Routing:
        """With the pairs as sglang's moe_align_block_size sorts them: blocks of experts on other ranks first."""
        ids = self.topk_ids.flatten().tolist()
        sorted_pairs, block_experts = [], []
        for expert in sorted(set(ids)):
            own = [pair for pair, theirs in enumerate(ids) if theirs == expert]
            blocks = -(-len(own) // block_size)
            sorted_pairs += own + [len(ids)] * (blocks * block_size - len(own))
            block_experts += [expert] * blocks
        padded = len(sorted_pairs)
        sorted_pairs += [2**30] * (2 * block_size)  # what is not in use is undefined
        block_experts += [2**30] * 2
        tables = (self.topk_ids.new_tensor(values) for values in (sorted_pairs, block_experts, [padded]))
        return Routing(self.topk_ids, self.row_slots, self.slot_ranks, self.experts, *tables, block_size)

    def with_delta(self) -> Iterator[tuple[int, int, int, int]]:
        """Pair, slot, expert and rank of all pairs that get a delta."""
        ranks = self.slot_ranks.tolist()
        for token, (slot, ids) in enumerate(zip(self.row_slots.tolist(), self.topk_ids.tolist())):
            for k, expert in enumerate(ids):
                if slot >= 0 and ranks[slot] > 0 and 0 <= expert < self.experts:
                    yield token * len(ids) + k, slot, expert, ranks[slot]

    def expected_gate_up(self) -> torch.Tensor:
        """gate_up with its deltas, float64 [P, 2I]."""
        out = self.gate_up.double()
        half, max_rank, top_k = out.shape[1] // 2, self.gate_up_b.shape[3], self.topk_ids.shape[1]
        for pair, slot, expert, rank in self.with_delta():
            a, b = _of(self.gate_up_a, slot, expert), _of(self.gate_up_b, slot, expert)
            for s in (0, 1):
                h = a[s * max_rank : s * max_rank + rank] @ self.x[pair // top_k].double()
                out[pair, s * half : (s + 1) * half] += b[s * half : (s + 1) * half, :rank] @ h
        return out

    def expected_activated(self) -> torch.Tensor:
        """silu(gate + delta) * (up + delta), float64 [P, I], NaN where the expert is on another rank."""
        gate, up = self.expected_gate_up().chunk(2, 1)
        out = torch.nn.functional.silu(gate) * up
        out[self.topk_ids.flatten() < 0] = float("nan")
        return out

    def expected_y(self) -> torch.Tensor:
        """y + weight * delta of the down projection, float64 [T, top_k, H]."""
        y = self.y.flatten(0, 1).double()
        for pair, slot, expert, rank in self.with_delta():
            h = _of(self.down_a, slot, expert)[:rank] @ self.activated[pair].double()
            delta = _of(self.down_b, slot, expert)[:, :rank] @ h
            y[pair] += self.weights.flatten()[pair].double() * delta
        return y.view(self.y.shape)


def _of(buffer: torch.Tensor, slot: int, expert: int) -> torch.Tensor:
    return buffer[slot, expert if buffer.shape[1] > 1 else 0].double()


def make_case(
    tokens: int,
    top_k: int,
    experts: int,
    ranks: tuple[int, ...],
    max_rank: int,
    hidden: int,
    intermediate: int,
    dtype: torch.dtype,
    device: torch.device | str,
    *,
    seed: int = 0,
    none_every: int = 4,
    away_every: int = 0,
    fused_shared: bool = False,
    shared_outer: bool = False,
) -> MoeCase:
    """Random tensors at the scale of a trained layer (outputs near 1), one adapter a slot, tokens with one going round the slots.

    none_every: every so many tokens one has no adapter (0: all have one).
    away_every: every so many pairs one goes to an expert on another rank (0: none does).
    fused_shared: each token's last expert is a shared one, which has no adapter.
    shared_outer: gate and up share one A among all experts, the down projection one B.
    """
    generator = torch.Generator(device).manual_seed(seed)
    slots, outer, pairs = len(ranks), 1 if shared_outer else experts, tokens * top_k

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device)

    gate_up_a = normal(slots, outer, 2, max_rank, hidden) * hidden**-0.5
    gate_up_b = normal(slots, experts, 2 * intermediate, max_rank)
    down_a = normal(slots, experts, max_rank, intermediate) * intermediate**-0.5
    down_b = normal(slots, outer, hidden, max_rank)
    for slot, rank in enumerate(ranks):
        for a in (gate_up_a, down_a):
            a[slot, ..., rank:, :] = float("nan")
        for b in (gate_up_b, down_b):
            b[slot] *= max(rank, 1) ** -0.5
            b[slot, ..., rank:] = float("nan")

    own = top_k - 1 if fused_shared else top_k
    topk_ids = normal(tokens, experts).argsort(1)[:, :own].to(torch.int32)
    if fused_shared:
        topk_ids = torch.cat([topk_ids, torch.full_like(topk_ids[:, :1], experts)], 1)
    if away_every:
        topk_ids.view(-1)[away_every - 1 :: away_every] = -1
    y = normal(tokens, top_k, hidden)
    y[topk_ids < 0] = 0
    row_slots = torch.zeros(tokens, dtype=torch.int32, device=device)
    if none_every:
        row_slots[none_every - 1 :: none_every] = -1
    with_slot = row_slots >= 0
    row_slots[with_slot] = torch.arange(int(with_slot.sum()), dtype=torch.int32, device=device) % slots
    return MoeCase(
        normal(tokens, hidden).to(dtype),
        normal(pairs, 2 * intermediate).to(dtype),
        normal(pairs, intermediate).to(dtype),
        y.to(dtype),
        torch.softmax(normal(tokens, top_k), 1),
        topk_ids,
        gate_up_a.flatten(2, 3).to(dtype),
        gate_up_b.to(dtype),
        down_a.to(dtype),
        down_b.to(dtype),
        row_slots,
        torch.tensor(ranks, dtype=torch.int32, device=device),
        experts,
    )


def miss(what: str, got: torch.Tensor, expected: torch.Tensor) -> str:
    """How `got` misses `expected` (float64, NaN where anything will do), or ""."""
    defined = ~expected.isnan()
    error = (got.double() - expected).abs()[defined] / (1 + expected.abs()[defined])
    worst, allowed = error.max().item(), 8 * torch.finfo(got.dtype).eps
    return "" if worst <= allowed else f"{what}: largest relative error {worst:.3g}, {allowed:.3g} is allowed"
