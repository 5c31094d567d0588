"""csrc/sm100.cu whole on a Hopper GPU, with plain loops in place of FlashInfer's Blackwell GEMMs, against float64.

LORA_FASTPATH_SM100_REFERENCE names the library that `tests/sm100/compile_library.py hopper LIBRARY` has made. Routing is
FlashInfer's own. Weights are unshuffled, which only its real GEMMs want.
"""

from __future__ import annotations

import os

import pytest
import sm100_layers as layers
import torch
from sm100_layers import ROUNDING, error, expected

from lora_fastpath import moe_selfcheck
from lora_fastpath.kernels.sm100 import BaseExperts
from lora_fastpath.patches import moe, sm100
from lora_fastpath.streams import Lanes

LIBRARY = os.environ.get("LORA_FASTPATH_SM100_REFERENCE", "")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not LIBRARY, reason="LORA_FASTPATH_SM100_REFERENCE is not set")]

E, HIDDEN, HALF = 16, 512, 256


@pytest.fixture(scope="module")
def library():
    import tvm_ffi

    return tvm_ffi.load_module(LIBRARY)


class Layer:
    def __init__(self, base: BaseExperts, case: moe_selfcheck.MoeCase) -> None:
        buffers = (case.gate_up_a, case.gate_up_b, case.down_a, case.down_b)
        self.base, self.case = base, case
        self.adapters = moe.Experts("sm100", None, *buffers, None, fast_math=False, pdl=True)
        self.lanes = Lanes(torch.device("cuda"))

    def run(self, codes: torch.Tensor, scale: torch.Tensor, *, two_streams: bool) -> torch.Tensor:
        case, lane = self.case, self.lanes.current() if two_streams else None
        return sm100.run(
            self.base, self.adapters, case.x, codes, scale, case.topk_ids, case.weights, case.row_slots, case.slot_ranks, lane
        )


def make_layer(library, fp4: bool, tokens: int, top_k: int = 4, ranks: int = 1, seed: int = 0):
    """Experts of the middle rank."""
    placed = dict(num_experts=ranks * E, local_expert_offset=ranks // 2 * E)
    base, gate_up, down = layers.make_base(library, fp4, E, HIDDEN, HALF, torch.bfloat16, "cuda", **placed)
    case = moe_selfcheck.make_case(
        tokens, top_k, ranks * E, (16, 8, 0), 16, HIDDEN, HALF, torch.bfloat16, "cuda", seed=seed
    )
    return Layer(base, case), gate_up, down


@pytest.mark.parametrize("fp4", [False, True], ids=["fp8", "fp4"])
@pytest.mark.parametrize(("tokens", "top_k"), [(1, 1), (1, 10), (7, 8), (64, 4), (300, 8), (1024, 2), (4096, 4)])
def test_the_layer_is_float64(library, tokens, top_k, fp4):
    layer, gate_up, down = make_layer(library, fp4, tokens, top_k)
    codes, scale, seen = layers.quantized(layer.base, layer.case.x)
    wanted, plain = (expected(layer.base, layer.case, seen, gate_up, down, lora=lora) for lora in (True, False))
    for two_streams in (False, True):
        got = layer.run(codes, scale, two_streams=two_streams)
        assert error(got, wanted) < ROUNDING[fp4] < 0.3 < error(got, plain)


@pytest.mark.parametrize("fp4", [False, True], ids=["fp8", "fp4"])
def test_experts_of_other_ranks(library, fp4):
    layer, gate_up, down = make_layer(library, fp4, 64, ranks=3)
    codes, scale, seen = layers.quantized(layer.base, layer.case.x)
    assert error(layer.run(codes, scale, two_streams=True), expected(layer.base, layer.case, seen, gate_up, down)) < ROUNDING[fp4]


@pytest.mark.parametrize("fp4", [False, True], ids=["fp8", "fp4"])
def test_replay_in_two_streams_follows_the_batch(library, fp4):
    layer, gate_up, down = make_layer(library, fp4, 32)
    codes, scale, _ = layers.quantized(layer.base, layer.case.x)
    layer.run(codes, scale, two_streams=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = layer.run(codes, scale, two_streams=True)
    for seed in range(1, 6):
        other, *_ = make_layer(library, fp4, 32, seed=seed)
        for name in ("x", "topk_ids", "weights", "row_slots", "slot_ranks"):
            getattr(layer.case, name).copy_(getattr(other.case, name))
        fresh_codes, fresh_scale, seen = layers.quantized(layer.base, layer.case.x)
        codes.copy_(fresh_codes)
        scale.copy_(fresh_scale)
        graph.replay()
        assert torch.equal(captured, layer.run(codes, scale, two_streams=False))
        assert error(captured, expected(layer.base, layer.case, seen, gate_up, down)) < ROUNDING[fp4]


def test_a_gemm_without_kernels_is_refused(library):
    layer, *_ = make_layer(library, False, 4)
    layer.base.require_kernels(4)
    with pytest.raises(RuntimeError, match="No kernel found"):
        library.lora_fastpath_kernels(False, True, 512, 512, 8, 8, 2, 256)


def routed(library, tokens: int, top_k: int):
    """A batch without adapters, in rows as FlashInfer sorts them."""
    layer, *_ = make_layer(library, False, tokens, top_k)
    case = layer.case
    rows = layer.base.route(case.topk_ids, case.weights.to(torch.bfloat16))
    case.row_slots.fill_(-1)
    return layer, case, rows, int(rows.in_use)


@pytest.mark.parametrize(("tokens", "top_k"), [(1, 1), (1, 10), (64, 8), (700, 4), (4096, 2)])
def test_activation_without_a_delta_has_the_bits_of_flashinfers(library, tokens, top_k):
    layer, case, rows, used = routed(library, tokens, top_k)
    count = max(rows.count, 1)
    gate_up = (torch.randn(count, 2 * HALF, device="cuda") * 3).to(torch.float8_e4m3fn)
    gate_up[::7] = 0
    scales = torch.rand(2 * HALF // 128 * count, device="cuda") * torch.logspace(-6, 1, 2 * HALF // 128 * count, device="cuda")
    wanted = torch.zeros(count, HALF, dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn)
    wanted_scales = torch.zeros(HALF // 128 * count, device="cuda")
    library.flashinfer_activate(gate_up, scales, rows.permuted, rows.in_use, wanted, wanted_scales)
    out = torch.empty(tokens * top_k, HALF, dtype=torch.bfloat16, device="cuda")
    codes, code_scales = layer.base.activate(gate_up, scales, None, case.routing(16), rows, out)
    own = rows.permuted.flatten().long()
    blocks = HALF // 128 * used
    ours, theirs = (s[:blocks].view(-1, used)[:, own] for s in (code_scales, wanted_scales))
    assert torch.equal(ours, theirs)
    assert torch.equal(codes[own].view(torch.uint8), wanted[own].view(torch.uint8))


@pytest.mark.parametrize(("tokens", "top_k"), [(1, 1), (7, 10), (64, 8), (700, 4), (4096, 2)])
def test_sum_without_a_delta_has_the_bits_of_flashinfers(library, tokens, top_k):
    layer, case, rows, _ = routed(library, tokens, top_k)
    y = torch.randn(rows.count, HIDDEN, device="cuda").to(torch.bfloat16)
    weights = case.weights.to(torch.bfloat16)
    wanted, got = torch.empty_like(case.x), torch.empty_like(case.x)
    library.flashinfer_finalize(y, weights, rows.permuted, rows.in_use, layer.base.num_experts, wanted)
    layer.base.finalize(y, None, weights.float(), case.routing(16), rows, got)
    assert torch.equal(got, wanted)
