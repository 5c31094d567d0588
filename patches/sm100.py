"""Site `sm100`: LoRA inside FlashInfer's TRT-LLM-gen mixture of experts, on Blackwell, FP8 blocks and NVFP4.

    main stream                                             side stream
    route (FlashInfer)
    [gather, NVFP4] gate_up GEMM (FlashInfer)               moe_delta
    sm100_activate: silu(g + dg) * (u + du), quantized
    down GEMM (FlashInfer)                                  moe_delta
    moe_sum over a token's experts

sglang refuses adapters on experts of that backend. Here its LoRA layer is made all the same, for
--moe-runner-backend flashinfer_trtllm_routed, and gets a forward of ours. There is nothing of stock's to fall back to, so
what can't be served is an error when the server starts. A batch without adapters runs as sglang runs it.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch

from lora_fastpath import moe_selfcheck, stock
from lora_fastpath.gate import Path
from lora_fastpath.kernels.moe_prepare import MOST_PAIRS
from lora_fastpath.kernels.moe_routing import Routing
from lora_fastpath.kernels.sm100 import BaseExperts
from lora_fastpath.patches import moe, sm100_library
from lora_fastpath.registry import LoraFastpathError, Unfit, registry
from lora_fastpath.streams import Lane

SITE = "sm100"
BLOCK_ROWS = 16
MANY_BLOCK_ROWS = 64
"""Rows of a block of pairs, the latter past moe.MANY_PAIRS."""


@dataclasses.dataclass(frozen=True)
class Served:
    """One layer; attached to sglang's as `lora_fastpath`."""

    base: BaseExperts
    adapters: moe.Experts  # of all ranks' experts: sglang keeps global numbers on this backend

    @property
    def shape(self) -> tuple:
        """Layers with equal shapes share one self-check."""
        return self.adapters.shape, self.base.gemm1_weights.dtype


def get_lora_layer(wrapped: Any, _: Any, args: tuple, kwargs: dict) -> torch.nn.Module:
    layer = args[0] if args else kwargs["layer"]
    if not stock.runs_on_trtllm(layer):
        return wrapped(*args, **kwargs)
    return stock.trtllm_lora_layer(layer, args[1] if len(args) > 1 else kwargs["lora_backend"])


def attach(name: str, layer: torch.nn.Module, adapter_map: Any, checked: dict[tuple, str]) -> None:
    """Serve sglang's LoRA layer `name`; LoraFastpathError if it can't be."""
    try:
        if missing := [site for site in (SITE, "moe") if not registry.is_bound(site)]:
            raise Unfit(f"site {missing[0]} is not in service")
        served = serve(layer, adapter_map)
        if served.shape not in checked:
            checked[served.shape] = self_check(served)
        if checked[served.shape]:
            raise Unfit(checked[served.shape])
    except (Unfit, ValueError) as error:
        raise _unserved(name, str(error)) from error
    except Exception as error:  # noqa: BLE001 - whatever it is, the user wants to know a way out
        raise _unserved(name, f"{type(error).__name__}: {error}") from error
    layer.lora_fastpath = served
    layer.forward = functools.partial(forward, layer)
    adapter_map.sites.add(SITE)


def refuse(layers: list[tuple[str, torch.nn.Module]], reason: str) -> None:
    """LoraFastpathError if some layer is one that stock can't serve either."""
    for name, layer in layers:
        if stock.runs_on_trtllm(getattr(layer, "base_layer", None)):
            raise _unserved(name, reason)


def _unserved(name: str, reason: str) -> LoraFastpathError:
    return LoraFastpathError(
        f"{name}: {reason}. Adapters on experts of --moe-runner-backend flashinfer_trtllm_routed are the overlay's alone: "
        "start with --moe-runner-backend triton, or leave the experts out of --lora-target-modules"
    )


def serve(layer: torch.nn.Module, adapter_map: Any) -> Served:
    """Raises Unfit or ValueError where it can't be."""
    experts, config = layer.base_layer, layer.moe_runner_config
    if reason := stock.unserved_placement() or stock.unserved_activation(config):
        raise Unfit(reason)
    if config.num_fused_shared_experts:
        raise Unfit("it has fused shared experts, which FlashInfer does not route")
    lora = moe.adapters_of(SITE, layer, adapter_map)
    if lora.down_a.dtype is not torch.bfloat16:
        raise Unfit(f"the model is {lora.down_a.dtype}, FlashInfer's GEMMs write bfloat16")
    weights = stock.trtllm_weights(experts)
    base = BaseExperts(library=sm100_library.library(), dtype=torch.bfloat16, **weights)
    found = lora.count, 2 * base.intermediate, base.hidden
    wanted = base.num_experts, lora.gate_up_b.shape[2], lora.gate_up_a.shape[3]
    if found != wanted:
        raise Unfit(
            f"the layer's experts, 2I and H are {(base.num_experts, *found[1:])}, the adapters' {(lora.count, *wanted[1:])}; "
            "FlashInfer pads I to 128 columns a rank, where adapters can't be cut to fit"
        )
    base.require_kernels(config.top_k)
    return Served(base, lora)


def self_check(served: Served) -> str:
    """The LoRA kernels at this layer's widths against float64, and the activation between FlashInfer's GEMMs; "" if right."""
    return moe.self_check(served.adapters) or check_activation(served.base, served.adapters)


