"""The mixture-of-experts kernels under Triton's interpreter against float64 (FP16: the interpreter has no bfloat16)."""

from __future__ import annotations

import dataclasses
import os

import pytest
import torch

from lora_fastpath.kernels.moe_activate import moe_activate
from lora_fastpath.kernels.moe_expand import moe_expand
from lora_fastpath.kernels.moe_finalize import moe_finalize
from lora_fastpath.kernels.moe_route import Route
from lora_fastpath.kernels.moe_shrink import moe_shrink
from lora_fastpath.moe_selfcheck import MoeCase, align, make_case

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="TRITON_INTERPRET=1 is not set")

NAN = float("nan")
SEVERAL = {"ranks": (16, 5, 0, 1)}
CASES = {
    "one-adapter": {"ranks": (16,), "none_every": 0},
    "one-adapter-and-none": {"ranks": (16,), "none_every": 3},
    "several-ranks": SEVERAL,
    "elsewhere": SEVERAL | {"away_every": 3},
    "fused-shared": SEVERAL | {"fused_shared": True},
    "shared-outer": SEVERAL | {"shared_outer": True},
    "shared-outer-fused-shared": SEVERAL | {"shared_outer": True, "fused_shared": True, "away_every": 5},
    "few-pairs": SEVERAL | {"tokens": 2, "none_every": 0},
    "one-token": {"ranks": (7, 0), "tokens": 1, "top_k": 3, "none_every": 0},
    "rank-8": {"ranks": (8, 3), "max_rank": 8},
    "rank-128": {"ranks": (128, 20), "max_rank": 128},
    "no-power-of-two": {"ranks": (24, 9), "max_rank": 24, "hidden": 72, "intermediate": 40, "top_k": 3},
    "float32": SEVERAL | {"dtype": torch.float32},
}


def random_case(name: str) -> MoeCase:
    options = dict(
        tokens=24, top_k=2, experts=3, max_rank=16, hidden=96, intermediate=48, dtype=torch.float16, device="cpu"
    )
    return make_case(**options | CASES[name])


def shrink_gate_up(case: MoeCase, route: Route, **options) -> torch.Tensor:
    h = torch.full((route.pairs, case.gate_up_a.shape[2]), NAN, dtype=case.x.dtype)
    moe_shrink(case.x, case.gate_up_a, route, h, rows_share=route.top_k, slices=2, **options)
    return h


def shrink_down(case: MoeCase, route: Route, **options) -> torch.Tensor:
    h = torch.full((route.pairs, case.down_a.shape[2]), NAN, dtype=case.x.dtype)
    moe_shrink(case.activated, case.down_a, route, h, rows_share=1, slices=1, **options)
    return h


def activate(case: MoeCase, route: Route, **options) -> torch.Tensor:
    out = torch.full_like(case.activated, NAN)
    moe_activate(case.gate_up, case.expected_gate_up_h().to(out.dtype), case.gate_up_b, route, out, **options)
    return out


def expand(case: MoeCase, route: Route, **options) -> torch.Tensor:
    y = case.y.flatten(0, 1).clone()
    moe_expand(case.expected_down_h().to(y.dtype), case.down_b, case.weights.flatten(), route, y, **options)
    return y


def finalize(case: MoeCase, route: Route, scaling: float = 1.0, **options) -> torch.Tensor:
    out = torch.full_like(case.x, NAN)
    h = case.expected_down_h().to(out.dtype)
    moe_finalize(case.y, h, case.down_b, case.weights, case.topk_ids, route, out, scaling=scaling, **options)
    return out


def assert_close(got: torch.Tensor, expected: torch.Tensor, *, dtype: torch.dtype) -> None:
    """Where `expected` is defined; what is undefined or left unwritten is NaN in it."""
    defined = ~expected.isnan()
    assert defined.any()
    tolerance = 4 * max(torch.finfo(dtype).eps, 2**-19)  # float32 sums of 100 products are a few bits off
    torch.testing.assert_close(got[defined].double(), expected[defined], rtol=tolerance, atol=tolerance)


def without_adapters(case: MoeCase) -> MoeCase:
    return dataclasses.replace(case, row_slots=torch.full_like(case.row_slots, -1))


