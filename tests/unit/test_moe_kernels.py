"""The mixture-of-experts kernels under Triton's interpreter against float64 (FP16: the interpreter has no bfloat16)."""

from __future__ import annotations

import dataclasses
import os

import pytest
import torch

from lora_fastpath.kernels.moe_activate import moe_activate
from lora_fastpath.kernels.moe_expand import moe_expand
from lora_fastpath.kernels.moe_route import Route
from lora_fastpath.kernels.moe_shrink import moe_shrink
from lora_fastpath.moe_selfcheck import MoeCase, make_case

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
    "float32": SEVERAL | {"dtype": torch.float32, "top_k": 3},
}


def random_case(name: str) -> MoeCase:
    options = dict(
        tokens=24, top_k=2, experts=3, max_rank=16, hidden=96, intermediate=48, dtype=torch.float16, device="cpu"
    )
    return make_case(**options | CASES[name])


def shrink_gate_up(case: MoeCase, route: Route, split_k: int = 1, **options) -> torch.Tensor:
    h = torch.full((split_k, route.pairs, case.gate_up_a.shape[2]), NAN)
    moe_shrink(case.x, case.gate_up_a, route, h, slices=2, **options)
    return h.sum(0)


def shrink_down(case: MoeCase, route: Route, split_k: int = 1, **options) -> torch.Tensor:
    h = torch.full((split_k, route.pairs, case.down_a.shape[2]), NAN)
    moe_shrink(case.activated, case.down_a, route, h, slices=1, **options)
    return h.sum(0)


def parts(h: torch.Tensor) -> torch.Tensor:
    """h as a shrink leaves it, in two parts."""
    return torch.stack([h.float() * 0.75, h.float() * 0.25])


def activate(case: MoeCase, route: Route, **options) -> torch.Tensor:
    out = torch.full_like(case.activated, NAN)
    h = parts(case.expected_gate_up_h().to(out.dtype))
    moe_activate(case.gate_up, h, case.gate_up_b, route, out, **options)
    return out


def expand(case: MoeCase, route: Route, **options) -> torch.Tensor:
    y = case.y.flatten(0, 1).clone()
    h = parts(case.expected_down_h().to(y.dtype))
    moe_expand(h, case.down_b, case.weights.flatten(), route, y, **options)
    return y


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


@pytest.mark.parametrize("split_k", [1, 2, 3])
@pytest.mark.parametrize("block_k", [32, 64, 128])
def test_shrink_in_more_and_longer_steps_than_k(block_k, split_k):
    case = random_case("several-ranks")  # K is 96 and 48
    route = case.route(16)
    got = shrink_gate_up(case, route, split_k, block_n=16, block_k=block_k)
    assert_close(got, case.expected_gate_up_h(), dtype=torch.float16)
    assert_close(shrink_down(case, route, split_k, block_k=block_k), case.expected_down_h(), dtype=torch.float16)


@pytest.mark.parametrize("block_n", [16, 32])
def test_columns_in_several_blocks(block_n):
    case = random_case("no-power-of-two")  # 40 and 72 columns
    route, dtype = case.route(16), case.x.dtype
    h = case.expected_gate_up_h().to(dtype)
    assert_close(activate(case, route, block_n=block_n), case.expected_activate(h), dtype=dtype)
    h = case.expected_down_h().to(dtype)
    assert_close(expand(case, route, block_n=block_n), case.expected_expand(h), dtype=dtype)


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


