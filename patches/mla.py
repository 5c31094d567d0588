"""Site `mla`: the corrections that put kv_b_proj's adapter into DeepSeek's absorbed attention, which never calls kv_b_proj.

    q_nope_out += scaling * (q_nope B_k) A              [T, heads, nope] -> [T, heads, R] -> [T, heads, latent]
    bmm_out    += scaling * (attn_output A^T) B_v^T     [T, heads, latent] -> [T, heads, R] -> [T, heads, v]

sglang calls both once their base product is queued. Their inputs exist before: after the q projection, and after the
attention. Forward hooks on these two modules mark that point, so that the first half runs beside the base product.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import numpy as np
import torch

from lora_fastpath import stock
from lora_fastpath.gate import Path
from lora_fastpath.kernels import tiles as tiling
from lora_fastpath.kernels.heads_product import heads_product
from lora_fastpath.patches import dense
from lora_fastpath.registry import Unfit, registry

SITE = "mla"


@dataclasses.dataclass
class Correction:
    """One attention layer's adapters as the kernel sees them, [slots, heads, N, K] each; attached to its kv_b_proj."""

    adapter_map: Any  # patches.adapters.AdapterMap of the layer's manager
    q_shrink: torch.Tensor
    q_expand: torch.Tensor
    v_shrink: torch.Tensor
    v_expand: torch.Tensor
    pdl: bool  # programmatic dependent launch, compute capability 9.0 and later
    h: torch.Tensor | None = None  # [T, heads, R], what the side stream will write from the last mark on

    @property
    def shape(self) -> tuple:
        """What the compiled kernels depend on: layers with equal shapes share one self-check."""
        return (SITE, self.q_shrink.shape, self.v_expand.shape, self.q_shrink.dtype)

    def mark(self, *_: Any) -> None:
        """A forward hook: what the module before returned is the input of the next correction."""
        batch = self.adapter_map.batch
        self.h = None  # of a mark that no correction has used: a forward that is not absorbed, a fall back
        if batch is not None and batch.path is Path.TWO_STREAMS:
            self.h = self._new_h(batch.rows)
            self.adapter_map.lanes.current().fork()

    def add(self, batch: Any, x: torch.Tensor, y: torch.Tensor, shrink: torch.Tensor, expand: torch.Tensor) -> None:
        """y += the correction for x, in place: x [T, heads, K], y [T, heads, N]."""
        marked, self.h = self.h, None
        h = self._new_h(len(x)) if marked is None else marked
        lane = self.adapter_map.lanes.current()
        with contextlib.nullcontext() if marked is None else lane.side():
            heads_product(x, shrink, batch.tables[batch.launch.shrink_rows], h, add=False)
        heads_product(h, expand, batch.tables[batch.launch.expand_rows], y, add=True, pdl=self.pdl)

    def _new_h(self, rows: int) -> torch.Tensor:
        _, heads, rank, _ = self.q_shrink.shape
        return self.q_shrink.new_empty((rows, heads, rank))


def apply_q_correction(wrapped: Any, _: Any, args: tuple, kwargs: dict) -> torch.Tensor:
    attention, x, y = _arguments(*args, **kwargs)
    return y if _apply(attention, x, y, "q") else wrapped(*args, **kwargs)


def apply_v_correction(wrapped: Any, _: Any, args: tuple, kwargs: dict) -> torch.Tensor:
    attention, x, flat = _arguments(*args, **kwargs)
    return flat if _apply(attention, x, flat.view(len(flat), x.shape[1], -1), "v") else wrapped(*args, **kwargs)


def _arguments(attn_module: Any, x: torch.Tensor, y: torch.Tensor) -> tuple[Any, torch.Tensor, torch.Tensor]:
    return attn_module, x, y


def _apply(attention: Any, x: torch.Tensor, y: torch.Tensor, which: str) -> bool:
    """Add one correction; False where sglang has to."""
    correction = getattr(attention.kv_b_proj, "lora_fastpath_mla", None)
    batch = correction.adapter_map.batch if correction is not None else None
    if batch is None:
        return False
    if batch.path is Path.BASE:
        return True
    shrink, expand = (getattr(correction, f"{which}_{half}") for half in ("shrink", "expand"))
    fits = x.shape[1:] == (shrink.shape[1], shrink.shape[3]) and y.shape[1:] == (expand.shape[1], expand.shape[2])
    if len(x) != batch.rows or len(y) != batch.rows or not fits or {x.dtype, y.dtype} != {shrink.dtype}:
        correction.adapter_map.fall_back(
            f"the {which} correction got {tuple(x.shape)}, {x.dtype} where the batch has {batch.rows} rows", say=True
        )
        return False
    try:
        correction.add(batch, x, y, shrink, expand)
    except Exception as error:  # noqa: BLE001 - y is written by the last launch alone, so stock can still add its own
        reason = f"{type(error).__name__}: {error}"
        correction.adapter_map.fall_back(reason)
        registry.decline(SITE, reason, failed=True)
        return False
    return True


