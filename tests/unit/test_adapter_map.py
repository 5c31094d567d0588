"""The tables that the kernels read, against a manager that has only what they are made from."""

from __future__ import annotations

import types

import numpy as np
import pytest
import torch

from lora_fastpath import settings, stock
from lora_fastpath.gate import Path
from lora_fastpath.kernels import tiles as tiling
from lora_fastpath.patches import adapters, dense

RANKS = {"a": 8, "b": 16, "zero": 0}


class Mode:
    def __init__(self, name: str) -> None:
        self.name = name

    def is_decode(self) -> bool:
        return self.name == "decode"

    def is_extend(self) -> bool:
        return self.name == "extend"

    def is_target_verify(self) -> bool:
        return self.name == "verify"

    def is_idle(self) -> bool:
        return self.name == "idle"

    def is_cuda_graph(self) -> bool:
        return self.name in ("decode", "verify")


def batch_of(uids, mode="decode", lengths=None, draft=0):
    return types.SimpleNamespace(
        forward_mode=Mode(mode), batch_size=len(uids), lora_ids=uids, extend_seq_lens_cpu=lengths,
        spec_info=types.SimpleNamespace(draft_token_num=draft),
    )  # fmt: skip


@pytest.fixture
def manager(monkeypatch):
    slots = {"a": 2, "b": 0, "zero": 1, None: 3}
    loras = {
        name: types.SimpleNamespace(config=types.SimpleNamespace(r=rank), scaling=rank / 4)
        for name, rank in RANKS.items()
    }
    pool = types.SimpleNamespace(uid_to_buffer_id=slots, get_buffer_id=slots.__getitem__)
    monkeypatch.setattr(stock, "needs_stock_batch", lambda manager: "")
    monkeypatch.setattr(stock, "capturing", lambda: False)
    monkeypatch.setattr(stock, "nolora_graph", lambda: False)
    chosen = settings.Settings.from_environ({"LORA_FASTPATH": "1"}, ["adapters"])
    monkeypatch.setattr(settings, "_current", chosen)
    return types.SimpleNamespace(device=torch.device("cpu"), max_loras_per_batch=4, memory_pool=pool, loras=loras)


@pytest.fixture
def adapter_map(manager):
    return adapters.AdapterMap(manager)


def prepare(adapter_map, batch):
    stock_calls = []
    adapter_map.prepare(batch, lambda: stock_calls.append(batch))
    return adapter_map.batch


def row_slots(table: torch.Tensor, rows: int) -> list[int]:
    """Slot of each row according to a tile table."""
    slots = [tiling.NO_ADAPTER] * rows
    for line in table.tolist():
        for row in line[tiling.HEADER :]:
            if row >= 0:
                assert line[0] >= 0 and slots[row] == tiling.NO_ADAPTER
                slots[row] = line[0]
    return slots


def test_unknown_rank_zero_and_no_adapter_are_none(adapter_map):
    batch = prepare(adapter_map, batch_of(["a", None, "nobody", "zero", "b", "a"]))
    assert batch.path is Path.ONE_STREAM and batch.rows == 6
    for table in batch.tables.values():
        assert row_slots(table, 6) == [2, -1, -1, -1, 0, 2]
        ranks = {line[0]: line[1] for line in table.tolist() if line[0] >= 0}
        assert ranks == {2: 8, 0: 16}
    assert batch.row_slots.tolist() == [2, -1, -1, -1, 0, 2]
    assert batch.slot_ranks.tolist() == [16, 0, 8, 0]


def test_batch_without_adapters_runs_nothing(adapter_map):
    assert prepare(adapter_map, batch_of([None, "nobody", "zero"])).path is Path.BASE


def test_prefill_maps_every_row_of_a_request(adapter_map):
    batch = prepare(adapter_map, batch_of(["b", None, "a"], "extend", [3, 70, 2]))
    assert batch.path is Path.ONE_STREAM
    for table in batch.tables.values():
        assert row_slots(table, 75) == [0] * 3 + [-1] * 70 + [2] * 2
    assert batch.row_slots.tolist() == [0] * 3 + [-1] * 70 + [2] * 2


def test_speculative_verify_has_several_rows_a_request(adapter_map):
    batch = prepare(adapter_map, batch_of(["a", None], "verify", draft=3))
    assert batch.rows == 6
    assert row_slots(batch.tables[batch.launch.expand_rows], 6) == [2, 2, 2, -1, -1, -1]


def test_graph_tables_are_rewritten_in_place_and_padding_is_none(adapter_map, manager, monkeypatch):
    manager.max_bs_in_cuda_graph = 32
    adapter_map.allocate_static(32)
    monkeypatch.setattr(stock, "capturing", lambda: True)
    captured = prepare(adapter_map, batch_of([None] * 16))
    assert captured.path is Path.TWO_STREAMS
    table, by_row = captured.tables[captured.launch.expand_rows], captured.row_slots
    assert len(table) == tiling.max_tiles(16, 4, captured.launch.expand_rows)
    monkeypatch.setattr(stock, "capturing", lambda: False)
    for uids in (["a"] * 9, ["b", "a", None, "a"] * 3, [None] * 5, ["b"]):
        prepare(adapter_map, batch_of(uids))
        slots = [{"a": 2, "b": 0, None: -1}[uid] for uid in uids]
        assert row_slots(table, 16) == slots + [-1] * (16 - len(slots))
        assert by_row.tolist() == slots + [-1] * (32 - len(slots))
        assert captured.slot_ranks.tolist() == [16 * (0 in slots), 0, 8 * (2 in slots), 0]


