"""The kernels around FlashInfer's expert GEMMs under Triton's interpreter (FP16: the interpreter has no bfloat16)."""

from __future__ import annotations

import os

import pytest
import sm100_layers as layers
import torch
import triton
import triton.language as tl

from lora_fastpath.kernels import fp4
from lora_fastpath.kernels.moe_sum import moe_sum
from lora_fastpath.kernels.sm100_activate import sm100_activate
from lora_fastpath.kernels.sm100_gather import sm100_gather
from lora_fastpath.moe_selfcheck import MoeCase, make_case

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="TRITON_INTERPRET=1 is not set")

NAN = float("nan")
CASES = {
    "one-adapter": {"ranks": (16,), "none_every": 0},
    "several-ranks": {"ranks": (16, 5, 0, 1)},
    "elsewhere": {"ranks": (16, 5, 0, 1), "away_every": 3},
    "fused-shared": {"ranks": (16, 5), "fused_shared": True},
    "one-token": {"ranks": (7,), "tokens": 1, "top_k": 1, "none_every": 0},
    "many-pairs": {"ranks": (16, 5), "tokens": 90, "top_k": 4},
    "wide": {"ranks": (16, 5), "tokens": 5, "intermediate": 384},
}
TILES = [8, 64, 128, 256]


def random_case(name: str) -> MoeCase:
    options = dict(
        tokens=24, top_k=2, experts=4, max_rank=16, hidden=64, intermediate=128, dtype=torch.float16, device="cpu"
    )
    return make_case(**options | CASES[name])


