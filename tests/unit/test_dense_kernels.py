"""The dense kernels under Triton's interpreter against float64 (FP16: the interpreter has no bfloat16)."""

from __future__ import annotations

import os
import types

import numpy as np
import pytest
import torch

from lora_fastpath.gate import Path
from lora_fastpath.kernels import tiles as tiling
from lora_fastpath.kernels.expand import expand
from lora_fastpath.kernels.shrink import shrink
from lora_fastpath.patches import dense
from lora_fastpath.selfcheck import Case, make_case
from lora_fastpath.streams import Lanes

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="TRITON_INTERPRET=1 is not set")


def random_case(rows, k, widths, ranks, **options) -> Case:
    ends = tuple(int(end) for end in np.cumsum(widths))
    return make_case(rows, k, ends, ranks, max(ranks) or 1, torch.float16, "cpu", **options)


def delta_added(case, rows, split_k, block_n=16, block_k=64):
    tiles = case.tiles(rows)
    n = case.a.shape[1]
    h = torch.full((len(case.x), n), float("nan"), dtype=case.x.dtype)
    parts = torch.full((split_k, *h.shape), float("nan")) if split_k > 1 else None
    arrivals = torch.zeros(len(tiles) * n, dtype=torch.int32)
    shrink(case.x, case.a, tiles, h, parts, arrivals, slices=len(case.ends), block_k=block_k)
    assert not arrivals.any()
    expand(h, case.b, tiles, case.y, ends=case.ends, block_n=block_n)
    return case.y


@pytest.mark.parametrize("rows", [1, 16])
@pytest.mark.parametrize(
    "widths", [(48,), (32, 32), (40, 8, 8), (16, 24, 8, 40)], ids=["one", "merged", "qkv", "four-slices"]
)
def test_delta_is_float64_lora(rows, widths):
    case = random_case(11, 96, widths, ranks=(4, 16, 1, 0))
    expected = case.expected()
    torch.testing.assert_close(delta_added(case, rows, 2).double(), expected, rtol=2e-3, atol=4e-3)


@pytest.mark.parametrize("rows", [1, 16])
def test_rows_without_adapter_keep_every_bit(rows):
    case = random_case(9, 64, (32, 16), ranks=(8, 3), none_every=2)
    before = case.y.clone()
    out = delta_added(case, rows, 1)
    none = torch.from_numpy(case.row_slots == tiling.NO_ADAPTER)
    assert none.sum() >= 4
    assert torch.equal(out[none], before[none])
    assert not torch.equal(out[~none], before[~none])


def test_batch_without_any_adapter_is_untouched():
    case = random_case(5, 64, (32,), ranks=(0, 0))
    before = case.y.clone()
    assert torch.equal(delta_added(case, 16, 2), before)


def test_columns_past_the_last_slice_stay():
    case = random_case(6, 64, (24, 8), ranks=(8,), none_every=0)
    wide = torch.cat([case.y, torch.ones(6, 5, dtype=case.y.dtype)], 1)
    case.y = wide.clone()
    out = delta_added(case, 16, 1)
    assert torch.equal(out[:, 32:], wide[:, 32:])


@pytest.mark.parametrize("rows", [1, 16])
def test_strided_input_and_output(rows):
    case = random_case(7, 64, (32,), ranks=(8, 8), none_every=0)
    expected = case.expected()
    case.x = torch.cat([case.x, case.x], 1)[:, :64]
    case.y = torch.cat([case.y, case.y], 1)[:, :32]
    torch.testing.assert_close(delta_added(case, rows, 2, block_k=32).double(), expected, rtol=2e-3, atol=4e-3)


def test_ranks_up_to_128_in_one_batch():
    case = random_case(8, 160, (48, 16), ranks=(128, 1, 16, 77), none_every=0)
    expected = case.expected()
    torch.testing.assert_close(delta_added(case, 16, 3, block_k=32).double(), expected, rtol=2e-3, atol=8e-3)


@pytest.mark.parametrize("tokens,slots,rows", [(1, 1, 1), (40, 3, 16), (200, 9, 64), (5, 9, 16), (512, 33, 16)])
def test_tiles_cover_each_row_with_an_adapter_once(tokens, slots, rows):
    rng = np.random.default_rng(tokens)
    for _ in range(20):
        token_slots = rng.integers(-1, rng.integers(1, slots + 1), tokens).astype(np.int32)
        ranks = rng.integers(1, 64, slots).astype(np.int32)
        scalings = rng.uniform(0.1, 4, slots).astype(np.float32)
        table = np.empty((tiling.max_tiles(tokens, slots, rows), tiling.HEADER + rows), np.int32)
        used = tiling.build_tiles(token_slots, ranks, scalings, rows, table)
        seen = []
        for line in table[:used]:
            live = line[tiling.HEADER :][line[tiling.HEADER :] >= 0]
            assert line[3] == used and (token_slots[live] == line[0]).all()
            assert line[1] == ranks[line[0]] and line[2:3].view(np.float32)[0] == scalings[line[0]]
            seen += live.tolist()
        assert sorted(seen) == np.flatnonzero(token_slots >= 0).tolist()
        assert (table[used:] == tiling.NO_ADAPTER).all()


def test_too_small_a_table_is_an_error():
    table = np.empty((1, tiling.HEADER + 1), np.int32)
    with pytest.raises(ValueError, match="need 2 tiles, the table holds 1"):
        tiling.build_tiles(np.zeros(2, np.int32), np.ones(1, np.int32), np.ones(1, np.float32), 1, table)


def test_scratch_is_allocated_before_the_base_layer_runs():
    """What is allocated after it may be memory that the base layer has freed and its queued kernels still read."""
    case = random_case(5, 1100, (32,), ranks=(8,))
    adapter_map = types.SimpleNamespace(lanes=Lanes(torch.device("cpu")), announced=lambda x: None)
    projection = dense.Projection("column", adapter_map, case.a, case.b, case.ends, pdl=False)
    launch = dense.launch_for(5)
    tables = {size: case.tiles(size) for size in launch.tile_rows}
    adapter_map.batch = types.SimpleNamespace(path=Path.TWO_STREAMS, rows=5, launch=launch, tables=tables)
    layer = types.SimpleNamespace(lora_fastpath=projection)
    lane = adapter_map.lanes.current()
    written = []

    def sglang_forward(x):
        written.extend(lane.scratch)
        for tensor in written:
            tensor.fill_(torch.nan)
        return dense.apply_lora(None, layer, (case.y, x), {})

    expected = case.expected()
    y = dense.forward(sglang_forward, layer, (case.x,), {})
    torch.testing.assert_close(y.double(), expected, rtol=2e-3, atol=4e-3)
    assert len(written) == 2 and not any(tensor.isnan().all() for tensor in written)
    assert lane.scratch == ()