def check_activation(base: BaseExperts, adapters: moe.Experts) -> str:
    """Run the layer's activation on random gate_up in rows as FlashInfer sorts them; how it misses float64, or ""."""
    tokens, top_k, width = 9, 2, base.intermediate
    case = moe_selfcheck.make_case(
        tokens, top_k, top_k, (1,), 1, 16, width, adapters.down_a.dtype, adapters.down_a.device, none_every=3
    )
    pairs, device = tokens * top_k, case.gate_up.device
    order = torch.arange(pairs, dtype=torch.int32, device=device).flip(0)
    one = torch.full((1,), pairs, dtype=torch.int32, device=device)
    rows = base.rows_of(order.view(tokens, top_k), one, pairs)
    delta = torch.full_like(case.gate_up, float("nan"))
    gate_up = case.gate_up.double()
    for pair, *_ in case.with_delta():
        delta[pair] = 1
        gate_up[pair] += 1
    gate, up = case.gate_up.chunk(2, 1)
    if base.is_fp4:
        given, scales = torch.stack([up, gate], 2).flatten(1), None
    else:
        given = torch.cat([up, gate], 1).to(torch.float8_e4m3fn)
        scales = torch.ones(2 * width // 128 * pairs, device=device)
        gate_up += torch.cat([given[:, width:], given[:, :width]], 1).double() - case.gate_up.double()
    placed = torch.empty_like(given)
    placed[order.long()] = given
    out = torch.full_like(case.activated, float("nan"))
    base.activate(placed, scales, delta, case.routing(16), rows, out)
    gate, up = gate_up.chunk(2, 1)
    return moe_selfcheck.miss("activation", out, torch.nn.functional.silu(gate) * up)


def forward(layer: torch.nn.Module, hidden_states: torch.Tensor, topk_output: Any, **_: Any) -> torch.Tensor:
    served, experts = layer.lora_fastpath, layer.base_layer
    adapter_map = served.adapters.adapter_map
    batch = adapter_map.batch
    if batch is None:
        raise LoraFastpathError("site sm100: experts run for a batch whose adapters could not be mapped; see the line before")
    dispatched = experts.dispatcher.dispatch(hidden_states=hidden_states, topk_output=topk_output)
    if batch.path is Path.BASE:
        return stock.combine(layer, stock.run_base_experts(experts, dispatched))
    x, topk = dispatched.hidden_states, dispatched.topk_output
    if not stock.is_standard_topk(topk) or x.dim() != 2 or x.shape[0] != batch.rows:
        raise LoraFastpathError(
            f"site sm100: experts got {tuple(x.shape)} and a {type(topk).__name__}, expected {batch.rows} rows and a "
            "StandardTopKOutput"
        )
    lane = adapter_map.lanes.current() if batch.path is Path.TWO_STREAMS else None
    out = run(
        served.base, served.adapters, x, *stock.trtllm_quantize(experts, x),
        topk.topk_ids.to(torch.int32).contiguous(), topk.topk_weights, batch.row_slots, batch.slot_ranks, lane,
    )  # fmt: skip
    return stock.combine(layer, out)


def run(
    base: BaseExperts,
    adapters: moe.Experts,
    x: torch.Tensor,
    codes: torch.Tensor,
    codes_scale: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    row_slots: torch.Tensor,
    slot_ranks: torch.Tensor,
    lane: Lane | None = None,
) -> torch.Tensor:
    """The layer's output [T, H] on this rank.

    x                      [T, H]          what the adapters multiply, dtype of theirs
    codes, codes_scale     x quantized as BaseExperts.gate_up takes it
    topk_ids               int32 [T, top_k] numbers among all ranks' experts, as the adapters'
    topk_weights           [T, top_k]      routed scaling factor in them; rounded to BF16, as FlashInfer does it
    row_slots, slot_ranks  see moe_routing.py
    lane                   for two streams, else None
    """
    pairs, top_k = topk_ids.numel(), topk_ids.shape[1]
    out = torch.empty_like(x)
    if not pairs:
        return out
    rounded = topk_weights.to(torch.bfloat16)
    weights = rounded.float()
    here, first = topk_ids, base.local_expert_offset
    if base.local_experts < base.num_experts:
        here = torch.where((topk_ids >= first) & (topk_ids < first + base.local_experts), topk_ids, -1)
    block_size = BLOCK_ROWS if pairs <= moe.MANY_PAIRS else MANY_BLOCK_ROWS
    rows = base.route(topk_ids, rounded)
    gate_up_delta = x.new_empty(pairs, 2 * base.intermediate)
    activated = x.new_empty(pairs, base.intermediate)
    y_delta = x.new_empty(pairs, base.hidden)
    align = adapters.prepare(x, here, None) if pairs <= MOST_PAIRS else stock.align
    tables = align(here, block_size, base.num_experts)
    routing = Routing(here, row_slots, slot_ranks, adapters.count, *tables, block_size)
    block_rows = moe.block_rows(routing)
    moe.fork(lane)
    gate_up, gate_up_scales = base.gate_up(codes, codes_scale, rows)
    with moe.side(lane):
        adapters.gate_up_delta(x, routing, block_rows, gate_up_delta, add=False)
    codes, codes_scale = base.activate(gate_up, gate_up_scales, gate_up_delta, routing, rows, activated)
    moe.fork(lane)
    y = base.down(codes, codes_scale, rows)
    with moe.side(lane):
        adapters.down_delta(activated, weights, routing, block_rows, y_delta, add=False)
    base.finalize(y, y_delta.view(-1, top_k, base.hidden), weights, routing, rows, out)
    return out


WRAPPERS = {"get_lora_layer": get_lora_layer}
