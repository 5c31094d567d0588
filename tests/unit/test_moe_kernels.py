"""The mixture-of-experts kernels under Triton's interpreter against float64 (FP16: the interpreter has no bfloat16)."""

from __future__ import annotations

import dataclasses
import os

import pytest
import torch

from lora_fastpath.kernels.moe_activate import moe_activate
from lora_fastpath.kernels.moe_delta import moe_delta
from lora_fastpath.kernels.moe_prepare import moe_prepare
from lora_fastpath.kernels.moe_sum import moe_sum
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


def gate_up_delta(case: MoeCase, block_rows: int = 16, out: torch.Tensor | None = None, **options) -> torch.Tensor:
    """gate_up with its deltas added, or what was written to `out`."""
    add = out is None
    out = case.gate_up.clone() if add else out
    routing = case.routing(options.pop("block_size", block_rows))
    options |= {"add": add, "block_rows": block_rows}
    moe_delta(case.x, case.gate_up_a, case.gate_up_b, None, routing, out, **options)
    return out


def down_delta(case: MoeCase, block_rows: int = 16, out: torch.Tensor | None = None, **options) -> torch.Tensor:
    """y [P, H] with its deltas added, or what was written to `out`."""
    add = out is None
    out = case.y.flatten(0, 1).clone() if add else out
    routing = case.routing(options.pop("block_size", block_rows))
    options |= {"add": add, "block_rows": block_rows}
    moe_delta(case.activated, case.down_a, case.down_b, case.weights, routing, out, **options)
    return out


def unwritten(like: torch.Tensor) -> torch.Tensor:
    return torch.full_like(like, NAN)


def activate(case: MoeCase, delta: torch.Tensor | None) -> torch.Tensor:
    out = unwritten(case.activated)
    moe_activate(case.gate_up, delta, case.routing(16), out)
    return out


def summed(case: MoeCase, delta: torch.Tensor, scaling: float = 1.0) -> torch.Tensor:
    out = unwritten(case.x)
    moe_sum(case.y, delta.view(case.y.shape), case.routing(16), scaling, out)
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


def test_deltas_are_added(case, block_rows):
    dtype = case.x.dtype
    assert_close(gate_up_delta(case, block_rows), case.expected_gate_up(), dtype=dtype)
    assert_close(down_delta(case, block_rows), case.expected_y().flatten(0, 1), dtype=dtype)


def test_deltas_are_written_for_the_pairs_that_get_one_alone(case, block_rows):
    none, dtype = without_delta(case), case.x.dtype
    got = gate_up_delta(case, block_rows, out=unwritten(case.gate_up))
    assert got[none].isnan().all()
    assert_close(got[~none], (case.expected_gate_up() - case.gate_up.double())[~none], dtype=dtype)
    y = case.y.flatten(0, 1)
    got = down_delta(case, block_rows, out=unwritten(y))
    assert got[none].isnan().all()
    assert_close(got[~none], (case.expected_y().flatten(0, 1) - y.double())[~none], dtype=dtype)


def test_activation_and_sum_are_float64(case):
    gate_up, y = unwritten(case.gate_up), unwritten(case.y.flatten(0, 1))
    got = activate(case, gate_up_delta(case, out=gate_up))
    assert_close(got, case.expected_activated(), dtype=case.x.dtype)
    for scaling in (1.0, 2.5):
        got = summed(case, down_delta(case, out=y), scaling)
        assert_close(got, scaling * case.expected_y().sum(1), dtype=case.x.dtype)


def test_activation_without_a_delta_is_the_base_layers():
    case = without_adapters(random_case("elsewhere"))
    assert_close(activate(case, None), case.expected_activated(), dtype=case.x.dtype)


