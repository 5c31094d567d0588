"""Site `moe`: FusedMoEWithLoRA. sglang's expert GEMMs with the LoRA deltas around them, for layers served by its Triton runner.

    main stream                                           side stream, for batches that two streams are faster for
    align, gate_up GEMM (sglang)                          moe_route, moe_shrink: h = x A_gate_up
    moe_activate: silu(g + dg) * (u + du)
    down GEMM (sglang)                                    moe_shrink: h = activated A_down
    moe_expand: y += w * (B_down h)
    sum over a token's experts (sglang)

Nothing is written into the layer's input: models read it on a second stream (shared experts) at the same time. A batch
without adapters runs sglang's own sequence.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import torch

from lora_fastpath import moe_selfcheck, stock
from lora_fastpath.gate import Path
from lora_fastpath.kernels.moe_activate import moe_activate
from lora_fastpath.kernels.moe_expand import moe_expand
from lora_fastpath.kernels.moe_route import Route, moe_route, new_route
from lora_fastpath.kernels.moe_shrink import moe_shrink
from lora_fastpath.patches import dense
from lora_fastpath.registry import Unfit, registry

SITE_OF_LAYER = {"FusedMoEWithLoRA": "moe"}

FEW_PAIRS, MANY_PAIRS = 256, 4096
"""Up to the first the shrink's K is split, past the second tiles have 64 rows instead of 16. Not tuned."""


@dataclasses.dataclass(frozen=True)
class Experts:
    """One layer's adapters as the kernels see them; attached to sglang's layer as `lora_fastpath`."""

    site: str
    adapter_map: Any  # patches.adapters.AdapterMap of the layer's manager
    gate_up_a: torch.Tensor  # [S, E or 1, 2R, H], a slice every R lines
    gate_up_b: torch.Tensor  # [S, E, 2I, R], scaling folded in
    down_a: torch.Tensor  # [S, E, R, I]
    down_b: torch.Tensor  # [S, E or 1, H, R], scaling folded in
    base_runner: Any  # sglang's runner of the layer without LoRA
    fast_math: bool  # sglang compiles its activation with --use_fast_math before compute capability 10.0
    pdl: bool  # programmatic dependent launch, compute capability 9.0 and later

    @property
    def count(self) -> int:
        """Experts that have adapters on this rank."""
        return self.gate_up_b.shape[1]

    @property
    def shape(self) -> tuple:
        """What the compiled kernels depend on: layers with equal shapes share one self-check."""
        buffers = (self.gate_up_a, self.gate_up_b, self.down_a, self.down_b)
        return (self.site, *(buffer.shape for buffer in buffers), self.down_a.dtype)

    def activate(
        self, gate_up: torch.Tensor, h: torch.Tensor, b: torch.Tensor, route: Route, out: torch.Tensor
    ) -> None:
        moe_activate(gate_up, h, b, route, out, fast_math=self.fast_math, pdl=self.pdl)


def forward(wrapped: Any, layer: Any, args: tuple, kwargs: dict) -> torch.Tensor:
    experts = getattr(layer, "lora_fastpath", None)
    batch = experts.adapter_map.batch if experts is not None else None
    if batch is None:
        return wrapped(*args, **kwargs)
    dispatched = _dispatch(layer, *args, **kwargs)
    if batch.path is Path.BASE:
        out = experts.base_runner.run(dispatched, layer._quant_info).hidden_states
        return stock.combine(layer, out)
    x = dispatched.hidden_states
    if not stock.is_standard_topk(dispatched.topk_output) or x.dim() != 2 or x.shape[0] != batch.rows:
        # Not the rows that were mapped, or routing of another kind: sglang's own mapping decides.
        kind = type(dispatched.topk_output).__name__
        experts.adapter_map.fall_back(
            f"experts got {tuple(x.shape)} and a {kind} where the batch has {batch.rows} rows", say=True
        )
        return wrapped(*args, **kwargs)
    try:
        out = run(experts, layer, dispatched, batch)
    except Exception as error:  # noqa: BLE001 - the input is untouched, so stock can still serve the layer
        reason = f"{type(error).__name__}: {error}"
    else:
        return stock.combine(layer, out)
    # Not in the handler: its traceback keeps the buffers of `run`, and stock may need the memory.
    experts.adapter_map.fall_back(reason)
    registry.decline(experts.site, reason, failed=True)
    return wrapped(*args, **kwargs)