def without_delta(case: MoeCase) -> torch.Tensor:
    mask = torch.ones(case.topk_ids.numel(), dtype=torch.bool)
    mask[[pair for pair, *_ in case.with_delta()]] = False
    return mask


@pytest.fixture(params=CASES)
def case(request) -> MoeCase:
    return random_case(request.param)


@pytest.fixture(params=[16, 64])
def block_rows(request) -> int:
    return request.param


def test_shrink_is_float64(case, block_rows):
    route, dtype = case.route(block_rows), case.x.dtype
    assert_close(shrink_gate_up(case, route), case.expected_gate_up_h(), dtype=dtype)
    assert_close(shrink_down(case, route), case.expected_down_h(), dtype=dtype)


def test_activate_is_float64(case, block_rows):
    h = case.expected_gate_up_h().to(case.x.dtype)
    assert_close(activate(case, case.route(block_rows)), case.expected_activate(h), dtype=case.x.dtype)


def test_expand_is_float64(case, block_rows):
    h = case.expected_down_h().to(case.x.dtype)
    assert_close(expand(case, case.route(block_rows)), case.expected_expand(h), dtype=case.x.dtype)


@pytest.mark.parametrize("scaling", [1.0, 2.5])
def test_finalize_is_float64(case, scaling):
    h = case.expected_down_h().to(case.x.dtype)
    got = finalize(case, case.route(16), scaling)
    assert_close(got, case.expected_finalize(h, scaling), dtype=case.x.dtype)


@pytest.mark.parametrize("block_k", [32, 64, 128])
def test_shrink_in_more_and_longer_steps_than_k(block_k):
    case = random_case("several-ranks")  # K is 96 and 48
    route = case.route(16)
    got = shrink_gate_up(case, route, block_n=16, block_k=block_k)
    assert_close(got, case.expected_gate_up_h(), dtype=torch.float16)
    assert_close(shrink_down(case, route, block_k=block_k), case.expected_down_h(), dtype=torch.float16)


@pytest.mark.parametrize("block_n", [16, 32])
def test_columns_in_several_blocks(block_n):
    case = random_case("no-power-of-two")  # 40 and 72 columns
    route, dtype = case.route(16), case.x.dtype
    h = case.expected_gate_up_h().to(dtype)
    assert_close(activate(case, route, block_n=block_n), case.expected_activate(h), dtype=dtype)
    h = case.expected_down_h().to(dtype)
    assert_close(expand(case, route, block_n=block_n), case.expected_expand(h), dtype=dtype)
    assert_close(finalize(case, route, 0.5, block_n=block_n), case.expected_finalize(h, 0.5), dtype=dtype)


@pytest.mark.parametrize("name", ["several-ranks", "elsewhere", "shared-outer-fused-shared"])
def test_rows_without_delta_have_the_bits_of_a_batch_without_adapters(name, block_rows):
    case = random_case(name)
    case.gate_up[:, ::5] = case.y[..., ::5] = -0.0  # to which adding nothing is not the same as adding 0
    route, base_route = case.route(block_rows), without_adapters(case).route(block_rows)
    none = without_delta(case)
    assert none.any() and not none.all()
    for kernel in (activate, expand):
        got, base = kernel(case, route), kernel(case, base_route)
        assert torch.equal(got[none].view(torch.int16), base[none].view(torch.int16))  # bits: NaN is unwritten
        assert not torch.equal(got[~none], base[~none])
    assert torch.equal(base.view(torch.int16), case.y.flatten(0, 1).view(torch.int16))


def test_finalize_without_adapter_has_the_bits_of_the_sum_in_order():
    case = random_case("elsewhere")
    case.y *= 1 + torch.arange(case.y.shape[1])[:, None] * 300  # so that another order rounds otherwise
    none = without_delta(case).view(case.topk_ids.shape).all(1)
    assert none.any() and not none.all()
    total = torch.zeros(case.x.shape)
    for k in range(case.y.shape[1]):
        total += case.y[:, k].float()
    got = finalize(case, case.route(16), 1.7)
    assert torch.equal(got[none], (total * 1.7).half()[none])


