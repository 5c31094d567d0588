"""FlashInfer's mixture of experts with LoRA inside, whole, against float64; a stand-in for FlashInfer's own GEMMs."""

from __future__ import annotations

import dataclasses
import os

import pytest
import sm100_layers as layers
import torch
from sm100_layers import ROUNDING, error, expected

from lora_fastpath import stock
from lora_fastpath.kernels.sm100 import BaseExperts
from lora_fastpath.moe_selfcheck import MoeCase, make_case
from lora_fastpath.patches import moe, sm100

interpreted = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="TRITON_INTERPRET=1 is not set")

E, HIDDEN, HALF = 4, 256, 128


def make_base(fp4: bool, **options) -> tuple[BaseExperts, torch.Tensor, torch.Tensor]:
    options = dict(fast_math=False, pdl=False) | options
    return layers.make_base(layers.Library(), fp4, E, HIDDEN, HALF, torch.float16, "cpu", **options)


def serve(base: BaseExperts, case: MoeCase) -> tuple[torch.Tensor, torch.Tensor]:
    """The stages' output, and the x that the base experts saw."""
    buffers = (case.gate_up_a, case.gate_up_b, case.down_a, case.down_b)
    experts = moe.Experts("sm100", None, *buffers, None, fast_math=False, pdl=False)
    codes, scale, seen = layers.quantized(base, case.x)
    out = sm100.run(base, experts, case.x, codes, scale, case.topk_ids, case.weights, case.row_slots, case.slot_ranks)
    return out, seen


def case_of(tokens: int, **options) -> MoeCase:
    sizes = dict(top_k=2, experts=E, ranks=(16, 5, 0), max_rank=16, hidden=HIDDEN, intermediate=HALF)
    return make_case(tokens, dtype=torch.float16, device="cpu", **sizes | options)


def align(ids: torch.Tensor, block_size: int, experts: int) -> tuple[torch.Tensor, ...]:
    """sglang's, which needs a GPU."""
    nothing = torch.empty(0)
    routing = MoeCase(*[nothing] * 5, ids, *[nothing] * 4, ids, ids, experts).routing(block_size)
    return routing.sorted_pairs, routing.block_experts, routing.padded


@interpreted
@pytest.mark.parametrize("fp4", [False, True], ids=["fp8", "fp4"])
@pytest.mark.parametrize(("tokens", "tile"), [(1, 8), (24, 8), (90, 32), (260, None)])
def test_the_stages_are_a_mixture_of_experts_with_lora(tokens, tile, fp4, monkeypatch):
    base, gate_up, down = make_base(fp4)
    monkeypatch.setattr(stock, "align", align)
    case = case_of(tokens, none_every=0 if tokens == 1 else 4)
    got, seen = serve(base, case)
    wanted, plain = (expected(base, case, seen, gate_up, down, lora=lora) for lora in (True, False))
    assert error(got, wanted) < ROUNDING[fp4] < 0.5 < error(got, plain)
    none = case.row_slots < 0
    assert tokens == 1 or error(got[none], plain[none]) < ROUNDING[fp4]
    assert base.library.tiles == {tile or (128 if fp4 else 64)}


