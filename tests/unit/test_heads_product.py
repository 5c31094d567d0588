"""The per-head product under Triton's interpreter against float64, in the four shapes that absorbed MLA needs."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

from lora_fastpath.kernels import tiles as tiling
from lora_fastpath.kernels.heads_product import heads_product

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="TRITON_INTERPRET=1 is not set")

HEADS, NOPE, V, LATENT, RANK = 3, 24, 40, 72, 16
RANKS, SCALINGS = np.array([16, 5, 0], np.int32), np.array([0.5, 2.0, 1.0], np.float32)


def table(slots: np.ndarray, rows: int) -> torch.Tensor:
    out = np.empty((tiling.max_tiles(len(slots), 3, rows), tiling.HEADER + rows), np.int32)
    tiling.build_tiles(slots, RANKS, SCALINGS, rows, out)
    return torch.from_numpy(out)


def weights() -> dict[str, torch.Tensor]:
    """The four views of one layer's A and B, [S, heads, N, K]; stale memory past each rank is NaN."""
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(3, RANK, LATENT, generator=generator) * LATENT**-0.5
    b = torch.randn(3, HEADS * (NOPE + V), RANK, generator=generator) * RANK**-0.5
    for slot, rank in enumerate(RANKS):
        a[slot, rank:], b[slot, :, rank:] = float("nan"), float("nan")
    a, b = a.half(), b.half().view(3, HEADS, NOPE + V, RANK)
    return {
        "q shrink": b[:, :, :NOPE].transpose(2, 3),
        "q expand": a.transpose(1, 2)[:, None].expand(-1, HEADS, -1, -1),
        "v shrink": a[:, None].expand(-1, HEADS, -1, -1),
        "v expand": b[:, :, NOPE:],
    }


@pytest.mark.parametrize("rows", [1, 16])
@pytest.mark.parametrize("name", ["q shrink", "q expand", "v shrink", "v expand"])
def test_product_is_float64(name, rows):
    w, add = weights()[name], name.endswith("expand")
    slots = np.array([0, -1, 1, 1, 0, -1, 0], np.int32)
    generator = torch.Generator().manual_seed(1)
    _, heads, n, k = w.shape
    # x as a view of wider heads, y as sglang's transposed product
    x = torch.randn(len(slots), heads, k + 8, generator=generator).half()[..., :k]
    y = torch.randn(heads, len(slots), n, generator=generator).half().transpose(0, 1)
    before = y.clone()
    if add:
        for token, slot in enumerate(slots):
            x[token, :, RANKS[slot] if slot >= 0 else 0 :] = float("nan")
    heads_product(x, w, table(slots, rows), y, add=add)
    for token, slot in enumerate(slots):
        if slot < 0:
            assert torch.equal(y[token], before[token])
            continue
        rank = int(RANKS[slot])
        used_n, used_k = (n, rank) if add else (rank, k)
        right = torch.einsum("hk,hnk->hn", x[token, :, :used_k].double(), w[slot, :, :used_n, :used_k].double())
        if add:
            right = before[token].double() + float(SCALINGS[slot]) * right
        torch.testing.assert_close(y[token, :, :used_n].double(), right, rtol=2e-3, atol=2e-3)
        assert torch.equal(y[token, :, used_n:], before[token, :, used_n:])
