"""The kernels around FlashInfer's expert GEMMs at real layers' widths against float64; rows as FlashInfer sorts them."""

from __future__ import annotations

import dataclasses

import pytest
import sm100_layers as layers
import torch

from lora_fastpath.kernels.moe_routing import Routing
from lora_fastpath.kernels.moe_sum import moe_sum
from lora_fastpath.kernels.sm100_activate import sm100_activate
from lora_fastpath.kernels.sm100_gather import sm100_gather

pytestmark = pytest.mark.gpu

BATCHES = [(1, 1, 8), (1, 8, 8), (7, 10, 8), (64, 8, 16), (700, 4, 64), (1024, 8, 128), (4096, 8, 256)]
"""Tokens, experts a token, rows of a tile."""
EXPERTS, NAN = 128, float("nan")


@dataclasses.dataclass
class Batch:
    ids: torch.Tensor  # [T, top_k], -1 for an expert on another rank
    permuted: torch.Tensor  # [P]
    used: int
    routing: Routing
    changed: torch.Tensor  # bool [P]: the pair gets a delta

    @property
    def here(self) -> torch.Tensor:
        return self.permuted >= 0

    @property
    def rows(self) -> torch.Tensor:
        return self.permuted[self.here].long()


def make_batch(tokens: int, top_k: int, tile: int) -> Batch:
    generator = torch.Generator("cuda").manual_seed(tokens)
    ids = torch.rand(tokens, EXPERTS, device="cuda", generator=generator).argsort(1)[:, :top_k].to(torch.int32)
    if tokens > 1:
        ids.view(-1)[4::5] = -1
    flat = ids.flatten().long()
    counts = torch.bincount(flat[flat >= 0], minlength=EXPERTS)
    padded = (counts + tile - 1) // tile * tile
    first_row, first_pair = padded.cumsum(0) - padded, counts.cumsum(0) - counts
    order = flat.masked_fill(flat < 0, EXPERTS).argsort(stable=True)[: int(counts.sum())]
    permuted = torch.full_like(flat, -1)
    place = torch.arange(len(order), device="cuda") - first_pair[flat[order]]
    permuted[order] = first_row[flat[order]] + place
    slots = (torch.arange(tokens, device="cuda") % 4 - 1).to(torch.int32)  # none, then three slots
    ranks = torch.tensor([16, 0, 8], dtype=torch.int32, device="cuda")
    nothing = ids.new_empty(0)
    routing = Routing(ids, slots, ranks, EXPERTS, nothing, nothing, nothing, 16)
    changed = ((slots == 0) | (slots == 2)).repeat_interleave(top_k) & (flat >= 0)
    return Batch(ids, permuted.to(torch.int32), int(padded.sum()), routing, changed)