@pytest.mark.parametrize("block_n", [16, 32])
@pytest.mark.parametrize("block_k", [32, 64, 128])
def test_more_and_longer_steps_than_columns(block_k, block_n):
    case = random_case("no-power-of-two")  # K is 72 and 40, N is 40 and 72
    sizes = dict(block_k=block_k, block_n=block_n)
    assert_close(gate_up_delta(case, **sizes), case.expected_gate_up(), dtype=torch.float16)
    assert_close(down_delta(case, **sizes), case.expected_y().flatten(0, 1), dtype=torch.float16)


def test_a_block_takes_a_part_of_the_base_layers():
    case = make_case(90, 2, 3, (16, 5, 0, 1), 16, 96, 48, torch.float16, "cpu")
    assert_close(gate_up_delta(case, block_size=64), case.expected_gate_up(), dtype=torch.float16)
    assert_close(down_delta(case, 32, block_size=128), case.expected_y().flatten(0, 1), dtype=torch.float16)


def test_more_adapters_in_a_block_than_blocks_that_share_them():
    case = make_case(33, 2, 2, tuple(range(1, 17)), 16, 32, 16, torch.float16, "cpu", none_every=5)
    assert_close(gate_up_delta(case, 64), case.expected_gate_up(), dtype=torch.float16)
    assert_close(down_delta(case, 64), case.expected_y().flatten(0, 1), dtype=torch.float16)


@pytest.mark.parametrize("name", ["several-ranks", "elsewhere", "shared-outer-fused-shared"])
def test_rows_without_delta_have_the_bits_of_a_batch_without_adapters(name, block_rows):
    case = random_case(name)
    case.gate_up[:, ::5] = case.y[..., ::5] = -0.0  # to which adding nothing is not the same as adding 0
    base, none = without_adapters(case), without_delta(case)
    assert none.any() and not none.all()
    got = gate_up_delta(case, block_rows), down_delta(case, block_rows)
    for out, before in zip(got, (case.gate_up, case.y.flatten(0, 1))):
        assert torch.equal(out[none].view(torch.int16), before[none].view(torch.int16))
        assert not torch.equal(out[~none], before[~none])
    delta = gate_up_delta(case, block_rows, out=unwritten(case.gate_up))
    got, wanted = activate(case, delta), activate(base, delta)
    assert torch.equal(got[none].view(torch.int16), wanted[none].view(torch.int16))  # bits: NaN is unwritten
    assert not torch.equal(got[~none], wanted[~none])
    delta = down_delta(case, block_rows, out=unwritten(case.y.flatten(0, 1)))
    got, wanted, none = summed(case, delta), summed(base, delta), none.view(case.topk_ids.shape).all(1)
    assert torch.equal(got[none].view(torch.int16), wanted[none].view(torch.int16))
    assert not torch.equal(got[~none], wanted[~none])


def test_activation_leaves_pairs_of_other_ranks_unwritten():
    case = random_case("elsewhere")
    away = case.topk_ids.flatten() < 0
    got = activate(case, gate_up_delta(case, out=unwritten(case.gate_up)))
    assert away.any() and got[away].isnan().all() and not got[~away].isnan().any()


def test_one_adapters_infinities_stay_in_its_rows():
    case = random_case("several-ranks")
    bad = torch.zeros(case.topk_ids.numel(), dtype=torch.bool)
    bad[[pair for pair, slot, *_ in case.with_delta() if slot == 1]] = True
    for buffer in (case.gate_up_a, case.gate_up_b, case.down_a, case.down_b):
        buffer[1] = float("inf")
    for got in (gate_up_delta(case, 64), down_delta(case, 64)):
        assert got[~bad].isfinite().all() and not got[bad].isfinite().any()


