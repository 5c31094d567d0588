"""FlashInfer's mixture of experts with LoRA inside, whole, against float64; a stand-in for FlashInfer's own GEMMs."""

from __future__ import annotations

import dataclasses
import os

import pytest
import sm100_reference as reference
import torch

from lora_fastpath import stock
from lora_fastpath.kernels.sm100 import BaseExperts
from lora_fastpath.moe_selfcheck import MoeCase, make_case
from lora_fastpath.patches import moe, sm100

interpreted = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="TRITON_INTERPRET=1 is not set")

E, HIDDEN, HALF = 4, 256, 128


def quantize_fp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [..., K] as codes and scales of 128 columns each."""
    groups = x.view(*x.shape[:-1], -1, 128)
    scale = groups.abs().amax(-1) / 448
    return (groups / scale[..., None]).view(x.shape).to(torch.float8_e4m3fn), scale


def quantize_fp4(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    groups = x.view(*x.shape[:-1], -1, 16)
    scale = (groups.abs().amax(-1) / 6).to(torch.float8_e4m3fn)
    nearest = (groups / scale.float()[..., None]).abs()[..., None] - reference.E2M1
    code = nearest.abs().argmin(-1) + 8 * (groups < 0)
    code = code.view(*x.shape[:-1], -1, 2).to(torch.uint8)
    return code[..., 0] | code[..., 1] << 4, scale


def make_base(fp4: bool, **options) -> tuple[BaseExperts, torch.Tensor, torch.Tensor]:
    """The experts, and their weights: gate_up with gate first [E, 2I, H], and down [E, H, I]; float64."""
    generator = torch.Generator().manual_seed(1)
    up, gate, down = (
        torch.randn(E, n, k, generator=generator) * k**-0.5 for n, k in ((HALF, HIDDEN), (HALF, HIDDEN), (HIDDEN, HALF))
    )
    shared = dict(library=reference.Library(), dtype=torch.float16, num_experts=E, fast_math=False, pdl=False)
    if fp4:
        w1, s1 = quantize_fp4(torch.stack([up, gate], 2).flatten(1, 2) * 16)
        w2, s2 = quantize_fp4(down * 16)
        alphas = torch.full((E,), 1 / 16), torch.full((E,), 1 / 16 / 50)
        base = BaseExperts(
            gemm1_weights=w1, gemm1_weights_scale=s1, gemm2_weights=w2, gemm2_weights_scale=s2,
            gemm1_alphas=alphas[0], gemm2_alphas=alphas[1], activation_scale=torch.tensor([50.0]), **shared | options,
        )  # fmt: skip
        both = reference.fp4_values(w1, s1).view(E, HALF, 2, HIDDEN) / 16
        return base, torch.cat([both[:, :, 1], both[:, :, 0]], 1), reference.fp4_values(w2, s2) / 16
    blocks = [
        torch.rand(E, n // 128, k // 128, generator=generator) / 448 for n, k in ((2 * HALF, HIDDEN), (HIDDEN, HALF))
    ]
    codes = [
        (w / s.repeat_interleave(128, 1).repeat_interleave(128, 2)).clamp(-448, 448).to(torch.float8_e4m3fn)
        for w, s in zip((torch.cat([up, gate], 1), down), blocks)
    ]
    base = BaseExperts(
        gemm1_weights=codes[0], gemm1_weights_scale=blocks[0], gemm2_weights=codes[1], gemm2_weights_scale=blocks[1],
        **shared | options,
    )  # fmt: skip
    both = reference.fp8_values(codes[0], blocks[0])
    return base, both.roll(HALF, 1), reference.fp8_values(codes[1], blocks[1])


def expected(
    case: MoeCase, x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, *, lora: bool, first: int = 0
) -> torch.Tensor:
    """float64 [T, H]; x what the base experts see, which are those from `first` on."""
    weights, out = case.weights.to(torch.bfloat16).double(), torch.zeros(len(x), HIDDEN, dtype=torch.float64)
    adapted = {pair: (slot, rank) for pair, slot, _, rank in case.with_delta()} if lora else {}
    max_rank = case.down_a.shape[2]
    for pair, expert in enumerate(case.topk_ids.flatten().tolist()):
        token = pair // case.topk_ids.shape[1]
        if not first <= expert < first + E:
            continue
        both, slot, rank = gate_up[expert - first] @ x[token], *adapted.get(pair, (0, 0))
        for s in (0, 1) if rank else ():
            a = case.gate_up_a[slot, expert, s * max_rank :][:rank].double() @ case.x[token].double()
            both[s * HALF : (s + 1) * HALF] += (
                case.gate_up_b[slot, expert, s * HALF : (s + 1) * HALF, :rank].double() @ a
            )
        hidden = torch.nn.functional.silu(both[:HALF]) * both[HALF:]
        y = down[expert - first] @ hidden
        if rank:
            y += case.down_b[slot, expert, :, :rank].double() @ (case.down_a[slot, expert, :rank].double() @ hidden)
        out[token] += weights.flatten()[pair] * y
    return out


def serve(base: BaseExperts, case: MoeCase) -> tuple[torch.Tensor, torch.Tensor]:
    """The stages' output, and the x that the base experts saw."""
    buffers = (case.gate_up_a, case.gate_up_b, case.down_a, case.down_b)
    experts = moe.Experts("sm100", None, *buffers, None, fast_math=False, pdl=False)
    if base.is_fp4:
        codes, scale = quantize_fp4(case.x.float())
        seen = reference.fp4_values(codes, scale)
    else:
        codes, scale = quantize_fp8(case.x.float())
        seen = codes.double() * scale.double().repeat_interleave(128, 1)
        scale = scale.T.contiguous()
    out = sm100.run(base, experts, case.x, codes, scale, case.topk_ids, case.weights, case.row_slots, case.slot_ranks)
    return out, seen


def error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((got.double() - wanted).pow(2).mean() / wanted.pow(2).mean()).sqrt().item()


def case_of(tokens: int, **options) -> MoeCase:
    sizes = dict(top_k=2, experts=E, ranks=(16, 5, 0), max_rank=16, hidden=HIDDEN, intermediate=HALF)
    return make_case(tokens, dtype=torch.float16, device="cpu", **sizes | options)


def align(ids: torch.Tensor, block_size: int, experts: int) -> tuple[torch.Tensor, ...]:
    """sglang's, which needs a GPU."""
    nothing = torch.empty(0)
    routing = MoeCase(*[nothing] * 5, ids, *[nothing] * 4, ids, ids, experts).routing(block_size)
    return routing.sorted_pairs, routing.block_experts, routing.padded


ROUNDING = {False: 0.09, True: 0.16}
"""Of gate_up (FP8 alone) and of the activation, relative to what is rounded."""


@interpreted
@pytest.mark.parametrize("fp4", [False, True], ids=["fp8", "fp4"])
@pytest.mark.parametrize(("tokens", "tile"), [(1, 8), (24, 8), (90, 32), (260, None)])
def test_the_stages_are_a_mixture_of_experts_with_lora(tokens, tile, fp4, monkeypatch):
    base, gate_up, down = make_base(fp4)
    monkeypatch.setattr(stock, "align", align)
    case = case_of(tokens, none_every=0 if tokens == 1 else 4)
    got, seen = serve(base, case)
    wanted, plain = (expected(case, seen, gate_up, down, lora=lora) for lora in (True, False))
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
    wanted, plain = (expected(case, seen, gate_up, down, lora=lora, first=E) for lora in (True, False))
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