def _dispatch(layer: Any, hidden_states: torch.Tensor, topk_output: Any, **_: Any) -> Any:
    return layer.base_layer.dispatcher.dispatch(hidden_states=hidden_states, topk_output=topk_output)


def run(experts: Experts, layer: Any, dispatched: Any, batch: Any) -> torch.Tensor:
    """The layer's output [T, H] for a batch with adapters, before any reduction over ranks."""
    x, topk = dispatched.hidden_states, dispatched.topk_output
    if x.dtype != experts.down_a.dtype or not x.is_contiguous():
        raise ValueError(f"input: {x.dtype} of strides {x.stride()}, expected contiguous {experts.down_a.dtype}")
    if not x.shape[0]:
        return torch.empty_like(x)
    # For our kernels alone; sglang makes both so for nearly every model.
    topk_ids, weights = topk.topk_ids.to(torch.int32).contiguous(), topk.topk_weights.float().contiguous()
    pairs, width = topk_ids.numel(), experts.gate_up_b.shape[2]
    block_rows = 16 if pairs <= MANY_PAIRS else 64
    route = new_route(topk_ids, batch.row_slots, batch.slot_ranks, experts.count, block_rows)
    h_gate_up = _parts(pairs, experts.gate_up_a)
    h_down = _parts(pairs, experts.down_a)
    gate_up = x.new_empty((pairs, width))
    activated = x.new_empty((pairs, width // 2))
    y = x.new_empty((*topk_ids.shape, experts.down_b.shape[2]))
    lane = experts.adapter_map.lanes.current() if batch.path is Path.TWO_STREAMS else None

    def fork() -> None:
        if lane is not None:
            lane.fork()

    def beside() -> contextlib.AbstractContextManager:
        return contextlib.nullcontext() if lane is None else lane.side()

    fork()
    gemms = stock.ExpertGemms(layer, dispatched)
    gemms.gate_up(gate_up)
    with beside():
        moe_route(route)
        moe_shrink(x, experts.gate_up_a, route, h_gate_up, slices=2)
    experts.activate(gate_up, h_gate_up, experts.gate_up_b, route, activated)
    fork()
    gemms.down(activated, y)
    with beside():
        moe_shrink(activated, experts.down_a, route, h_down, slices=1)
    moe_expand(h_down, experts.down_b, weights, route, y.view(pairs, -1), pdl=experts.pdl)
    return gemms.sum_over_experts(y)


def _parts(pairs: int, a: torch.Tensor, split_k: int = 4) -> torch.Tensor:
    """Room for what a shrink with `a` writes, [SPLIT_K, P, N]; K is split where the pairs alone are too few blocks.

    In two ways only, both self-checked: a further one would be compiled in the middle of serving.
    """
    _, _, n, k = a.shape
    split_k = 1 if pairs > FEW_PAIRS else max(1, min(split_k, k // 256))
    return a.new_empty((split_k, pairs, n), dtype=torch.float32)


def serve(site: str, layer: torch.nn.Module, adapter_map: Any) -> Experts:
    """The layer's adapters as the kernels see them; raises Unfit where they can't be served."""
    if not layer.set_lora:
        raise Unfit("sglang gave the layer no adapter buffers")
    if reason := stock.unserved_experts(layer):
        raise Unfit(reason)
    gate_up_a, gate_up_b, down_a, down_b = buffers = stock.expert_buffers(layer)
    rank = down_a.shape[2]
    dense.require(down_a.dtype, rank)
    slots, count, width, _ = gate_up_b.shape
    hidden = gate_up_a.shape[3]
    wanted = ((2 * rank, hidden), (width, rank), (rank, width // 2), (hidden, rank))
    for buffer, (lines, columns) in zip(buffers, wanted):
        shared = buffer is gate_up_a or buffer is down_b
        if (
            buffer.shape[0] != slots
            or buffer.shape[1] not in ((1, count) if shared else (count,))
            or buffer.shape[2:] != (lines, columns)
            or buffer.stride()[2:] != (columns, 1)
        ):
            raise Unfit(f"adapter buffers {[tuple(b.shape) for b in buffers]} do not fit each other")
    if (found := stock.expert_widths(layer)) != (width, hidden):
        raise Unfit(f"the experts' weights are {found} wide, the adapters {(width, hidden)}")
    capability = dense.capability(down_a.device)
    fast_math, pdl = (0, 0) < capability < (10, 0), capability >= (9, 0)
    return Experts(site, adapter_map, *buffers, stock.runner_without_lora(layer), fast_math, pdl)


def self_check(experts: Experts) -> str:
    """Run the kernels at this layer's real widths against float64, for every block size; the first miss in words, or ""."""
    hidden, rank, intermediate = experts.gate_up_a.shape[3], experts.down_a.shape[2], experts.down_a.shape[3]
    case = moe_selfcheck.make_case(
        tokens=9,
        top_k=3,
        experts=4,
        ranks=(rank, max(1, rank // 2), max(1, rank - 1)),
        max_rank=rank,
        hidden=hidden,
        intermediate=intermediate,
        dtype=experts.down_a.dtype,
        device=experts.down_a.device,
        shared_outer=experts.gate_up_a.shape[1] < experts.count,
    )
    for block_rows, split_k in ((16, 4), (16, 1), (64, 1)):  # what `run` chooses from
        if miss := _check_kernels(experts, case, block_rows, split_k):
            return f"self-check at {block_rows} rows a tile, H {hidden}, I {intermediate}, rank {rank}: {miss}"
    return _check_route(experts) or (_check_activation(experts, case) if case.x.is_cuda else "")


def _check_route(experts: Experts) -> str:
    """The routing with as many slots and experts as this layer has."""
    device, slots = experts.down_a.device, experts.down_a.shape[0]
    generator = torch.Generator().manual_seed(0)
    topk_ids = torch.randint(-1, experts.count + 1, (50, 8), generator=generator, dtype=torch.int32)
    row_slots = torch.randint(-1, slots, (50,), generator=generator, dtype=torch.int32)
    ranks = (torch.arange(slots, dtype=torch.int32) + 1) % 4  # every fourth slot is empty
    wanted = {
        pair: (slot, expert, int(ranks[slot]))
        for pair, (slot, expert) in enumerate(zip(row_slots.repeat_interleave(8).tolist(), topk_ids.flatten().tolist()))
        if slot >= 0 and ranks[slot] > 0 and 0 <= expert < experts.count
    }
    for block_rows in (16, 64):
        route = new_route(topk_ids.to(device), row_slots.to(device), ranks.to(device), experts.count, block_rows)
        moe_route(route)
        lines = route.tiles.tolist()
        pairs = [(pair, tuple(line[:3])) for line in lines[: lines[0][3]] for pair in line[4:] if pair >= 0]
        if len(pairs) != len(wanted) or dict(pairs) != wanted:
            return f"self-check of the routing, {block_rows} rows a tile: {len(pairs)} pairs, expected {len(wanted)}"
    return ""


def _check_kernels(experts: Experts, case: moe_selfcheck.MoeCase, block_rows: int, split_k: int = 4) -> str:
    route = case.route(block_rows)
    h = _parts(route.pairs, case.gate_up_a, split_k).fill_(float("nan"))
    moe_shrink(case.x, case.gate_up_a, route, h, slices=2)
    activated = torch.full_like(case.activated, float("nan"))
    experts.activate(case.gate_up, h, case.gate_up_b, route, activated)
    h_down = _parts(route.pairs, case.down_a, split_k).fill_(float("nan"))
    moe_shrink(case.activated, case.down_a, route, h_down, slices=1)
    y = case.y.flatten(0, 1).clone()
    moe_expand(h_down, case.down_b, case.weights, route, y, pdl=experts.pdl)
    h, h_down = (parts.sum(0).to(case.x.dtype) for parts in (h, h_down))
    return (
        moe_selfcheck.miss("gate_up shrink", h, case.expected_gate_up_h())
        or moe_selfcheck.miss("activation", activated, case.expected_activate(h))
        or moe_selfcheck.miss("down shrink", h_down, case.expected_down_h())
        or moe_selfcheck.miss("down expand", y, case.expected_expand(h_down))
    )


def _check_activation(experts: Experts, case: moe_selfcheck.MoeCase) -> str:
    """Rows without an adapter must have the very bits of sglang's own activation."""
    wanted = torch.empty_like(case.activated)
    stock.activate(case.gate_up, wanted)
    route = dataclasses.replace(case, row_slots=torch.full_like(case.row_slots, -1)).route(16)
    got = torch.empty_like(wanted)
    h = _parts(route.pairs, case.gate_up_a)
    experts.activate(case.gate_up, h, case.gate_up_b, route, got)
    return "" if torch.equal(got, wanted) else "rows without an adapter differ from sglang's activation"


WRAPPERS = {"FusedMoEWithLoRA.forward": forward}
