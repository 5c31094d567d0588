"""What the five dense sites share: launch settings, the two halves of a delta, and the wrappers of sglang's layers.

sglang's `forward` stays in charge (bias, gather, skip-bias, reduction). Two of its methods are wrapped:

    forward      marks the point where the layer's input is ready, then runs sglang's own
    apply_lora   is called by it once the base GEMM is queued: shrink on the side stream from that mark on, join, expand
                 into the base output

The base GEMM is queued before the shrink on purpose: it then gets the SMs it wants at once, and the shrink runs on what
is left. Queued first, the shrink held up cuBLAS's one-wave qkv GEMM from 21 to 27 us (H200, 256 rows, Qwen3-8B shapes).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from lora_fastpath import selfcheck, stock
from lora_fastpath.gate import Path
from lora_fastpath.kernels import tiles as tiling
from lora_fastpath.kernels.expand import MAX_SLICES, expand
from lora_fastpath.kernels.shrink import shrink
from lora_fastpath.registry import Unfit, registry
from lora_fastpath.streams import ARRIVALS, Lane

DTYPES = (torch.bfloat16, torch.float16)
MAX_RANK = 128


@dataclasses.dataclass(frozen=True)
class Launch:
    """Kernel settings for batches of up to `rows` rows.

    Up to 512 rows they come from sweeps on an H200 at Qwen3-8B's and Qwen3-30B-A3B's layers, rank 16
    (benchmarks/dense_layers.py repeats them); beyond that they are right but have not been tuned.
    """

    rows: int
    shrink_rows: int  # rows a tile
    shrink_columns: int  # most columns of h a block
    shrink_k: int  # K a step
    part_k: int  # K a block; the split follows from it
    expand_rows: int
    expand_columns: int
    part_k_beside_long: int = 0  # K a block where the base GEMM is long (LONG_WEIGHT), 0: the same

    @property
    def tile_rows(self) -> set[int]:
        return {self.shrink_rows, self.expand_rows}


LAUNCHES = (
    Launch(rows=4, shrink_rows=1, shrink_columns=16, shrink_k=256, part_k=512, expand_rows=1, expand_columns=64),
    Launch(rows=64, shrink_rows=16, shrink_columns=16, shrink_k=256, part_k=512, expand_rows=16, expand_columns=128),
    Launch(
        rows=512,
        shrink_rows=64,
        shrink_columns=64,
        shrink_k=128,
        part_k=512,
        expand_rows=16,
        expand_columns=128,
        part_k_beside_long=2048,
    ),
    Launch(rows=4096, shrink_rows=64, shrink_columns=64, shrink_k=64, part_k=2048, expand_rows=64, expand_columns=128),
    Launch(
        rows=2**62, shrink_rows=64, shrink_columns=64, shrink_k=64, part_k=2**62, expand_rows=64, expand_columns=128
    ),
)

TILE_ROWS = set().union(*(launch.tile_rows for launch in LAUNCHES))
LARGEST_BATCH_OF_TILES = {
    size: max(launch.rows for launch in LAUNCHES if size in launch.tile_rows) for size in TILE_ROWS
}

LONG_WEIGHT = 2**24
"""Elements of a weight beside whose GEMM there is time for few long blocks, which leave the GEMM its SMs: Qwen3-8B's
layers at 256 rows lose 37 us with blocks of 2,048 and 51 with blocks of 512; Qwen3-30B-A3B's smaller ones lose 19 with
blocks of 1,024 and 10 with blocks of 512 (H200, one adapter, benchmarks/dense_layers.py)."""

SITE_OF_LAYER = {
    "QKVParallelLinearWithLoRA": "qkv",
    "MergedColumnParallelLinearWithLoRA": "merged",
    "ColumnParallelLinearWithLoRA": "column",
    "RowParallelLinearWithLoRA": "row",
    "ReplicatedLinearWithLoRA": "replicated",
}


def launch_for(rows: int) -> Launch:
    return next(launch for launch in LAUNCHES if rows <= launch.rows)


@dataclasses.dataclass(frozen=True)
class Projection:
    """One LoRA layer as the kernels see it; attached to sglang's layer as `lora_fastpath`."""

    site: str
    adapter_map: Any  # patches.adapters.AdapterMap of the layer's manager
    a: torch.Tensor  # [slots, slices * R, K]
    b: torch.Tensor  # [slots, N, R]
    ends: tuple[int, ...]  # of the slices, in columns of the output
    pdl: bool  # programmatic dependent launch, compute capability 9.0 and later
    broken: str = ""  # why this layer's delta is left to stock although its site stays bound; see _out_of_service

    @property
    def shape(self) -> tuple:
        """What the compiled kernels depend on: layers with equal shapes share one self-check."""
        return (self.site, self.a.shape, self.b.shape, self.ends, self.a.dtype)


