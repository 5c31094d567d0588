"""Site `moe`: FusedMoEWithLoRA. sglang's expert GEMMs with the LoRA deltas around them, for layers served by its Triton runner.

Small batches; in one stream if not under a graph:     Larger ones, in one stream:

    main stream                 side stream                align, gate_up GEMM (sglang)
    moe_prepare                                            moe_delta into the GEMM's output
    gate_up GEMM (sglang)       moe_delta                  moe_activate: silu(g) * u
    moe_activate: silu(g + dg) * (u + du)                  down GEMM (sglang)
    down GEMM (sglang)          moe_delta                  moe_delta into the GEMM's output
    moe_sum over a token's experts                         sum over a token's experts (sglang)

moe_prepare stands for sglang's alignment and quantization of a small batch, and moe_activate quantizes its output too: with
what that saves the adapters are paid for. A small batch has the same bits under a graph and without. Nothing is written
into the layer's input: models read it on a second stream (shared experts) at the same time. A batch without adapters runs
sglang's own sequence.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch

from lora_fastpath import moe_selfcheck, stock
from lora_fastpath.gate import Path
from lora_fastpath.kernels.moe_activate import moe_activate
from lora_fastpath.kernels.moe_delta import moe_delta
from lora_fastpath.kernels.moe_prepare import MOST_PAIRS, moe_prepare
from lora_fastpath.kernels.moe_routing import Routing
from lora_fastpath.kernels.moe_sum import moe_sum
from lora_fastpath.patches import dense
from lora_fastpath.registry import Unfit, registry
from lora_fastpath.streams import Lane

SITE_OF_LAYER = {"FusedMoEWithLoRA": "moe"}

MANY_PAIRS = 4096
"""Past it deltas are added to the GEMMs' outputs, which takes no memory, and blocks have up to 64 rows. Not tuned."""

BLOCK_ROWS = (16, 32, 64)


def block_rows(routing: Routing) -> int:
    """Blocks of ours lie in the base layer's, so that rows of one have the same expert."""
    most = BLOCK_ROWS[-1] if routing.pairs > MANY_PAIRS else BLOCK_ROWS[-2]
    return max(rows for rows in BLOCK_ROWS if rows <= most and routing.block_size % rows == 0)


