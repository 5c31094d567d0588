"""The dense sites' kernels at real layers' shapes, with the very settings that serve, against float64."""

from __future__ import annotations

import types

import pytest
import torch

from lora_fastpath import selfcheck
from lora_fastpath.gate import Path
from lora_fastpath.patches import dense
from lora_fastpath.streams import Lanes

pytestmark = pytest.mark.gpu

LAYERS = {  # K, widths of the slices
    "30b-qkv": (2048, (4096, 512, 512)),
    "30b-o": (4096, (2048,)),
    "8b-qkv": (4096, (4096, 1024, 1024)),
    "8b-o": (4096, (4096,)),
    "8b-gate-up": (4096, (12288, 12288)),
    "8b-down": (12288, (4096,)),
    "qkvz": (2048, (2048, 2048, 4096, 4096)),
    "fused-a": (7168, (1536, 576)),
}
BATCHES = (1, 2, 4, 5, 16, 64, 65, 256, 512, 513, 4097)


def add_delta(case: selfcheck.Case, two_streams: bool) -> torch.Tensor:
    lanes = Lanes(case.x.device)
    projection = dense.Projection("qkv", types.SimpleNamespace(lanes=lanes), case.a, case.b, case.ends, pdl=True)
    launch = dense.launch_for(len(case.x))
    tables = {size: case.tiles(size) for size in launch.tile_rows}
    y = case.y.clone()
    lane = lanes.current()
    if two_streams:
        lane.fork(dense.scratch_for(projection, launch, len(case.x)))
    dense.add_delta(projection, launch, tables, lane, case.x, y)
    torch.cuda.synchronize()
    assert not lane.arrivals.any()
    return y


def ends_of(widths: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sum(widths[: i + 1]) for i in range(len(widths)))


@pytest.mark.parametrize("rank", [8, 16, 64, 128])
@pytest.mark.parametrize("layer", LAYERS)
def test_delta_is_float64_lora(layer, rank):
    k, widths = LAYERS[layer]
    for rows in BATCHES:
        case = selfcheck.make_case(
            rows, k, ends_of(widths), (rank,), rank, torch.bfloat16, "cuda", seed=rows, none_every=3
        )
        assert not selfcheck.compare(add_delta(case, rows <= 256), case), f"{rows} rows"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("layer", ["30b-qkv", "8b-gate-up"])
def test_eight_adapters_of_mixed_rank(layer, dtype):
    k, widths = LAYERS[layer]
    ranks = (16, 8, 64, 1, 0, 33, 128, 4)
    for rows in BATCHES:
        case = selfcheck.make_case(rows, k, ends_of(widths), ranks, 128, dtype, "cuda", seed=rows)
        assert not selfcheck.compare(add_delta(case, rows <= 256), case), f"{rows} rows"


def test_same_input_gives_the_same_bits():
    """Split-K parts are added in order: neither the schedule nor the stream may show in the result."""
    k, widths = LAYERS["8b-down"]
    case = selfcheck.make_case(16, k, ends_of(widths), (16, 16, 16), 16, torch.bfloat16, "cuda")
    first = add_delta(case, True)
    for _ in range(200):
        assert torch.equal(add_delta(case, True), first)
    assert torch.equal(add_delta(case, False), first)


@pytest.mark.parametrize("replayed", [False, True], ids=["eager", "graph"])
def test_the_shrink_writes_no_memory_that_the_base_layer_still_reads(replayed):
    """A quantized base layer frees its codes as soon as its GEMM is queued, long before the GEMM has read them."""
    case = selfcheck.make_case(64, 4096, (4096,), (16, 8), 16, torch.bfloat16, "cuda")
    lanes = Lanes(case.x.device)
    adapter_map = types.SimpleNamespace(lanes=lanes, batch=None)
    projection = dense.Projection("column", adapter_map, case.a, case.b, case.ends, pdl=True)
    launch = dense.launch_for(64)
    tables = {size: case.tiles(size) for size in launch.tile_rows}
    adapter_map.batch = types.SimpleNamespace(path=Path.TWO_STREAMS, rows=64, launch=launch, tables=tables)
    layer = types.SimpleNamespace(lora_fastpath=projection)

    def sglang_forward(x):
        y = torch.empty_like(case.y)
        codes = case.y.clone()
        torch.cuda._sleep(2_000_000)  # about 1 ms: the shrink would be done before the base layer reads its codes
        torch.mul(codes, 1, out=y)
        del codes
        return dense.apply_lora(None, layer, (y, x), {})

    def run():
        return dense.forward(sglang_forward, layer, (case.x,), {})

    run()
    torch.cuda.synchronize()
    if replayed:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = run()
        graph.replay()
    else:
        y = run()
    torch.cuda.synchronize()
    assert not selfcheck.compare(y, case)