def scratch_for(projection: Projection, launch: Launch, rows: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What the shrink of a batch of `rows` rows writes: h [rows, slices * R] and its float32 parts (None: no split-K)."""
    slots, columns, k = projection.a.shape
    h = projection.a.new_empty((rows, columns))
    long = k * projection.ends[-1] >= LONG_WEIGHT
    split_k = max(1, k // (long and launch.part_k_beside_long or launch.part_k))
    tiles = tiling.max_tiles(rows, slots, launch.shrink_rows)
    if split_k == 1 or tiles * -(-columns // _shrink_columns(launch, columns)) > ARRIVALS:
        return h, None
    return h, projection.a.new_empty((split_k, rows, columns), dtype=torch.float32)


def _shrink_columns(launch: Launch, columns: int) -> int:
    return min(launch.shrink_columns, max(16, 1 << (columns - 1).bit_length()))


def add_delta(
    projection: Projection, launch: Launch, tables: dict, lane: Lane, x: torch.Tensor, y: torch.Tensor
) -> None:
    """y += the LoRA delta of x, in place; the shrink runs beside what was queued since the lane was forked.

    x: [T, K], y: [T, >= N], dtype of the adapters. Raises what a launch raises, y being written by the last one alone.
    """
    h, parts = lane.scratch or scratch_for(projection, launch, x.shape[0])

    def run_shrink() -> None:
        shrink(
            x,
            projection.a,
            tables[launch.shrink_rows],
            h,
            parts,
            lane.arrivals,
            slices=len(projection.ends),
            block_n=_shrink_columns(launch, h.shape[1]),
            block_k=launch.shrink_k,
        )

    if lane.scratch:
        with lane.side():
            run_shrink()
    else:
        run_shrink()
    expand(
        h,
        projection.b,
        tables[launch.expand_rows],
        y,
        ends=projection.ends,
        block_n=launch.expand_columns,
        pdl=projection.pdl,
    )


def forward(wrapped: Any, layer: Any, args: tuple, kwargs: dict) -> Any:
    """Column, qkv, merged, replicated and (without a reduction) row: sglang's forward with the fork marked before it."""
    return forked(layer, wrapped, *args, **kwargs)


def forked(layer: Any, run: Callable, *args: Any, **kwargs: Any) -> Any:
    """run(...), which calls the layer's apply_lora; in two streams the input is marked as ready here."""
    projection = getattr(layer, "lora_fastpath", None)
    batch = projection.adapter_map.batch if projection is not None else None
    if batch is None or batch.path is not Path.TWO_STREAMS or projection.broken:
        return run(*args, **kwargs)
    lane = projection.adapter_map.lanes.current()
    lane.fork(scratch_for(projection, batch.launch, batch.rows))
    try:
        return run(*args, **kwargs)
    finally:
        lane.scratch = ()


def apply_lora(wrapped: Any, layer: Any, args: tuple, kwargs: dict) -> torch.Tensor:
    """sglang calls this with the base output queued; it returns the same tensor with the delta added."""
    projection = getattr(layer, "lora_fastpath", None)
    batch = projection.adapter_map.batch if projection is not None else None
    if batch is None or projection.broken:
        return wrapped(*args, **kwargs)
    y, x = _arguments(*args, **kwargs)
    if batch.path is Path.BASE:
        return y
    batch = projection.adapter_map.announced(x) or batch
    if x.dim() != 2 or x.shape[0] != batch.rows:
        # Not the rows that were mapped (a padded batch): sglang's own mapping decides.
        projection.adapter_map.fall_back(
            f"a layer got {tuple(x.shape)} where the batch has {batch.rows} rows", say=True
        )
        return wrapped(*args, **kwargs)
    reason = _unfit(projection, x, y)
    if not reason:
        try:
            add_delta(projection, batch.launch, batch.tables, projection.adapter_map.lanes.current(), x, y)
            return y
        except Exception as error:  # noqa: BLE001 - the base output is untouched, so stock can still add its delta
            reason = f"{type(error).__name__}: {error}"
    _out_of_service(projection, layer, reason)
    return wrapped(*args, **kwargs)


def _out_of_service(projection: Projection, layer: Any, reason: str) -> None:
    """Leave the site to stock, while serving."""
    projection.adapter_map.fall_back(reason)
    if projection.site == "row" and stock.reduces_output(layer):
        # Stock's forward reduces twice, ours once, and the other ranks go on with ours: it has to stay.
        layer.lora_fastpath = dataclasses.replace(projection, broken=reason)
        registry.degrade("row", reason)
    else:
        registry.decline(projection.site, reason, failed=True)


def _arguments(base_output: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return base_output, x


def _unfit(projection: Projection, x: torch.Tensor, y: torch.Tensor) -> str:
    """Why these tensors can't be served, or "": the kernels index rows and columns without asking again."""
    if (
        y.dim() != 2
        or x.shape[0] != y.shape[0]
        or x.shape[1] != projection.a.shape[2]
        or y.shape[1] < projection.ends[-1]
    ):
        return f"input {tuple(x.shape)} and output {tuple(y.shape)} do not fit adapters {tuple(projection.a.shape)}"
    if x.dtype != projection.a.dtype or y.dtype != projection.a.dtype:
        return f"input is {x.dtype} and output {y.dtype}, the adapters are {projection.a.dtype}"
    if x.stride(1) != 1 or y.stride(1) != 1:
        return "input or output columns are not adjacent in memory"
    return ""


def require(dtype: torch.dtype, rank: int) -> None:
    """Raise Unfit for adapters that no kernel of ours takes."""
    if dtype not in DTYPES:
        raise Unfit(f"adapters are {dtype}, the kernels take bfloat16 and float16")
    if not 1 <= rank <= MAX_RANK:
        raise Unfit(f"--max-lora-rank is {rank}, the kernels take 1 to {MAX_RANK}")


def capability(device: torch.device) -> tuple[int, int]:
    """The GPU's compute capability; (0, 0) for the CPU."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


def serve(site: str, layer: torch.nn.Module, adapter_map: Any) -> Projection:
    """The layer as the kernels see it; raises Unfit where they can't serve it."""
    if not layer.set_lora:
        raise Unfit("sglang gave the layer no adapter buffers")
    a, b = stock.adapter_buffers(layer)
    ends = stock.slice_ends(layer)
    rank = b.shape[2]
    require(a.dtype, rank)
    if len(ends) > MAX_SLICES:
        raise Unfit(f"{len(ends)} slices, the kernels take {MAX_SLICES}")
    if a.shape[1] != len(ends) * rank or b.shape[1] < ends[-1] or a.stride(2) != 1 or b.stride(2) != 1:
        raise Unfit(f"buffers {tuple(a.shape)} and {tuple(b.shape)} do not hold {len(ends)} slices of rank {rank}")
    return Projection(site, adapter_map, a, b, ends, pdl=capability(a.device) >= (9, 0))


def self_check(projection: Projection) -> str:
    """Run every launch setting at this layer's real shape against float64; the first miss in words, or "".

    Three adapters of unequal rank, rows without one between them, NaN wherever a kernel must not read.
    """
    device, (k, rank, n) = projection.a.device, (projection.a.shape[2], projection.b.shape[2], projection.ends[-1])
    ranks = (rank, max(1, rank // 2), max(1, rank - 1))
    for launch in LAUNCHES:
        rows = max(launch.tile_rows) + 3
        case = selfcheck.make_case(rows, k, projection.ends, ranks, rank, projection.a.dtype, device)
        tables = {size: case.tiles(size) for size in launch.tile_rows}
        candidate = dataclasses.replace(projection, a=case.a, b=case.b)
        y = case.y.clone()
        lane = projection.adapter_map.lanes.current()
        lane.fork(scratch_for(candidate, launch, rows))
        try:
            add_delta(candidate, launch, tables, lane, case.x, y)
        finally:
            lane.scratch = ()
        miss = selfcheck.compare(y, case)
        if miss:
            return f"self-check at {rows} rows, K {k}, N {n}, rank {rank}: {miss}"
    return ""
