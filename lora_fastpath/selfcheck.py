"""Self-check: what a kernel computes here and now against float64, before anything is served with it.

A compiler release that miscompiles one tile shape, or a GPU that nobody has tried, must cost speed, never a result.
"""

from __future__ import annotations

import dataclasses
import os

import numpy as np
import torch

from lora_fastpath.kernels import tiles as tiling


def supported_device(device: torch.device) -> str:
    """Why the kernels can't run on this device, or "". Triton's interpreter serves any device (tests)."""
    if device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1":
        return ""
    return f"no CUDA: the model is on {device.type}, the kernels need a CUDA GPU"


@dataclasses.dataclass
class Case:
    """One batch for one layer. `y` is the base output that a delta is to be added to."""

    x: torch.Tensor  # [T, K]
    a: torch.Tensor  # [S, slices * R, K], packed at each slot's own rank, NaN past it
    b: torch.Tensor  # [S, N, R], NaN past each slot's rank
    y: torch.Tensor  # [T, N]
    ends: tuple[int, ...]  # of the slices, in columns of y
    row_slots: np.ndarray  # int32 [T], NO_ADAPTER for none
    ranks: np.ndarray  # int32 [S], 0 for a slot without an adapter
    scalings: np.ndarray  # float32 [S]

    def tiles(self, rows: int) -> torch.Tensor:
        """The batch's tile table, int32 [lines, HEADER + rows]."""
        lines = tiling.max_tiles(len(self.row_slots), len(self.ranks), rows)
        table = np.empty((lines, tiling.HEADER + rows), np.int32)
        tiling.build_tiles(self.row_slots, self.ranks, self.scalings, rows, table)
        return torch.from_numpy(table).to(self.x.device)

    def expected(self) -> torch.Tensor:
        """y + scaling * B (A x) in float64, each row by its own adapter; float64 [T, N]."""
        y = self.y.double()
        slots = torch.from_numpy(self.row_slots).to(self.x.device)
        for slot, (rank, scaling) in enumerate(zip(self.ranks.tolist(), self.scalings.tolist())):
            rows = (slots == slot).nonzero().flatten()
            start = 0
            for piece, end in enumerate(self.ends):
                h = self.x[rows].double() @ self.a[slot, piece * rank : (piece + 1) * rank].double().T
                y[rows, start:end] += scaling * h @ self.b[slot, start:end, :rank].double().T
                start = end
        return y


def make_case(
    rows: int,
    k: int,
    ends: tuple[int, ...],
    ranks: tuple[int, ...],
    max_rank: int,
    dtype: torch.dtype,
    device: torch.device | str,
    seed: int = 0,
    none_every: int = 4,
) -> Case:
    """Random x, A, B and y at the scale of a trained layer (outputs near 1), one adapter a slot.

    Every `none_every`-th row has no adapter (0: every row has one). What a kernel must not read is NaN.
    """
    rng = np.random.default_rng(seed)
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device)

    slots, slices = len(ranks), len(ends)
    a = torch.full((slots, slices * max_rank, k), float("nan"), device=device)
    b = torch.full((slots, ends[-1], max_rank), float("nan"), device=device)
    for slot, rank in enumerate(ranks):
        a[slot, : slices * rank] = normal(slices * rank, k) * k**-0.5
        b[slot, :, :rank] = normal(ends[-1], rank) * max(rank, 1) ** -0.5
    row_slots = rng.integers(0, slots, rows).astype(np.int32)
    row_slots[np.asarray(ranks)[row_slots] == 0] = tiling.NO_ADAPTER
    if none_every:
        row_slots[none_every - 1 :: none_every] = tiling.NO_ADAPTER
    return Case(
        normal(rows, k).to(dtype),
        a.to(dtype),
        b.to(dtype),
        normal(rows, ends[-1]).to(dtype),
        ends,
        row_slots,
        np.asarray(ranks, np.int32),
        rng.uniform(0.5, 2.0, slots).astype(np.float32),
    )


def compare(got: torch.Tensor, case: Case) -> str:
    """What is wrong with `got` [T, N] as the output for `case`, or "".

    The shrink's result is rounded to the dtype once and the sum once, so a few units in the last place of values near 1.
    """
    none = torch.from_numpy(case.row_slots == tiling.NO_ADAPTER).to(got.device)
    if not torch.equal(got[none], case.y[none]):
        return "rows without an adapter changed"
    expected = case.expected()
    error = (got.double() - expected).abs() / (1 + expected.abs())
    worst = error.max().item()
    allowed = 8 * torch.finfo(case.x.dtype).eps
    if not worst <= allowed:  # NaN too
        return f"largest relative error {worst:.3g}, {allowed:.3g} is allowed for {str(case.x.dtype).removeprefix('torch.')}"
    return ""