def serve(layer: torch.nn.Module, attention: torch.nn.Module, adapter_map: Any) -> Correction:
    """The corrections of `attention`, whose kv_b_proj is `layer`; raises Unfit where the kernel can't serve them."""
    a, b = stock.adapter_buffers(layer)
    heads, nope, v = stock.absorbed_heads(attention)
    slots, rank, latent = a.shape
    dense.require(a.dtype, rank)
    if b.shape != (slots, heads * (nope + v), rank) or not b.is_contiguous():
        raise Unfit(f"B {tuple(b.shape)} does not hold {heads} heads of {nope} and {v}")
    by_head = b.view(slots, heads, nope + v, rank)
    return Correction(
        adapter_map,
        q_shrink=by_head[:, :, :nope].transpose(2, 3),
        q_expand=a.transpose(1, 2)[:, None].expand(-1, heads, -1, -1),
        v_shrink=a[:, None].expand(-1, heads, -1, -1),
        v_expand=by_head[:, :, nope:],
        pdl=dense.capability(a.device) >= (9, 0),
    )


def attach(layer: torch.nn.Module, attention: torch.nn.Module, correction: Correction) -> None:
    layer.lora_fastpath_mla = correction
    for module in stock.before_corrections(attention):
        module.register_forward_hook(correction.mark)


def self_check(correction: Correction) -> str:
    """Both corrections at this layer's real widths against float64; the first miss in words, or ""."""
    device, dtype, rank = correction.q_shrink.device, correction.q_shrink.dtype, correction.q_shrink.shape[2]
    slots = np.array([0, 1, tiling.NO_ADAPTER, 0, 1], np.int32)
    ranks, scalings = np.array([rank, max(1, rank // 2)], np.int32), np.array([0.5, 2.0], np.float32)
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device)

    for which in "qv":
        shrink, expand = (getattr(correction, f"{which}_{half}") for half in ("shrink", "expand"))
        _, heads, _, k = shrink.shape
        n = expand.shape[2]
        w = [torch.full_like(t[:1], float("nan")).repeat(2, 1, 1, 1) for t in (shrink, expand)]
        for slot, own in enumerate(ranks):
            w[0][slot, :, :own] = (normal(heads, own, k) * k**-0.5).to(dtype)
            w[1][slot, :, :, :own] = (normal(heads, n, own) * int(own) ** -0.5).to(dtype)
        x, y = normal(len(slots), heads, k).to(dtype), normal(len(slots), heads, n).to(dtype)
        right = y.double()
        for row, slot in enumerate(slots):
            if slot >= 0:
                own = int(ranks[slot])
                h = torch.einsum("hk,hrk->hr", x[row].double(), w[0][slot, :, :own].double())
                right[row] += float(scalings[slot]) * torch.einsum("hr,hnr->hn", h, w[1][slot, :, :, :own].double())
        for rows in sorted(dense.TILE_ROWS):
            table = np.empty((tiling.max_tiles(len(slots), 2, rows), tiling.HEADER + rows), np.int32)
            tiling.build_tiles(slots, ranks, scalings, rows, table)
            tiles, got, h = torch.from_numpy(table).to(device), y.clone(), correction._new_h(len(slots))
            heads_product(x, w[0], tiles, h, add=False)
            heads_product(h, w[1], tiles, got, add=True, pdl=correction.pdl)
            worst = ((got.double() - right).abs() / (1 + right.abs())).max().item()
            allowed = 8 * torch.finfo(dtype).eps
            if not worst <= allowed or not torch.equal(got[2], y[2]):  # NaN too
                return f"self-check of the {which} correction, {rows} rows a tile: error {worst:.3g}, {allowed:.3g} is allowed"
    return ""


WRAPPERS = {"apply_q_correction": apply_q_correction, "apply_v_correction": apply_v_correction}
