"""Site `adapters`: LoRAManager. Which adapter each row of a batch uses, on the device, once a step.

Wraps the end of the manager's construction (adapter buffers have their final addresses, the KV cache is not sized yet:
the moment to self-check and allocate), the announcement of CUDA graphs (static tables) and the preparation of a batch.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from lora_fastpath import gate, report, selfcheck, settings, stock
from lora_fastpath.kernels import tiles as tiling
from lora_fastpath.patches import dense, mla, moe, sm100
from lora_fastpath.registry import Unfit, registry
from lora_fastpath.streams import Lanes

ROW_SLOTS, SLOT_RANKS = "row slots", "slot ranks"


@dataclasses.dataclass
class Batch:
    """What the layers need to know of the batch that runs next."""

    path: gate.Path
    rows: int
    launch: dense.Launch
    tables: dict[int, torch.Tensor]  # rows a tile -> int32 tile table, see kernels/tiles.py
    row_slots: torch.Tensor | None
    """int32 [>= rows], the adapter slot of each row, NO_ADAPTER for none; None on path BASE."""
    slot_ranks: torch.Tensor | None
    """int32 [slots], the rank of the adapter in each slot, 0 or less for one that this batch does not use."""


class AdapterMap:
    """The tile tables of one LoRAManager: static ones for graphs, fresh ones for any other batch."""

    def __init__(self, manager: Any) -> None:
        self.lanes = Lanes(manager.device)
        self.batch: Batch | None = None
        self.sites: set[str] = set()
        """Sites that serve some layer of this manager."""
        self._stock_reason = stock.needs_stock_batch(manager)
        self._prepare_stock: Callable[[], None] = lambda: None
        self._manager = manager
        self._static_buffer = torch.empty(0, dtype=torch.int32, device=manager.device)
        self._static: dict[int | str, torch.Tensor] = {}
        self._static_rows = 0
        self._static_content: tuple | None = None
        self._retired: list[torch.Tensor] = []
        self._requests: tuple[list[int], dict] = [], {}
        self._cached: dict[tuple, Batch] = {}
        self._announced: tuple[weakref.ref, Batch] | None = None

    @property
    def prepares_stock(self) -> bool:
        """True when sglang prepares its own metadata each step too, because one of its LoRA kernels may run."""
        return bool(self._stock_reason) or not all(map(registry.is_bound, self.sites))

    def fall_back(self, reason: str, say: bool = False) -> None:
        """From now on sglang's kernels may run: prepare their metadata, for the current batch too.

        say: with one line, where no site goes out of service that has a line of its own.
        """
        if not self._stock_reason:
            self._stock_reason = reason
            self._prepare_stock()
            if say:
                report.line(f"site adapters: {reason}; stock sglang serves such batches")

    def allocate_static(self, rows: int) -> None:
        """Tables for graphs of up to `rows` rows. Graphs captured before a larger announcement see no adapter any more."""
        if rows <= self._static_rows:
            return
        if self._static_rows:
            report.line(
                f"site adapters: graphs of {rows} rows were announced after {self._static_rows}; earlier graphs are void"
            )
        self._static_buffer.fill_(tiling.NO_ADAPTER)
        self._retired.append(self._static_buffer)
        host, views = self._new_tables(rows, dense.TILE_ROWS)
        self._static_buffer = host.to(self._manager.device)
        self._static = _split(self._static_buffer, views)
        self._static_rows, self._static_content = rows, None

    def forget(self) -> None:
        """Rather no adapter than another request's, should a graph be replayed with a batch that could not be mapped."""
        self._static_content = None
        self._static_buffer.fill_(tiling.NO_ADAPTER)

    def prepare(self, forward_batch: Any, prepare_stock: Callable[[], None]) -> None:
        """Fill the tables for this batch and choose its path."""
        self.batch, self._prepare_stock = None, prepare_stock
        self._cached, self._announced = {}, None
        self._requests = slots, adapters = stock.request_slots(self._manager, forward_batch)
        per_request = stock.rows_per_request(forward_batch)
        rows = int(per_request.sum())
        static = stock.may_replay(self._manager, forward_batch) and 0 < rows <= self._static_rows
        capturing = stock.capturing()
        if capturing and not static:
            raise ValueError(f"a graph of {rows} rows is captured, {self._static_rows} were announced")
        path, _ = gate.choose(
            rows=rows,
            active=bool(adapters),
            replayable=static,
            capturing=capturing,
            nolora_graph=stock.nolora_graph(),
            max_tokens=settings.current().max_tokens,
        )
        if not static:
            self.batch = self._fresh_batch(path, per_request)
        else:
            launch = dense.launch_for(rows)
            tables: dict[int | str, torch.Tensor] = {name: self._static[name] for name in (ROW_SLOTS, SLOT_RANKS)}
            tables |= {size: self._static[size][: self._lines(rows, size)] for size in launch.tile_rows}
            content = (tuple(slots), tuple(per_request.tolist()), tuple(sorted(adapters.items())))
            if content != self._static_content:  # most decode steps have the requests of the step before
                host, views = self._new_tables(self._static_rows, dense.TILE_ROWS)
                self._fill(host, views, per_request)
                self._static_buffer.copy_(host, non_blocking=True)
                self._static_content = content
            self.batch = _batch(path, rows, launch, tables)

    def announce(self, x: torch.Tensor, per_request: np.ndarray) -> None:
        """The rows of x, which a layer is about to get, are so many of each request: others than those of the batch."""
        key = tuple(per_request.tolist())
        if key not in self._cached:  # every attention layer fetches the same rows
            self._cached[key] = self._fresh_batch(gate.Path.ONE_STREAM, per_request)
        self._announced = weakref.ref(x), self._cached[key]

    def announced(self, x: torch.Tensor) -> Batch | None:
        """What was announced of x; None for the rows of the batch."""
        if self._announced is None or self._announced[0]() is not x:
            return None
        return self._announced[1]

    def _fresh_batch(self, path: gate.Path, per_request: np.ndarray) -> Batch:
        rows = int(per_request.sum())
        launch = dense.launch_for(rows)
        if path is gate.Path.BASE:
            return _batch(path, rows, launch, {})
        host, views = self._new_tables(rows, launch.tile_rows)
        self._fill(host, views, per_request)
        return _batch(path, rows, launch, _split(host.to(self._manager.device, non_blocking=True), views))

    def _lines(self, rows: int, size: int) -> int:
        return tiling.max_tiles(min(rows, dense.LARGEST_BATCH_OF_TILES[size]), self._manager.max_loras_per_batch, size)

    def _new_tables(self, rows: int, tile_rows: set[int]) -> tuple[torch.Tensor, dict]:
        """A host buffer for all tables of a batch of `rows` rows, and each table's (start, shape).

        Pinned and fresh every time: the copy to the device runs while the host prepares the next step, and the caching
        host allocator gives the memory back only when the copy has ended.
        """
        slots = self._manager.max_loras_per_batch
        shapes: dict[int | str, tuple[int, ...]] = {SLOT_RANKS: (slots,), ROW_SLOTS: (rows,)}
        shapes |= {size: (self._lines(rows, size), tiling.HEADER + size) for size in sorted(tile_rows)}
        views, end = {}, 0
        for name, shape in shapes.items():
            views[name] = (end, shape)
            end += -(-math.prod(shape) // 32) * 32  # 128 bytes: Triton compiles anew for odd addresses
        cuda = self._manager.device.type == "cuda"
        return torch.full((end,), tiling.NO_ADAPTER, dtype=torch.int32, pin_memory=cuda), views

    def _fill(self, host: torch.Tensor, views: dict, per_request: np.ndarray) -> None:
        (slots, adapters), count = self._requests, self._manager.max_loras_per_batch
        ranks, scalings = np.zeros(count, np.int32), np.zeros(count, np.float32)
        for slot, (rank, scaling) in adapters.items():
            ranks[slot], scalings[slot] = rank, scaling
        row_slots = np.repeat(np.asarray(slots, np.int32), per_request)
        tables = {name: table.numpy() for name, table in _split(host, views).items()}
        tables.pop(SLOT_RANKS)[:] = ranks
        tables.pop(ROW_SLOTS)[: len(row_slots)] = row_slots
        for size, table in tables.items():
            if len(row_slots) <= dense.LARGEST_BATCH_OF_TILES[size]:
                tiling.build_tiles(row_slots, ranks, scalings, size, table)


def _batch(path: gate.Path, rows: int, launch: dense.Launch, tables: dict[int | str, torch.Tensor]) -> Batch:
    by_row = tables.pop(ROW_SLOTS, None), tables.pop(SLOT_RANKS, None)
    return Batch(path, rows, launch, tables, *by_row)


def _split(buffer: torch.Tensor, views: dict) -> dict[int | str, torch.Tensor]:
    return {name: buffer[start : start + math.prod(shape)].view(shape) for name, (start, shape) in views.items()}


SERVED_BY = {layer: module for module in (dense, moe) for layer in module.SITE_OF_LAYER}
"""sglang's LoRA layer class -> the module that serves it."""


def attach(layers: list[tuple[str, torch.nn.Module]], adapter_map: AdapterMap) -> None:
    """Give every LoRA layer what its site's wrappers need.

    A layer that does not fit takes its whole site back to stock: half a site would be hard to reason about.
    """
    checked: dict[tuple, str] = {}
    for name, layer in layers:
        if stock.runs_on_trtllm(getattr(layer, "base_layer", None)):
            sm100.attach(name, layer, adapter_map, checked)
            continue
        module = SERVED_BY.get(type(layer).__name__)
        site = module.SITE_OF_LAYER[type(layer).__name__] if module else None
        if site is None or not registry.is_bound(site):
            adapter_map.fall_back(f"{name}, a {type(layer).__name__}, is served by stock")
            continue
        served = _checked(
            site, name, functools.partial(module.serve, site, layer, adapter_map), module.self_check, checked
        )
        if served is not None:
            layer.lora_fastpath = served
            adapter_map.sites.add(site)
        if not registry.is_bound(site):
            adapter_map.fall_back(f"site {site} is out of service")


def attach_corrections(manager: Any) -> None:
    """The same for attention that applies kv_b_proj's adapter by itself."""
    adapter_map, checked = manager.lora_fastpath, {}
    for name, layer in stock.lora_layers(manager):
        attention = stock.absorbed_attention(manager, name)
        if attention is None:
            continue
        if registry.is_bound(mla.SITE):
            correction = _checked(
                mla.SITE, name, functools.partial(mla.serve, layer, attention, adapter_map), mla.self_check, checked
            )
            if correction is not None:
                mla.attach(layer, attention, correction)
                adapter_map.sites.add(mla.SITE)
        if not registry.is_bound(mla.SITE):
            adapter_map.fall_back(f"{name}, which absorbed MLA applies by itself, is served by stock")


def _checked(
    site: str, name: str, serve: Callable[[], Any], self_check: Callable[[Any], str], checked: dict[tuple, str]
) -> Any:
    """What `serve` makes for layer `name`, each distinct shape self-checked first; None, and `site` declined, if it can't."""
    failed = True
    try:
        served = serve()
        if served.shape not in checked:
            checked[served.shape] = self_check(served)
        reason = checked[served.shape]
    except Unfit as error:
        reason, failed = str(error), False
    except Exception as error:  # noqa: BLE001 - any failure of ours must leave a serving stock engine
        reason = f"self-check: {type(error).__name__}: {error}"
    if not reason:
        return served
    registry.decline(site, f"{name}: {reason}", failed=failed)
    return None


def init_state(wrapped: Any, manager: Any, args: tuple, kwargs: dict) -> None:
    wrapped(*args, **kwargs)
    reason = selfcheck.supported_device(manager.device)
    if not reason and manager.lora_backend.name not in stock.BACKENDS:
        reason = f"lora_backend is {manager.lora_backend.name}, the overlay serves {' and '.join(stock.BACKENDS)}"
    reason = reason or stock.unserved_mode()
    if reason:
        registry.decline("adapters", reason)
        sm100.refuse(stock.lora_layers(manager), reason)
    else:
        manager.lora_fastpath = AdapterMap(manager)
        attach(stock.lora_layers(manager), manager.lora_fastpath)
        attach_corrections(manager)
    if manager.tp_size > 1:
        _agree(manager)


def _agree(manager: Any) -> None:
    """Ranks of one model serve the same sites: `row` reduces once where stock reduces twice, so a lone rank would hang all."""
    sites = ("adapters", mla.SITE, *(module.SITE_OF_LAYER[layer] for layer, module in SERVED_BY.items()))
    bound = [name for name in sites if registry.is_bound(name)]
    for rank, theirs in stock.ranks_that_bound(bound, manager).items():
        for name in bound:
            if theirs is None:
                registry.decline(name, f"rank {rank} does not answer; start every rank with the overlay, or none")
            elif name not in theirs:
                registry.decline(name, f"rank {rank} has not bound it (see its own line), and ranks have to agree")


def init_cuda_graph_batch_info(wrapped: Any, manager: Any, args: tuple, kwargs: dict) -> None:
    wrapped(*args, **kwargs)
    adapter_map = getattr(manager, "lora_fastpath", None)
    if adapter_map is not None:
        most = dict(zip(("max_bs_in_cuda_graph", "num_tokens_per_bs"), args)) | kwargs
        adapter_map.allocate_static(most["max_bs_in_cuda_graph"] * most["num_tokens_per_bs"])


def prepare_lora_batch(wrapped: Any, manager: Any, args: tuple, kwargs: dict) -> None:
    adapter_map = getattr(manager, "lora_fastpath", None)
    if adapter_map is None or adapter_map.prepares_stock:
        wrapped(*args, **kwargs)
    if adapter_map is None:
        return
    forward_batch = args[0] if args else kwargs["forward_batch"]
    alive = weakref.ref(forward_batch)  # its tensors are not ours to keep once the batch is done

    def prepare_stock() -> None:
        batch = alive()
        if batch is not None:
            wrapped(batch)

    try:
        adapter_map.prepare(forward_batch, prepare_stock)
    except Exception as error:  # noqa: BLE001 - whatever it is, sglang's kernels can serve the batch
        adapter_map.forget()
        what = f"a batch could not be mapped ({type(error).__name__}: {error}) and gets no adapter if a graph serves it"
        adapter_map.fall_back(what, say=True)


WRAPPERS = {
    "LoRAManager.init_state": init_state,
    "LoRAManager.init_cuda_graph_batch_info": init_cuda_graph_batch_info,
    "LoRAManager.prepare_lora_batch": prepare_lora_batch,
}