def test_strided_rows():
    case = random_case("several-ranks")
    wide = {name: torch.cat([getattr(case, name)] * 2, 1) for name in ("x", "gate_up", "activated")}
    case = dataclasses.replace(case, **{k: v[:, : v.shape[1] // 2] for k, v in wide.items()})
    out = torch.full((case.topk_ids.numel(), 100), NAN, dtype=case.x.dtype)
    gate_up_delta(case, out=out[:, 2:98])
    delta = out[:, 2:98].contiguous()
    assert out[:, :2].isnan().all() and out[:, 98:].isnan().all()
    out = torch.full((case.topk_ids.numel(), 100), NAN, dtype=case.x.dtype)
    moe_activate(case.gate_up, delta, case.routing(16), out[:, 2:50])
    assert_close(out[:, 2:50], case.expected_activated(), dtype=case.x.dtype)
    assert out[:, :2].isnan().all() and out[:, 50:].isnan().all()
    assert_close(down_delta(case), case.expected_y().flatten(0, 1), dtype=case.x.dtype)


def test_a_batch_without_adapters_changes_nothing():
    case = without_adapters(random_case("several-ranks"))
    assert torch.equal(gate_up_delta(case), case.gate_up)
    assert down_delta(case, out=unwritten(case.y.flatten(0, 1))).isnan().all()


@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize(("tokens", "top_k", "experts"), [(1, 1, 3), (5, 3, 4), (31, 8, 128), (32, 8, 8), (90, 2, 3)])
def test_preparation_sorts_pairs_by_expert(tokens, top_k, experts, block_size):
    away = 4 if tokens > 1 else 0
    case = make_case(tokens, top_k, experts, (4,), 4, 32, 16, torch.float16, "cpu", away_every=away)
    wanted, pairs = case.routing(block_size), tokens * top_k
    places = pairs + (experts + 1) * (block_size - 1)
    tables = [torch.full((size,), -7, dtype=torch.int32) for size in (places, -(-places // block_size), 1)]
    moe_prepare(case.x, case.topk_ids, experts, *tables, block_size)
    used = int(wanted.padded)
    assert int(tables[2]) == used
    assert torch.equal(tables[0][:used], wanted.sorted_pairs[:used]) and (tables[0][used:] == pairs).all()
    assert torch.equal(tables[1][: used // block_size], wanted.block_experts[: used // block_size])


def assert_codes(codes: torch.Tensor, scales: torch.Tensor, x: torch.Tensor) -> None:
    """x [T, K] as codes and scales. The interpreter loses the carry where a code is rounded up to a power of two."""
    x = x.float().view(*scales.shape, 128)
    torch.testing.assert_close(scales, x.abs().amax(2) / 448, rtol=1e-6, atol=0)
    wanted = (x * (448 / x.abs().amax(2, keepdim=True))).to(torch.float8_e4m3fn).float()
    got, powers = codes.float().view(wanted.shape), torch.frexp(wanted).mantissa.abs() == 0.5
    torch.testing.assert_close(got[~powers], wanted[~powers], rtol=2**-3, atol=2**-9)  # a neighbour, on ties
    assert (got == wanted)[~powers].float().mean() > 0.999 and powers.float().mean() < 0.3


def test_preparation_quantizes_x():
    case = make_case(7, 2, 3, (4,), 4, 384, 16, torch.float16, "cpu")
    tables = [torch.empty(size, dtype=torch.int32) for size in (200, 20, 1)]
    codes, scales = torch.zeros(7, 384, dtype=torch.float8_e4m3fn), torch.full((7, 3), NAN)
    moe_prepare(case.x, case.topk_ids, 3, *tables, 16, codes, scales)
    assert_codes(codes, scales, case.x)


@pytest.mark.parametrize("tokens", [5, 140])  # rows one by one, and by eights
def test_activation_quantizes_what_it_writes(tokens):
    case = make_case(tokens, 2, 3, (4,), 4, 32, 384, torch.float16, "cpu", away_every=3)
    out = unwritten(case.activated)
    codes, scales = torch.zeros(out.shape, dtype=torch.float8_e4m3fn), torch.full((len(out), 3), NAN)
    moe_activate(case.gate_up, None, case.routing(16), out, codes, scales)
    away = case.topk_ids.flatten() < 0
    assert away.any() and scales[away].isnan().all()
    assert_codes(codes[~away], scales[~away], out[~away])
    assert torch.equal(out[~away], activate(case, None)[~away])