def permute(case: MoeCase, tile: int) -> tuple[torch.Tensor, int]:
    """Rows of pairs with each expert's padded to full tiles, -1 for experts on other ranks; and the rows in use."""
    ids, row = case.topk_ids.flatten(), 0
    permuted = torch.full_like(ids, -1)
    for expert in range(int(ids.max()) + 1):
        own = (ids == expert).nonzero().flatten()
        permuted[own] = row + torch.arange(len(own), dtype=torch.int32)
        row += -(-len(own) // tile) * tile
    return permuted, row


def delta_of(case: MoeCase, exact: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """The LoRA kernels' output: the deltas, and NaN in pairs that get none."""
    delta = torch.full_like(base, NAN)
    for pair, *_ in case.with_delta():
        delta[pair] = (exact - base.double())[pair].to(base.dtype)
    return delta


def with_delta(case: MoeCase, base: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    out = base.double()
    for pair, *_ in case.with_delta():
        out[pair] += delta[pair].double()
    return out


def activated(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, 1)
    return torch.nn.functional.silu(gate) * up


def nearest_e2m1(x: torch.Tensor) -> torch.Tensor:
    """Codes by distance alone, ties to the even one."""
    distance = (x.abs().double()[..., None] - layers.E2M1.double()).abs()
    tied = distance == distance.min(-1, keepdim=True).values
    even = tied & (torch.arange(8) % 2 == 0)
    code = torch.where(tied.sum(-1) > 1, even.int().argmax(-1), tied.int().argmax(-1))
    return code + 8 * torch.signbit(x).long()


def reference_fp4(x: torch.Tensor, global_scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed codes and scales' codes, uint8."""
    groups = x.view(len(x), -1, 16)
    scale = (global_scale * (groups.abs().amax(2) * torch.tensor(1 / 6))).clamp(max=448).to(torch.float8_e4m3fn)
    factor = torch.where(scale.float() > 0, global_scale / scale.float(), torch.zeros(()))
    codes = nearest_e2m1(groups * factor[..., None]).view(len(x), -1, 2)
    return (codes[..., 0] + 16 * codes[..., 1]).to(torch.uint8), scale.view(torch.uint8)


@triton.jit
def _codes(x_ptr, out_ptr, value_ptr, E4M3: tl.constexpr, SIZE: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    x = tl.load(x_ptr + at)
    if E4M3:
        code = fp4.e4m3_code(x)
        tl.store(value_ptr + at, fp4.e4m3_value(code))
    else:
        code = fp4.e2m1_code(x)
    tl.store(out_ptr + at, code)


def codes(x: torch.Tensor, e4m3: bool) -> tuple[torch.Tensor, torch.Tensor]:
    padded = torch.cat([x, torch.zeros(-len(x) % 4096)])
    out, values = torch.full(padded.shape, -7, dtype=torch.int32), torch.full_like(padded, NAN)
    _codes[(len(padded) // 4096,)](padded, out, values, e4m3, 4096)
    return out[: len(x)], values[: len(x)]


def around(points: torch.Tensor) -> torch.Tensor:
    """The numbers, the middles between neighbours, and what lies next to each of these."""
    points = torch.cat([points, (points[1:] + points[:-1]) / 2])
    up, down = torch.full_like(points, torch.inf), torch.full_like(points, 0.0)
    return torch.cat([points, points.nextafter(up), points.nextafter(down)])


def test_e4m3_codes_are_the_nearest():
    every = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    generator = torch.Generator().manual_seed(0)
    x = torch.cat([around(every), torch.rand(20000, generator=generator) * 500, torch.tensor([448.1, 464.0, 1e9])])
    x = torch.cat([x, 2.0 ** (torch.rand(20000, generator=generator) * 24 - 14)])
    wanted = x.clamp(max=448).to(torch.float8_e4m3fn)
    got, values = codes(x, True)
    assert torch.equal(got.to(torch.uint8), wanted.view(torch.uint8)) and (got < 127).all()
    assert torch.equal(values, wanted.float())


def test_e2m1_codes_are_the_nearest():
    x = torch.cat([around(layers.E2M1), torch.rand(20000, generator=torch.Generator().manual_seed(0)) * 8])
    x = torch.cat([x, -x, torch.tensor([7.0, 1e9, -1e9, 1e-30, -1e-30])])
    assert torch.equal(codes(x, False)[0].long(), nearest_e2m1(x))


@triton.jit
def _offsets(out_ptr, GROUPS: tl.constexpr, SPAN: tl.constexpr, PADDED: tl.constexpr):
    row, group = tl.program_id(0), tl.arange(0, PADDED)
    tl.store(out_ptr + row * GROUPS + group, fp4.scale_offset(row, group, GROUPS, SPAN), mask=group < GROUPS)


@pytest.mark.parametrize("groups", [4, 12, 32])
@pytest.mark.parametrize("tile", TILES)
def test_scales_lie_where_the_gemm_reads_them(tile, groups):
    out = torch.full((256, groups), -7)
    _offsets[(256,)](out, groups, fp4.span(tile), triton.next_power_of_2(groups))
    assert torch.equal(out, layers.scale_offsets(256, groups, tile))


@pytest.fixture(params=CASES)
def case(request) -> MoeCase:
    return random_case(request.param)


def no_rounding_tie(x: torch.Tensor) -> torch.Tensor:
    """Where the kernel's float32 value, a few bits off ours, cannot have another code (x in units of a code)."""
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    return ((x.abs()[..., None] - ties).abs() > 1e-4).all(-1)


@pytest.mark.parametrize("tile", TILES)
def test_fp8_activation(case, tile):
    permuted, used = permute(case, tile)
    pairs, width = case.gate_up.shape
    half, allocated, here = width // 2, used + 3 * tile, permuted >= 0
    generator = torch.Generator().manual_seed(0)
    gate_up = torch.zeros(allocated, width, dtype=torch.float8_e4m3fn)
    gate_up.view(torch.uint8).fill_(0x7F)  # NaN in rows of no pair
    scales = torch.full((width // 128 * allocated,), NAN)
    row_scales = torch.rand(pairs, width // 128, generator=generator) + 0.5
    scales[: width // 128 * used].view(-1, used)[:, permuted[here].long()] = row_scales[here].T
    base = (torch.randn(pairs, width, generator=generator) * 2).to(torch.float8_e4m3fn)  # up first
    gate_up.view(torch.uint8)[permuted[here].long()] = base[here].view(torch.uint8)
    value = (base.double().view(pairs, -1, 128) * row_scales.double()[..., None]).view(pairs, width)
    value = torch.cat([value[:, half:], value[:, :half]], 1)  # gate first, as the adapters
    delta = delta_of(case, case.expected_gate_up(), case.gate_up)
    wanted = activated(with_delta(case, value, delta))

    out = torch.full_like(case.activated, NAN)
    codes = torch.zeros(allocated, half, dtype=torch.float8_e4m3fn)
    codes.view(torch.uint8).fill_(0x55)
    code_scales = torch.full((half // 128 * allocated,), NAN)
    in_use = torch.tensor([used], dtype=torch.int32)
    sm100_activate(gate_up, scales, delta, permuted, in_use, case.routing(16), out, codes, code_scales)

    assert (out[~here] == 0).all()
    torch.testing.assert_close(out[here].double(), wanted[here], rtol=2e-3, atol=2e-3)
    got = code_scales[: half // 128 * used].view(-1, used).T
    largest = wanted[here].view(-1, half // 128, 128).abs().amax(2)
    torch.testing.assert_close(got[permuted[here].long()].double(), largest / 448, rtol=1e-5, atol=0)
    unused = torch.ones(allocated, dtype=torch.bool)
    unused[permuted[here].long()] = False
    assert (codes.view(torch.uint8)[unused] == 0x55).all() and got[unused[:used]].isnan().all()
    assert code_scales[half // 128 * used :].isnan().all()
    # The interpreter loses the carry where a code is rounded up to a power of two, and half a step of the smallest ones.
    code = codes[permuted[here].long()].double()
    exact = (wanted[here].view(-1, half // 128, 128) / (largest / 448)[..., None]).view(code.shape)
    powers = torch.frexp(exact.float().to(torch.float8_e4m3fn).float()).mantissa.abs() == 0.5
    torch.testing.assert_close(code[~powers], exact[~powers], rtol=2**-4 * 1.01, atol=2**-9)


def test_fp8_activation_without_a_delta():
    case = random_case("elsewhere")
    case.row_slots.fill_(-1)
    permuted, used = permute(case, 8)
    here, pairs = permuted >= 0, len(permuted)
    base = torch.randn(used, 256, generator=torch.Generator().manual_seed(0)).to(torch.float8_e4m3fn)
    base.view(torch.uint8)[3] = 0  # a row of zeros: the scale is the smallest normal number
    scales, in_use = torch.ones(2 * used), torch.tensor([used], dtype=torch.int32)
    codes, code_scales = torch.zeros(used, 128, dtype=torch.float8_e4m3fn), torch.full((used,), NAN)
    out = torch.full((pairs, 128), NAN, dtype=torch.float16)
    sm100_activate(base, scales, None, permuted, in_use, case.routing(16), out, codes, code_scales)
    up, gate = base.double().chunk(2, 1)
    wanted = (torch.nn.functional.silu(gate) * up)[permuted[here].long()]
    torch.testing.assert_close(out[here].double(), wanted, rtol=1e-3, atol=1e-3)
    assert code_scales[3] == torch.finfo(torch.float32).tiny and (codes[3].float() == 0).all()


@pytest.mark.parametrize("tile", TILES)
def test_fp4_activation(case, tile):
    permuted, used = permute(case, tile)
    pairs, width = case.gate_up.shape
    half, allocated, here = width // 2, (-(-used // 128) + 1) * 128, permuted >= 0
    gate_up = torch.full((allocated, width), NAN, dtype=torch.float16)
    gate, up = case.gate_up.chunk(2, 1)
    gate_up[permuted[here].long()] = torch.stack([up, gate], 2).view(pairs, width)[here]
    delta = delta_of(case, case.expected_gate_up(), case.gate_up)
    wanted = activated(with_delta(case, case.gate_up, delta))

    out = torch.full_like(case.activated, NAN)
    codes = torch.full((allocated, half // 2), 0x55, dtype=torch.uint8)
    code_scales = torch.full((allocated * half // 16,), 0x7F, dtype=torch.uint8)
    global_scale = torch.tensor([40.0])
    sm100_activate(gate_up, None, delta, permuted, None, case.routing(16), out, codes, code_scales, global_scale, tile)

    assert (out[~here] == 0).all()
    torch.testing.assert_close(out[here].double(), wanted[here], rtol=2e-3, atol=2e-3)
    rows = permuted[here].long()
    unused = torch.ones(allocated, dtype=torch.bool)
    unused[rows] = False
    scale_codes = code_scales[layers.scale_offsets(allocated, half // 16, tile)]
    assert (codes[unused] == 0x55).all() and (scale_codes[unused] == 0x7F).all()
    scale = scale_codes[rows].view(torch.float8_e4m3fn).double()
    groups = wanted[here].view(len(rows), -1, 16)
    torch.testing.assert_close(scale, 40.0 * groups.abs().amax(2) / 6, rtol=2**-4 * 1.01, atol=2**-9)
    # Given the scales, the codes are the nearest.
    exact = (groups * (40.0 / scale)[..., None]).float()
    exact = exact.nan_to_num(0.0).view(len(rows), half)
    nibbles = torch.stack([codes[rows] & 15, codes[rows] >> 4], 2).view(len(rows), half).long()
    clear = no_rounding_tie(exact)
    assert clear.float().mean() > 0.99
    assert torch.equal((nibbles & 7)[clear], (nearest_e2m1(exact) & 7)[clear])
    signed = clear & (exact.abs() > 0.3)
    assert torch.equal(nibbles[signed], nearest_e2m1(exact)[signed])


@triton.jit
def _quantize(x_ptr, codes_ptr, scales_ptr, global_scale, COLUMNS: tl.constexpr):
    row = tl.arange(0, 16)[:, None]
    x = tl.load(x_ptr + row * COLUMNS + tl.arange(0, COLUMNS)[None, :])
    codes, scales = fp4.quantize_fp4(x, global_scale)
    tl.store(codes_ptr + row * (COLUMNS // 2) + tl.arange(0, COLUMNS // 2)[None, :], codes)
    tl.store(scales_ptr + row * (COLUMNS // 16) + tl.arange(0, COLUMNS // 16)[None, :], scales)


@pytest.mark.parametrize("global_scale", [0.02, 1.0, 100.0, 448.0 * 6])
def test_fp4_codes_and_scales_are_a_references(global_scale):
    x = torch.randn(16, 256, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 3, 16)[:, None]
    x[0] = 0
    got, scales = torch.full((16, 128), -7), torch.full((16, 16), -7)
    _quantize[(1,)](x, got, scales, global_scale, 256)
    wanted, wanted_scales = reference_fp4(x, global_scale)
    assert torch.equal(scales.to(torch.uint8), wanted_scales) and torch.equal(got.to(torch.uint8), wanted)


@pytest.mark.parametrize("tile", TILES)
def test_rows_and_scales_are_gathered(case, tile):
    permuted, used = permute(case, tile)
    tokens, top_k = case.topk_ids.shape
    hidden, allocated, here = 2112, (-(-used // 128) + 1) * 128, permuted >= 0  # more than a block, no power of two
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(256, (tokens, hidden // 2), dtype=torch.uint8, generator=generator)
    scales = torch.randint(126, (tokens, hidden // 16), dtype=torch.uint8, generator=generator)
    rows = torch.full((allocated, hidden // 2), 0x55, dtype=torch.uint8)
    row_scales = torch.full((allocated * hidden // 16,), 0x7F, dtype=torch.uint8)
    wanted, wanted_scales = rows.clone(), row_scales.clone().view(allocated, -1)
    for pair, row in enumerate(permuted.tolist()):
        if row >= 0:
            wanted[row], wanted_scales[row] = x[pair // top_k], scales[pair // top_k]
    sm100_gather(x, scales, permuted, rows, row_scales, tile)
    assert torch.equal(rows, wanted)
    assert torch.equal(row_scales[layers.scale_offsets(allocated, hidden // 16, tile)], wanted_scales)
    assert here.any()


@pytest.mark.parametrize("weights_dtype", [torch.float32, torch.float16])
def test_sum_of_permuted_rows(case, weights_dtype):
    permuted, used = permute(case, 8)
    tokens, top_k, hidden = case.y.shape
    y = torch.full((used, hidden + 16), NAN, dtype=torch.float16)
    weights = case.weights.to(weights_dtype)
    wanted = torch.zeros(tokens, hidden, dtype=torch.float64)
    flat, delta = case.y.flatten(0, 1), torch.full_like(case.y, NAN).flatten(0, 1)
    exact = case.expected_y().flatten(0, 1)
    for pair, row in enumerate(permuted.tolist()):
        if row >= 0:
            y[row, :hidden] = flat[pair]
            wanted[pair // top_k] += weights.flatten()[pair].double() * flat[pair].double()
    base = wanted.clone()
    for pair, *_ in case.with_delta():
        delta[pair] = (exact[pair] - flat[pair].double()).half()
        wanted[pair // top_k] += delta[pair].double()
    for given, sums in ((delta.view(case.y.shape), wanted), (None, base)):
        out = torch.full_like(case.x, NAN)
        moe_sum(y, given, case.routing(16), 1.0, out, permuted.view(tokens, top_k), weights)
        torch.testing.assert_close(out.double(), sums, rtol=2e-3, atol=2e-3)