def test_blocks_of_other_ranks_and_unused_blocks_write_nothing(block_rows):
    case = random_case("elsewhere")
    route = case.route(block_rows)
    away = case.topk_ids.flatten() < 0
    assert -1 in route.block_experts.tolist() and int(route.padded) // block_rows < route.blocks
    assert activate(case, route)[away].isnan().all()
    assert shrink_gate_up(case, route)[away].isnan().all()
    route = dataclasses.replace(route, padded=torch.zeros_like(route.padded))
    for kernel in (shrink_gate_up, shrink_down, activate):
        assert kernel(case, route).isnan().all()
    assert torch.equal(expand(case, route), case.y.flatten(0, 1))


def test_the_last_rows_of_an_unaligned_table_are_no_block():
    case = random_case("several-ranks")
    route = case.route(16)
    assert len(route.sorted_pairs) % 16 and route.blocks == len(route.block_experts) - 1


def test_one_adapters_infinities_stay_in_its_rows():
    case = random_case("several-ranks")
    bad = torch.zeros(case.topk_ids.numel(), dtype=torch.bool)
    bad[[pair for pair, slot, *_ in case.with_delta() if slot == 1]] = True
    for buffer in (case.gate_up_a, case.gate_up_b, case.down_a, case.down_b):
        buffer[1] = float("inf")
    route = case.route(64)
    defined = ~case.expected_down_h().isnan().all(1) & ~bad
    assert shrink_down(case, route)[defined, 0].isfinite().all()
    for kernel in (activate, expand):
        got = kernel(case, route)
        assert got[~bad].isfinite().all() and not got[bad].isfinite().all()


def test_strided_rows():
    case = random_case("several-ranks")
    route, dtype = case.route(16), case.x.dtype
    h = case.expected_gate_up_h().to(dtype)
    wide = {name: torch.cat([getattr(case, name)] * 2, 1) for name in ("x", "gate_up", "activated")}
    case = dataclasses.replace(case, **{k: v[:, : v.shape[1] // 2] for k, v in wide.items()})
    assert_close(shrink_gate_up(case, route), case.expected_gate_up_h(), dtype=dtype)
    assert_close(shrink_down(case, route), case.expected_down_h(), dtype=dtype)
    out = torch.full((route.pairs, 100), NAN, dtype=dtype)
    moe_activate(case.gate_up, torch.cat([h, h], 1)[:, : h.shape[1]], case.gate_up_b, route, out[:, 2:50])
    assert_close(out[:, 2:50], case.expected_activate(h), dtype=dtype)
    assert out[:, :2].isnan().all() and out[:, 50:].isnan().all()


def test_the_four_kernels_in_a_row():
    case = random_case("several-ranks")
    route = case.route(16)
    h = shrink_gate_up(case, route)
    moe_activate(case.gate_up, h, case.gate_up_b, route, case.activated)
    expected = case.expected_activate(case.expected_gate_up_h().half())
    torch.testing.assert_close(case.activated.double(), expected, rtol=4e-3, atol=1e-2)
    down = shrink_down(case, route)
    out = torch.empty_like(case.x)
    moe_finalize(case.y, down, case.down_b, case.weights, case.topk_ids, route, out, scaling=2.0)
    expected = case.expected_finalize(case.expected_down_h(), 2.0)
    torch.testing.assert_close(out.double(), expected, rtol=4e-3, atol=1e-2)


@pytest.mark.parametrize("tokens,top_k,experts,block_rows", [(1, 2, 8, 16), (24, 2, 3, 16), (40, 4, 9, 64)])
def test_alignment_has_each_pair_once_in_a_block_of_its_expert(tokens, top_k, experts, block_rows):
    topk_ids = torch.randint(-1, experts, (tokens, top_k), generator=torch.Generator().manual_seed(tokens))
    sorted_pairs, block_experts, padded = (table.tolist() for table in align(topk_ids, block_rows, experts))
    used, seen = padded[0] // block_rows, []
    assert used * block_rows == padded[0] <= len(sorted_pairs) and used <= len(block_experts)
    for block in range(used):
        rows = sorted_pairs[block * block_rows : (block + 1) * block_rows]
        pairs = [pair for pair in rows if pair < tokens * top_k]
        assert pairs and set(topk_ids.flatten()[pairs].tolist()) == {block_experts[block]}
        seen += pairs
    assert sorted(seen) == list(range(tokens * top_k))