def close(got: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(got.double(), wanted, rtol=2**-7, atol=2**-7)


def activated(gate: torch.Tensor, up: torch.Tensor, delta: torch.Tensor, changed: torch.Tensor) -> torch.Tensor:
    both = torch.cat([gate, up], 1).double()
    both[changed] += delta[changed].double()
    gate, up = both.chunk(2, 1)
    return torch.nn.functional.silu(gate) * up


@pytest.mark.parametrize("width", [256, 768, 2048])
@pytest.mark.parametrize(("tokens", "top_k", "tile"), BATCHES)
def test_fp8_activation(tokens, top_k, tile, width):
    batch = make_batch(tokens, top_k, tile)
    pairs, allocated, blocks = tokens * top_k, batch.used + 3 * tile, width // 128
    base = (torch.randn(pairs, 2 * width, device="cuda") * 2).to(torch.float8_e4m3fn)  # up first
    row_scales = torch.rand(pairs, 2 * blocks, device="cuda") + 0.5
    gate_up = torch.full((allocated, 2 * width), 0x7F, dtype=torch.uint8, device="cuda")
    gate_up[batch.rows] = base.view(torch.uint8)[batch.here]
    scales = torch.full((2 * blocks * allocated,), NAN, device="cuda")
    scales[: 2 * blocks * batch.used].view(-1, batch.used)[:, batch.rows] = row_scales[batch.here].T
    delta = torch.randn(pairs, 2 * width, device="cuda").to(torch.bfloat16)
    delta[~batch.changed] = NAN
    value = base.double() * row_scales.double().repeat_interleave(128, 1)
    wanted = activated(value[:, width:], value[:, :width], delta, batch.changed)

    out = torch.full((pairs, width), NAN, dtype=torch.bfloat16, device="cuda")
    codes = torch.full((allocated, width), 0x55, dtype=torch.uint8, device="cuda")
    code_scales = torch.full((blocks * allocated,), NAN, device="cuda")
    in_use = torch.tensor([batch.used], dtype=torch.int32, device="cuda")
    sm100_activate(
        gate_up.view(torch.float8_e4m3fn), scales, delta, batch.permuted, in_use, batch.routing, out,
        codes.view(torch.float8_e4m3fn), code_scales, fast_math=True, pdl=True,
    )  # fmt: skip

    assert (out[~batch.here] == 0).all()
    close(out[batch.here], wanted[batch.here])
    got = code_scales[: blocks * batch.used].view(-1, batch.used).T[batch.rows].double()
    largest = wanted[batch.here].view(-1, blocks, 128).abs().amax(2)
    torch.testing.assert_close(got, largest / 448, rtol=1e-4, atol=1e-37)
    value = codes[batch.rows].view(torch.float8_e4m3fn).double() * got.repeat_interleave(128, 1)
    error = (value - wanted[batch.here]).abs() / (largest.repeat_interleave(128, 1) / 448)
    assert (error <= (wanted[batch.here].abs() / (largest.repeat_interleave(128, 1) / 448) * 2**-4 + 2**-10) * 1.01).all()
    unused = torch.ones(allocated, dtype=torch.bool, device="cuda")
    unused[batch.rows] = False
    assert (codes[unused] == 0x55).all() and code_scales[blocks * batch.used :].isnan().all()


@pytest.mark.parametrize("width", [256, 768, 2048])
@pytest.mark.parametrize(("tokens", "top_k", "tile"), BATCHES)
def test_fp4_activation(tokens, top_k, tile, width):
    batch = make_batch(tokens, top_k, tile)
    pairs, allocated = tokens * top_k, -(-batch.used // 128) * 128 + 128
    gate, up = (torch.randn(pairs, width, device="cuda").to(torch.bfloat16) for _ in range(2))
    gate_up = torch.full((allocated, 2 * width), NAN, dtype=torch.bfloat16, device="cuda")
    gate_up[batch.rows] = torch.stack([up, gate], 2).flatten(1)[batch.here]
    delta = torch.randn(pairs, 2 * width, device="cuda").to(torch.bfloat16)
    delta[~batch.changed] = NAN
    wanted = activated(gate, up, delta, batch.changed)
    out = torch.full((pairs, width), NAN, dtype=torch.bfloat16, device="cuda")
    codes = torch.full((allocated, width // 2), 0x55, dtype=torch.uint8, device="cuda")
    code_scales = torch.full((allocated * width // 16,), 0x7F, dtype=torch.uint8, device="cuda")
    global_scale = torch.tensor([40.0], device="cuda")
    sm100_activate(
        gate_up, None, delta, batch.permuted, None, batch.routing, out, codes, code_scales, global_scale, tile,
        fast_math=True, pdl=True,
    )  # fmt: skip

    assert (out[~batch.here] == 0).all()
    close(out[batch.here], wanted[batch.here])
    groups = wanted[batch.here].view(-1, width // 16, 16)
    scale_codes = code_scales[layers.scale_offsets(allocated, width // 16, tile, "cuda")][batch.rows]
    exact = (40.0 * groups.abs().amax(2) / 6).clamp(max=448).float().to(torch.float8_e4m3fn)
    assert (scale_codes == exact.view(torch.uint8)).float().mean() > 0.999
    scale = scale_codes.view(torch.float8_e4m3fn).double()
    code = torch.stack([codes[batch.rows] & 15, codes[batch.rows] >> 4], -1).flatten(-2).long()
    values = layers.E2M1.double().cuda()
    given = (groups * (40.0 / scale)[..., None]).nan_to_num(0.0).view(len(code), width)
    nearest = (given.abs()[..., None] - values).abs().amin(-1)
    assert ((given.abs() - values[code & 7]).abs() <= nearest + 1e-3 * given.abs()).all()
    big = given.abs() > 0.3
    assert ((code >> 3).bool() == (given < 0))[big].all()
    unused = torch.ones(allocated, dtype=torch.bool, device="cuda")
    unused[batch.rows] = False
    assert (codes[unused] == 0x55).all()


@pytest.mark.parametrize(("tokens", "top_k", "tile"), BATCHES)
def test_gather(tokens, top_k, tile):
    batch, hidden = make_batch(tokens, top_k, tile), 7168
    allocated = -(-batch.used // 128) * 128 + 128
    x = torch.randint(256, (tokens, hidden // 2), dtype=torch.uint8, device="cuda")
    scales = torch.randint(126, (tokens, hidden // 16), dtype=torch.uint8, device="cuda")
    rows = torch.full((allocated, hidden // 2), 0x55, dtype=torch.uint8, device="cuda")
    row_scales = torch.full((allocated * hidden // 16,), 0x7F, dtype=torch.uint8, device="cuda")
    sm100_gather(x, scales, batch.permuted, rows, row_scales, tile, pdl=True)
    token = torch.arange(tokens * top_k, device="cuda")[batch.here] // top_k
    wanted, wanted_scales = torch.full_like(rows, 0x55), torch.full((allocated, hidden // 16), 0x7F, dtype=torch.uint8, device="cuda")
    wanted[batch.rows], wanted_scales[batch.rows] = x[token], scales[token]
    assert torch.equal(rows, wanted)
    assert torch.equal(row_scales[layers.scale_offsets(allocated, hidden // 16, tile, "cuda")], wanted_scales)


@pytest.mark.parametrize(("tokens", "top_k", "tile"), BATCHES)
def test_sum(tokens, top_k, tile):
    batch, hidden = make_batch(tokens, top_k, tile), 2048
    y = torch.full((batch.used, hidden), NAN, dtype=torch.bfloat16, device="cuda")
    y[batch.rows] = torch.randn(len(batch.rows), hidden, device="cuda").to(torch.bfloat16)
    weights = torch.rand(tokens, top_k, device="cuda")
    delta = torch.randn(tokens * top_k, hidden, device="cuda").to(torch.bfloat16)
    delta[~batch.changed] = NAN
    terms = torch.zeros(tokens * top_k, hidden, dtype=torch.float64, device="cuda")
    terms[batch.here] = weights.flatten()[batch.here].double()[:, None] * y[batch.rows].double()
    terms[batch.changed] += delta[batch.changed].double()
    out = torch.full((tokens, hidden), NAN, dtype=torch.bfloat16, device="cuda")
    shape = (tokens, top_k)
    moe_sum(y, delta.view(*shape, hidden), batch.routing, 1.0, out, batch.permuted.view(shape), weights, pdl=True)
    close(out, terms.view(*shape, hidden).sum(1))


@pytest.mark.parametrize("fp8", [False, True], ids=["fp4", "fp8"])
def test_replay_follows_the_batch(fp8):
    """One graph, other routing and another number of rows in use."""
    width, tokens, top_k, most = 256, 16, 8, 4096
    kind = torch.float8_e4m3fn if fp8 else torch.bfloat16
    first, other = make_batch(tokens, top_k, 8), make_batch(tokens, top_k, 16)
    gate_up = torch.randn(most, 2 * width, device="cuda").to(kind)
    scales = torch.rand(2 * width // 128 * most, device="cuda") if fp8 else None
    delta = torch.randn(tokens * top_k, 2 * width, device="cuda").to(torch.bfloat16)
    permuted, in_use = first.permuted.clone(), torch.tensor([first.used], dtype=torch.int32, device="cuda")
    global_scale = None if fp8 else torch.ones(1, device="cuda")

    def launch() -> list[torch.Tensor]:
        out = torch.zeros(tokens * top_k, width, dtype=torch.bfloat16, device="cuda")
        codes = torch.zeros(most, width if fp8 else width // 2, dtype=torch.uint8, device="cuda")
        code_scales = torch.zeros(most * width // (128 if fp8 else 16), dtype=torch.float32 if fp8 else torch.uint8, device="cuda")
        typed = codes.view(torch.float8_e4m3fn) if fp8 else codes
        sm100_activate(
            gate_up, scales, delta, permuted, in_use if fp8 else None, first.routing, out, typed, code_scales, global_scale,
            fast_math=True, pdl=True,
        )  # fmt: skip
        return [out, codes, code_scales]

    launch()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = launch()
    for batch in (first, other):
        permuted.copy_(batch.permuted)
        in_use.fill_(batch.used)
        graph.replay()
        for got, wanted in zip(captured, launch()):
            assert torch.equal(got, wanted)
