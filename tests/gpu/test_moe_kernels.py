"""The `moe` site's kernels at real layers' shapes against float64, and its base rows against sglang's own activation."""

from __future__ import annotations

import dataclasses
import types

import pytest
import torch

from lora_fastpath import moe_selfcheck, stock
from lora_fastpath.patches import moe

pytestmark = pytest.mark.gpu

LAYERS = {  # hidden size, intermediate size, experts, experts a token
    "30b": (2048, 768, 128, 8),
    "35b": (2048, 512, 256, 8),
    "235b": (4096, 1536, 128, 8),
    "mixtral": (4096, 14336, 8, 2),
}
BATCHES = {1: 16, 5: 64, 64: 16, 256: 16, 1024: 64}  # tokens -> rows a tile


def make(layer: str, tokens: int, ranks: tuple[int, ...], **options) -> tuple[moe.Experts, moe_selfcheck.MoeCase]:
    hidden, intermediate, experts, top_k = LAYERS[layer]
    case = moe_selfcheck.make_case(
        tokens, top_k, experts, ranks, max(ranks), hidden, intermediate, torch.bfloat16, "cuda", seed=tokens, **options
    )
    buffers = (case.gate_up_a, case.gate_up_b, case.down_a, case.down_b)
    return moe.Experts("moe", types.SimpleNamespace(), *buffers, None, fast_math=True, pdl=True), case


@pytest.mark.parametrize("ranks", [(16,), (16, 8, 0, 33), (128, 1)], ids=str)
@pytest.mark.parametrize("layer", LAYERS)
def test_each_kernel_is_float64(layer, ranks):
    for tokens, block_rows in BATCHES.items():
        experts, case = make(layer, tokens, ranks, away_every=7, none_every=0 if tokens == 1 else 4)
        assert not moe._check_kernels(experts, case, block_rows), f"{tokens} tokens, {block_rows} rows a tile"


def test_shared_outer_factors_and_a_fused_shared_expert():
    experts, case = make("30b", 64, (16, 8), shared_outer=True, fused_shared=True)
    assert not moe._check_kernels(experts, case, 16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_base_rows_have_the_bits_of_sglangs_activation(dtype):
    """Every finite gate there is, with a few ups each."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16, device="cuda").view(dtype)
    gates = every[every.isfinite()]
    gates = torch.cat([gates, gates.new_ones(-len(gates) % 512)]).view(-1, 512)
    ups = [gates.new_full(gates.shape, up) for up in (1.0, -0.37, 1e-4, 55.0)] + [gates.flip(0)]
    gate_up = torch.cat([torch.cat([gates, up], 1) for up in ups])
    experts, case = make("35b", 4, (16,))
    experts = dataclasses.replace(experts, gate_up_b=experts.gate_up_b.to(dtype))
    ids = torch.zeros(len(gate_up), 1, dtype=torch.int32, device="cuda")
    case.topk_ids, case.row_slots = ids, ids.new_full((len(gate_up),), -1)
    wanted, got = (gate_up.new_empty(len(gate_up), 512) for _ in range(2))
    stock.activate(gate_up, wanted)
    h = torch.full((1, len(gate_up), 32), float("nan"), device="cuda")
    experts.activate(gate_up, h, experts.gate_up_b, case.route(64), got)
    assert torch.equal(got.view(torch.int16), wanted.view(torch.int16))
    assert not torch.equal(got, torch.zeros_like(got))