Codes = tuple[torch.Tensor, torch.Tensor]
"""FP8 codes and their scales, see kernels/moe_activate.py."""


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
    quantizes: bool = False  # the base GEMMs take FP8 codes, and ours have the bits of sglang's

    @property
    def count(self) -> int:
        """Experts that have adapters on this rank."""
        return self.gate_up_b.shape[1]

    @property
    def shape(self) -> tuple:
        """What the compiled kernels depend on: layers with equal shapes share one self-check."""
        buffers = (self.gate_up_a, self.gate_up_b, self.down_a, self.down_b)
        return (self.site, *(buffer.shape for buffer in buffers), self.down_a.dtype)

    def gate_up_delta(self, x: torch.Tensor, routing: Routing, rows: int, out: torch.Tensor, *, add: bool) -> None:
        moe_delta(x, self.gate_up_a, self.gate_up_b, None, routing, out, add=add, block_rows=rows)

    def new_codes(self, x: torch.Tensor) -> Codes | None:
        """Room for the codes and scales of x, if the base GEMMs want them."""
        if not self.quantizes:
            return None
        scales = x.new_empty((len(x), x.shape[1] // 128), dtype=torch.float32)
        return torch.empty_like(x, dtype=torch.float8_e4m3fn), scales

    def prepare(self, x: torch.Tensor, topk_ids: torch.Tensor, codes: Codes | None) -> Callable:
        """What takes the place of sglang's alignment, and quantizes x on the way."""

        def align(ids: torch.Tensor, block_size: int, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            pairs = ids.numel()
            places = pairs * block_size if pairs <= count else pairs + (count + 1) * (block_size - 1)
            sizes = places, -(-places // block_size), 1
            tables = tuple(topk_ids.new_empty(size) for size in sizes)
            moe_prepare(x, topk_ids, count, *tables, block_size, *(codes or ()), fast_math=self.fast_math, pdl=self.pdl)
            return tables

        return align

    def activate(
        self,
        gate_up: torch.Tensor,
        delta: torch.Tensor | None,
        routing: Routing,
        out: torch.Tensor,
        codes: Codes | None = None,
    ) -> None:
        moe_activate(gate_up, delta, routing, out, *(codes or ()), fast_math=self.fast_math, pdl=self.pdl)

    def down_delta(
        self, x: torch.Tensor, weights: torch.Tensor, routing: Routing, rows: int, out: torch.Tensor, *, add: bool
    ) -> None:
        moe_delta(x, self.down_a, self.down_b, weights, routing, out, add=add, block_rows=rows)


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
    few = topk_ids.numel() <= MOST_PAIRS
    x_codes = experts.new_codes(x) if few else None
    gemms = stock.ExpertGemms(layer, dispatched, experts.prepare(x, topk_ids, x_codes) if few else None)
    routing = Routing(topk_ids, batch.row_slots, batch.slot_ranks, experts.count, *gemms.blocks())
    gate_up = x.new_empty((routing.pairs, experts.gate_up_b.shape[2]))
    activated = x.new_empty((routing.pairs, experts.down_a.shape[3]))
    y = x.new_empty((*topk_ids.shape, experts.down_b.shape[2]))
    codes, rows = experts.new_codes(activated), block_rows(routing)
    if routing.pairs > MANY_PAIRS:
        gemms.gate_up(gate_up, x_codes)
        experts.gate_up_delta(x, routing, rows, gate_up, add=True)
        experts.activate(gate_up, None, routing, activated, codes)
        gemms.down(activated, y, codes)
        experts.down_delta(activated, weights, routing, rows, y.flatten(0, 1), add=True)
        return gemms.sum_over_experts(y)

    lane = experts.adapter_map.lanes.current() if batch.path is Path.TWO_STREAMS else None
    gate_up_delta, y_delta = torch.empty_like(gate_up), torch.empty_like(y)
    fork(lane)
    gemms.gate_up(gate_up, x_codes)
    with side(lane):
        experts.gate_up_delta(x, routing, rows, gate_up_delta, add=False)
    experts.activate(gate_up, gate_up_delta, routing, activated, codes)
    fork(lane)
    gemms.down(activated, y, codes)
    if not gemms.sums_in_order():
        # In the order of our sum, tokens without an adapter would lose the bits of sglang's.
        experts.down_delta(activated, weights, routing, rows, y.flatten(0, 1), add=True)
        return gemms.sum_over_experts(y)
    with side(lane):
        experts.down_delta(activated, weights, routing, rows, y_delta.flatten(0, 1), add=False)
    out = torch.empty_like(x)
    moe_sum(y, y_delta, routing, gemms.scaling, out, pdl=experts.pdl)
    return out


def fork(lane: Lane | None) -> None:
    if lane is not None:
        lane.fork()


def side(lane: Lane | None) -> contextlib.AbstractContextManager:
    return contextlib.nullcontext() if lane is None else lane.side()


def serve(site: str, layer: torch.nn.Module, adapter_map: Any) -> Experts:
    """The layer's adapters as the kernels see them; raises Unfit where they can't be served."""
    if reason := stock.unserved_experts(layer):
        raise Unfit(reason)
    experts = adapters_of(site, layer, adapter_map)
    width, hidden = experts.gate_up_b.shape[2], experts.gate_up_a.shape[3]
    if (found := stock.expert_widths(layer)) != (width, hidden):
        raise Unfit(f"the experts' weights are {found} wide, the adapters {(width, hidden)}")
    a = experts.down_a
    quantizes = experts.pdl and stock.has_fp8_blocks(layer) and _quantizes_as_sglang(a.device, a.dtype, experts.fast_math)
    return dataclasses.replace(experts, base_runner=stock.runner_without_lora(layer), quantizes=quantizes)


def adapters_of(site: str, layer: torch.nn.Module, adapter_map: Any) -> Experts:
    """The layer's adapters alone, whatever runs its base experts; raises Unfit where the kernels can't take them."""
    if not layer.set_lora:
        raise Unfit("sglang gave the layer no adapter buffers")
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
    capability = dense.capability(down_a.device)
    fast_math, pdl = (0, 0) < capability < (10, 0), capability >= (9, 0)
    return Experts(site, adapter_map, *buffers, None, fast_math, pdl)


@functools.cache
def _quantizes_as_sglang(device: torch.device, dtype: torch.dtype, fast_math: bool) -> bool:
    """Whether codes and scales of ours have the bits of sglang's, in rows of every size."""
    sizes = torch.logspace(-8, 4, 64, device=device)[:, None]
    x = (torch.randn(64, 512, device=device, generator=torch.Generator(device).manual_seed(0)) * sizes).to(dtype)
    x[0] = 0
    ids = torch.zeros(64, 1, dtype=torch.int32, device=device)
    codes = torch.zeros_like(x, dtype=torch.float8_e4m3fn), torch.zeros(64, 4, device=device)
    tables = ids.new_empty(64 + 16), ids.new_empty(5), ids.new_empty(1)
    moe_prepare(x, ids, 1, *tables, 16, *codes, fast_math=fast_math)
    return all(
        torch.equal(ours.view(torch.uint8), own.view(torch.uint8)) for ours, own in zip(codes, stock.quantize(x))
    )


def self_check(experts: Experts) -> str:
    """Run the kernels at this layer's real widths against float64, for every block size; the first miss in words, or ""."""
    hidden, rank, intermediate = experts.gate_up_a.shape[3], experts.down_a.shape[2], experts.down_a.shape[3]
    few = min(4, experts.count)
    case = moe_selfcheck.make_case(
        tokens=9,
        top_k=min(3, few),
        experts=few,
        ranks=(rank, max(1, rank // 2), max(1, rank - 1)),
        max_rank=rank,
        hidden=hidden,
        intermediate=intermediate,
        dtype=experts.down_a.dtype,
        device=experts.down_a.device,
        shared_outer=experts.gate_up_a.shape[1] < experts.count,
    )
    for rows, add in itertools.product(BLOCK_ROWS, (False, True)):
        if miss := check_kernels(experts, case, rows, add):
            return f"self-check of {rows} rows a block, H {hidden}, I {intermediate}, rank {rank}: {miss}"
    return _check_preparation(experts, case) or (_check_activation(experts, case) if case.x.is_cuda else "")


def _check_preparation(experts: Experts, case: moe_selfcheck.MoeCase) -> str:
    """Pairs sorted as sglang's alignment does it, with as many experts as the layer has."""
    wanted = case.routing(16)
    pairs, blocks, padded = experts.prepare(case.x, case.topk_ids, None)(case.topk_ids, 16, experts.count)
    used = int(wanted.padded)
    if (
        int(padded) != used
        or not torch.equal(pairs[:used], wanted.sorted_pairs[:used])
        or not torch.equal(blocks[: used // 16], wanted.block_experts[: used // 16])
    ):
        return "self-check of the preparation: pairs are not sorted by expert"
    return ""


def check_kernels(experts: Experts, case: moe_selfcheck.MoeCase, rows: int, add: bool) -> str:
    """Run the layer's kernels with the case's adapters; how they miss, or "". add: in line, not in two streams."""
    experts = dataclasses.replace(
        experts, gate_up_a=case.gate_up_a, gate_up_b=case.gate_up_b, down_a=case.down_a, down_b=case.down_b
    )
    routing, nan = case.routing(rows), float("nan")
    gate_up, y = case.gate_up.clone(), case.y.clone()
    gate_up_delta = gate_up if add else torch.full_like(gate_up, nan)
    experts.gate_up_delta(case.x, routing, rows, gate_up_delta, add=add)
    activated = torch.full_like(case.activated, nan)
    experts.activate(gate_up, None if add else gate_up_delta, routing, activated)
    if miss := moe_selfcheck.miss("activation", activated, case.expected_activated()):
        return miss
    y_delta = y if add else torch.full_like(y, nan)
    experts.down_delta(case.activated, case.weights, routing, rows, y_delta.flatten(0, 1), add=add)
    if add:
        return moe_selfcheck.miss("down projection", y, case.expected_y())
    out = torch.full_like(case.x, nan)
    moe_sum(y, y_delta, routing, 2.0, out, pdl=experts.pdl)
    return moe_selfcheck.miss("sum", out, 2.0 * case.expected_y().sum(1))


def _check_activation(experts: Experts, case: moe_selfcheck.MoeCase) -> str:
    """Rows without an adapter must have the very bits of sglang's own activation."""
    wanted = torch.empty_like(case.activated)
    stock.activate(case.gate_up, wanted)
    routing = dataclasses.replace(case, row_slots=torch.full_like(case.row_slots, -1)).routing(16)
    got = torch.empty_like(wanted)
    experts.activate(case.gate_up, torch.empty_like(case.gate_up), routing, got)
    return "" if torch.equal(got, wanted) else "rows without an adapter differ from sglang's activation"


WRAPPERS = {"FusedMoEWithLoRA.forward": forward}