def test_pairs_without_delta_and_of_other_ranks_are_left_unwritten():
    case = random_case("elsewhere")
    route = case.route(16)
    away, none = case.topk_ids.flatten() < 0, without_delta(case)
    assert away.any() and (none & ~away).any()
    assert shrink_gate_up(case, route)[none].isnan().all() and shrink_down(case, route)[none].isnan().all()
    got = activate(case, route)
    assert got[away].isnan().all() and not got[~away].isnan().any()


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
    h = parts(h)
    wide = {name: torch.cat([getattr(case, name)] * 2, 1) for name in ("x", "gate_up", "activated")}
    case = dataclasses.replace(case, **{k: v[:, : v.shape[1] // 2] for k, v in wide.items()})
    assert_close(shrink_gate_up(case, route), case.expected_gate_up_h(), dtype=dtype)
    assert_close(shrink_down(case, route), case.expected_down_h(), dtype=dtype)
    out = torch.full((route.pairs, 100), NAN, dtype=dtype)
    moe_activate(case.gate_up, h, case.gate_up_b, route, out[:, 2:50])
    assert_close(out[:, 2:50], case.expected_activate(case.expected_gate_up_h().to(dtype)), dtype=dtype)
    assert out[:, :2].isnan().all() and out[:, 50:].isnan().all()


def test_the_kernels_in_a_row():
    case = random_case("several-ranks")
    route = case.route(16)
    h = shrink_gate_up(case, route)[None]
    moe_activate(case.gate_up, h, case.gate_up_b, route, case.activated)
    expected = case.expected_activate(case.expected_gate_up_h().half())
    torch.testing.assert_close(case.activated.double(), expected, rtol=4e-3, atol=1e-2)
    y = case.y.flatten(0, 1).clone()
    moe_expand(shrink_down(case, route)[None], case.down_b, case.weights, route, y)
    expected = case.expected_expand(case.expected_down_h())
    torch.testing.assert_close(y.double(), expected, rtol=4e-3, atol=1e-2)


def groups_of(route: Route) -> list[tuple[int, int, int, list[int]]]:
    """(slot, expert, rank, pairs) of each tile in use."""
    used = int(route.tiles[0, 3])
    return [(*line[:3], [p for p in line[4:] if p != -1]) for line in route.tiles[:used].tolist()]


@pytest.mark.parametrize("block_rows", [16, 64])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("tokens", [None, 90])
def test_route_has_each_pair_with_a_delta_once_among_its_own(name, block_rows, tokens):
    options = dict(top_k=2, experts=3, max_rank=16, hidden=16, intermediate=16, dtype=torch.float16, device="cpu")
    case = make_case(**options | {"tokens": 24} | CASES[name] | ({"tokens": tokens} if tokens else {}))
    route = case.route(block_rows)
    expected = {pair: (slot, expert, rank) for pair, slot, expert, rank in case.with_delta()}
    found = {}
    for slot, expert, rank, pairs in groups_of(route):
        assert 1 <= len(pairs) <= block_rows
        assert not found.keys() & pairs, "a pair is in two tiles"
        found |= {pair: (slot, expert, rank) for pair in pairs}
    assert found == expected
    full = [len(pairs) for _, _, _, pairs in groups_of(route)]
    groups = {(slot, expert) for slot, expert, _, _ in groups_of(route)}
    assert sum(size < block_rows for size in full) <= len(groups), "more partial tiles than groups"


def test_route_takes_more_pairs_than_a_chunk_and_a_second_batch():
    case = random_case("one-adapter")
    for tokens, seed in ((1500, 0), (3, 1)):  # 3,000 pairs
        case.topk_ids = torch.randint(-1, 4, (tokens, 2), generator=torch.Generator().manual_seed(seed)).int()
        case.row_slots = torch.where(torch.arange(tokens) % 5 == 0, -1, 0).int()
        route = case.route(16)
        found = sorted(pair for *_, pairs in groups_of(route) for pair in pairs)
        assert found == [pair for pair, *_ in case.with_delta()]


def test_route_of_a_batch_without_adapters_has_no_tile():
    case = without_adapters(random_case("several-ranks"))
    assert groups_of(case.route(16)) == []


def test_one_table_holds_the_worst_mix():
    """Every pair in a group of its own."""
    case = random_case("one-adapter")
    case.experts, case.slot_ranks = 8, torch.ones(4, dtype=torch.int32)
    case.topk_ids = torch.arange(16, dtype=torch.int32).view(8, 2) % 8
    case.row_slots = torch.arange(8, dtype=torch.int32) // 2
    route = case.route(16)
    assert int(route.tiles[0, 3]) == len(route.tiles) == 16