def test_a_larger_batch_clears_the_tables_that_only_smaller_graphs_read(adapter_map, manager):
    manager.max_bs_in_cuda_graph = 128
    adapter_map.allocate_static(128)
    prepare(adapter_map, batch_of(["a"] * 4))
    prepare(adapter_map, batch_of(["b"] * 100))
    static = adapter_map._static
    assert (static[1][:, 0] == -1).all()
    assert row_slots(static[dense.launch_for(100).expand_rows], 128) == [0] * 100 + [-1] * 28


def test_tables_start_at_addresses_that_share_one_compilation(adapter_map, manager):
    manager.max_bs_in_cuda_graph = 96
    adapter_map.allocate_static(96)
    offsets = {table.data_ptr() - adapter_map._static_buffer.data_ptr() for table in adapter_map._static.values()}
    assert len(offsets) == len(dense.TILE_ROWS) + 2 and all(offset % 128 == 0 for offset in offsets)


def test_a_graph_that_nobody_announced_is_refused(adapter_map, monkeypatch):
    monkeypatch.setattr(stock, "capturing", lambda: True)
    with pytest.raises(ValueError, match="a graph of 2 rows is captured, 0 were announced"):
        prepare(adapter_map, batch_of([None, None]))
    assert adapter_map.batch is None


def test_fall_back_prepares_stock_for_the_current_batch_once(adapter_map):
    calls = []
    adapter_map.prepare(batch_of(["a"]), lambda: calls.append("prepared"))
    assert not adapter_map.prepares_stock
    adapter_map.fall_back("a reason")
    adapter_map.fall_back("another reason")
    assert calls == ["prepared"] and adapter_map.prepares_stock


def test_a_batch_that_cannot_be_mapped_leaves_no_adapter_of_the_step_before(adapter_map, manager):
    manager.max_bs_in_cuda_graph = 8
    adapter_map.allocate_static(8)
    prepare(adapter_map, batch_of(["a"] * 4))
    adapter_map.forget()
    for table in adapter_map._static.values():
        assert (table == tiling.NO_ADAPTER).all()
    prepare(adapter_map, batch_of(["a"] * 4))  # the same content as before must be written again
    assert row_slots(adapter_map._static[1], 8) == [2] * 4 + [-1] * 4


def test_a_replayable_batch_never_skips_the_kernels(adapter_map, manager):
    """sglang may capture while serving without saying so; what is left out then would be missing for good."""
    manager.max_bs_in_cuda_graph = 8
    adapter_map.allocate_static(8)
    assert prepare(adapter_map, batch_of([None, None])).path is Path.ONE_STREAM


def test_another_managers_failure_is_noticed(adapter_map, monkeypatch):
    adapter_map.sites.add("qkv")
    monkeypatch.setattr(adapters.registry, "is_bound", lambda name: True)
    assert not adapter_map.prepares_stock
    monkeypatch.setattr(adapters.registry, "is_bound", lambda name: False)
    assert adapter_map.prepares_stock


def test_every_launch_setting_has_its_tables():
    for rows in (1, 4, 5, 64, 65, 512, 513, 4096, 4097, 100_000):
        launch = dense.launch_for(rows)
        assert rows <= launch.rows
        for size in launch.tile_rows:
            assert size in dense.TILE_ROWS and min(rows, 5000) <= dense.LARGEST_BATCH_OF_TILES[size]
    assert sorted(launch.rows for launch in dense.LAUNCHES) == [launch.rows for launch in dense.LAUNCHES]


def test_other_rows_can_be_announced_for_one_tensor(adapter_map):
    batch = prepare(adapter_map, batch_of(["b", None, "a"], "extend", [3, 5, 2]))
    fetched, other = torch.zeros(9, 4), torch.zeros(9, 4)
    adapter_map.announce(fetched, np.array([2, 3, 4]))
    assert adapter_map.announced(other) is None and adapter_map.batch is batch
    found = adapter_map.announced(fetched)
    assert found.path is Path.ONE_STREAM and found.rows == 9
    for table in found.tables.values():
        assert row_slots(table, 9) == [0, 0, -1, -1, -1, 2, 2, 2, 2]
    again = torch.zeros(9, 4)
    adapter_map.announce(again, np.array([2, 3, 4]))
    assert adapter_map.announced(again) is found and adapter_map.announced(fetched) is None
    prepare(adapter_map, batch_of(["a"]))
    assert adapter_map.announced(again) is None