@interpreted
@pytest.mark.parametrize("fp4", [False, True], ids=["fp8", "fp4"])
def test_experts_of_other_ranks(fp4):
    base, gate_up, down = make_base(fp4, num_experts=3 * E, local_expert_offset=E)
    case = case_of(24, experts=3 * E)
    assert len({int(expert) // E for expert in case.topk_ids.flatten()}) == 3
    got, seen = serve(base, case)
    wanted, plain = (expected(base, case, seen, gate_up, down, lora=lora) for lora in (True, False))
    assert error(got, wanted) < ROUNDING[fp4] < 0.4 < error(got, plain)


@interpreted
@pytest.mark.parametrize("fp4", [False, True], ids=["fp8", "fp4"])
def test_rows_without_an_adapter_have_the_bits_of_a_batch_without(fp4):
    base, *_ = make_base(fp4)
    case = case_of(24)
    got, none = serve(base, case)[0], case.row_slots < 0
    without = serve(base, dataclasses.replace(case, row_slots=torch.full_like(case.row_slots, -1)))[0]
    assert none.any() and torch.equal(got[none], without[none]) and not torch.equal(got, without)


def test_no_tokens():
    base, *_ = make_base(False)
    case = case_of(4)
    empty = dataclasses.replace(case, x=case.x[:0], topk_ids=case.topk_ids[:0], weights=case.weights[:0])
    scale = torch.empty(HIDDEN // 128, 0)
    out = sm100.run(base, None, empty.x, empty.x, scale, empty.topk_ids, empty.weights, case.row_slots, case.slot_ranks)
    assert out.shape == (0, HIDDEN)


@pytest.mark.parametrize(
    ("fp4", "name", "change", "found"),
    [
        (
            False,
            "gemm1_weights",
            lambda t: t.to(torch.bfloat16),
            "torch.bfloat16 [4, 256, 256], expected float8_e4m3fn",
        ),
        (False, "gemm1_weights", lambda t: t[:, :200].contiguous(), "2I 200, expected multiples of 128"),
        (False, "gemm1_weights_scale", lambda t: t.double(), "torch.float64 [4, 2, 2]"),
        (False, "gemm2_weights", lambda t: t[:, ::2], "[4, 128, 128] on cpu, not contiguous"),
        (False, "gemm2_weights_scale", lambda t: None, "None, expected torch.float32 [4, 2, 1]"),
        (True, "gemm1_weights_scale", lambda t: t.view(torch.uint8), "torch.uint8 [4, 256, 16]"),
        (True, "gemm1_alphas", lambda t: t[:3], "torch.float32 [3]"),
        (True, "activation_scale", lambda t: None, "None, expected torch.float32 [1]"),
        (False, "local_expert_offset", lambda t: 5, "5 with 4 experts here of 4, expected 0 to 0"),
    ],
)
def test_a_misfit_is_named(fp4, name, change, found):
    base, *_ = make_base(fp4)
    with pytest.raises(ValueError) as error:
        dataclasses.replace(base, **{name: change(getattr(base, name))})
    assert str(error.value).startswith(f"{name}: ") and found in str(error.value)


def test_a_batchs_misfit_is_named():
    base, *_ = make_base(False)
    ids, weights = torch.zeros(3, 2, dtype=torch.int32), torch.ones(3, 2, dtype=torch.bfloat16)
    for changed, name in (
        ((ids.long(), weights), "topk_ids"),
        ((ids, weights.float()), "topk_weights"),
        ((ids, weights[:2]), "topk_weights"),
        ((ids[:, :1].expand(3, 5), weights), "topk_ids"),
    ):
        with pytest.raises(ValueError, match=f"^{name}: "):
            base.route(*changed)
    rows = base.route(ids, weights)
    with pytest.raises(
        ValueError, match=r"^x: torch.float16 \[3, 256\] on cpu, expected torch.float8_e4m3fn \[3, 256\]"
    ):
        base.gate_up(torch.zeros(3, HIDDEN, dtype=torch.float16), torch.zeros(2, 3), rows)
    with pytest.raises(ValueError, match=r"^x_scale: .* expected torch.float32 \[2, 3\]"):
        base.gate_up(torch.zeros(3, HIDDEN, dtype=torch.float8_e4m3fn), torch.zeros(3, 2), rows)


@pytest.mark.parametrize(
    ("fp4", "found"),
    [(False, "no FP8 block gate_up GEMM of 256 x 256 with 64"), (True, "no NVFP4 gate_up GEMM of 256 x 256 with 64")],
)
def test_a_gemm_that_flashinfer_lacks_is_named(fp4, found):
    base, *_ = make_base(fp4)
    base.require_kernels(2)
    base.library.without = 64
    with pytest.raises(ValueError, match=f"{found} rows a tile"):
        base.require_kernels(2)


@interpreted
@pytest.mark.parametrize("fp4", [False, True], ids=["fp8", "fp4"])
def test_the_activations_self_check(fp4):
    base, *_ = make_base(fp4)
    case = case_of(4)
    adapters = moe.Experts("sm100", None, case.gate_up_a, case.gate_up_b, case.down_a, case.down_b, None, False, False)
    assert sm100.check_activation(base, adapters) == ""

    class Wrong(BaseExperts):
        def activate(self, gate_up, scales, delta, *others):
            return super().activate(gate_up, scales, None, *others)

    wrong = Wrong(**{field.name: getattr(base, field.name) for field in dataclasses.fields(base)})
    assert "activation: largest relative error" in sm100.check_activation(wrong, adapters)
