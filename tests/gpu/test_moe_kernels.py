"""The `moe` site's kernels at real layers' shapes against float64, and its base rows against sglang's own activation."""

from __future__ import annotations

import types

import pytest
import torch

from lora_fastpath import moe_selfcheck, stock
from lora_fastpath.kernels.moe_prepare import moe_prepare
from lora_fastpath.kernels.moe_routing import Routing
from lora_fastpath.kernels.moe_sum import moe_sum
from lora_fastpath.patches import moe

pytestmark = pytest.mark.gpu

LAYERS = {  # hidden size, intermediate size, experts, experts a token
    "30b": (2048, 768, 128, 8),
    "35b": (2048, 512, 256, 8),
    "235b": (4096, 1536, 128, 8),
    "mixtral": (4096, 14336, 8, 2),
}
BATCHES = {1: 16, 5: 64, 64: 16, 256: 32, 1024: 64}  # tokens -> rows a block


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
    for tokens, rows in BATCHES.items():
        experts, case = make(layer, tokens, ranks, away_every=7, none_every=0 if tokens == 1 else 4)
        for add in (False, True):
            assert not moe.check_kernels(experts, case, rows, add), f"{tokens} tokens, {rows} rows a block, add {add}"


@pytest.mark.parametrize("add", [False, True])
def test_shared_outer_factors_and_a_fused_shared_expert(add):
    experts, case = make("30b", 64, (16, 8), shared_outer=True, fused_shared=True)
    assert not moe.check_kernels(experts, case, 16, add)


def test_the_base_layers_blocks_are_what_the_kernels_take_them_for():
    """sglang's alignment: pairs sorted by expert, -1 first, each expert padded to full blocks."""
    from sglang.srt.layers.moe.moe_runner.triton_utils.moe_align_block_size import moe_align_block_size

    for tokens in (1, 7, 64, 700):
        _, case = make("30b", tokens, (16,), away_every=7)
        wanted = case.routing(16)
        pairs, experts, padded = moe_align_block_size(case.topk_ids, 16, 128)
        used, real = int(wanted.padded), pairs < case.topk_ids.numel()
        assert int(padded) == used
        assert torch.equal(experts[: used // 16], wanted.block_experts[: used // 16])
        assert torch.equal(pairs[:used].sort().values, wanted.sorted_pairs[:used].sort().values)
        real = real[:used]
        of_pair, of_block = case.topk_ids.flatten()[pairs[:used][real].long()], experts.repeat_interleave(16)[:used]
        assert torch.equal(of_pair, of_block[real])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_codes_and_scales_have_the_bits_of_sglangs(dtype):
    assert moe._quantizes_as_sglang(torch.device("cuda", 0), dtype, True)
    for tokens in (3, 700):  # rows one by one, and by eights
        experts, case = make("30b", tokens, (16,), none_every=0)
        gate_up = (case.gate_up * torch.logspace(-6, 2, len(case.gate_up), device="cuda")[:, None]).to(dtype)
        out = gate_up.new_empty(len(gate_up), 768)
        codes = torch.empty_like(out, dtype=torch.float8_e4m3fn), out.new_empty(len(out), 6, dtype=torch.float32)
        experts.activate(gate_up, None, case.routing(16), out, codes)
        for ours, own in zip(codes, stock.quantize(out)):
            assert torch.equal(ours.view(torch.uint8), own.view(torch.uint8))


@pytest.mark.parametrize("tokens", [1, 3, 20, 32])
def test_a_small_batchs_pairs_are_sorted_into_the_same_blocks(tokens):
    from sglang.srt.layers.moe.moe_runner.triton_utils.moe_align_block_size import moe_align_block_size

    for experts, block_size in ((128, 16), (128, 64), (256, 16)):
        _, case = make("30b", tokens, (16,), away_every=7 if tokens > 3 else 0)
        pairs, blocks, padded = moe_align_block_size(case.topk_ids, block_size, experts)
        tables = [torch.full_like(table, -7) for table in (pairs, blocks, padded)]
        moe_prepare(case.x, case.topk_ids, experts, *tables, block_size, pdl=True)
        used = int(padded)
        assert int(tables[2]) == used and torch.equal(tables[1][: used // block_size], blocks[: used // block_size])
        ours, own = (table[:used].view(-1, block_size).sort(1).values for table in (tables[0], pairs))
        if not (case.topk_ids < 0).any():  # an expert of several blocks has its pairs in any of them
            assert torch.equal(ours, own)
        assert torch.equal(ours.flatten().sort().values, own.flatten().sort().values)


@pytest.mark.parametrize("scaling", [1.0, 2.5])
@pytest.mark.parametrize("top_k", [2, 4, 8])
def test_tokens_without_an_adapter_have_the_bits_of_sglangs_sums(top_k, scaling):
    from sglang.srt.layers.moe.moe_runner.triton_utils import fused_moe

    for tokens in (3, 32, 33, 200):
        y = torch.randn(tokens, top_k, 2048, device="cuda", dtype=torch.bfloat16)
        ids = torch.zeros(tokens, top_k, dtype=torch.int32, device="cuda")
        slots, ranks = torch.full_like(ids[:, 0], -1), torch.full_like(ids[0, :1], 16)
        none = torch.empty(0, dtype=torch.int32, device="cuda")
        routing = Routing(ids, slots, ranks, 8, none, none, none, 16)
        wanted, got = torch.empty_like(y[:, 0]), torch.empty_like(y[:, 0])
        if tokens <= 32:
            fused_moe.moe_sum_reduce_torch_compile(y, wanted, scaling)
        else:
            fused_moe.moe_sum_reduce(y, wanted, scaling)
        moe_sum(y, torch.full_like(y, float("nan")), routing, scaling, got, pdl=True)
        assert torch.equal(got, wanted), f"{tokens} tokens"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_base_rows_have_the_bits_of_sglangs_activation(dtype):
    """Every finite gate there is, with a few ups each."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16, device="cuda").view(dtype)
    gates = every[every.isfinite()]
    gates = torch.cat([gates, gates.new_ones(-len(gates) % 512)]).view(-1, 512)
    ups = [gates.new_full(gates.shape, up) for up in (1.0, -0.37, 1e-4, 55.0)] + [gates.flip(0)]
    gate_up = torch.cat([torch.cat([gates, up], 1) for up in ups])
    experts, case = make("35b", 4, (16,))
    ids = torch.zeros(len(gate_up), 1, dtype=torch.int32, device="cuda")
    case.topk_ids, case.row_slots = ids, ids.new_full((len(gate_up),), -1)
    wanted, got = (gate_up.new_empty(len(gate_up), 512) for _ in range(2))
    stock.activate(gate_up, wanted)
    experts.activate(gate_up, torch.full_like(gate_up, float("nan")), case.routing(64), got)
    assert torch.equal(got.view(torch.int16), wanted.view(torch.int16))
    assert not torch.equal(got, torch.zeros_like(got))
