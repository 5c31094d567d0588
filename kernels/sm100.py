"""The stages of FlashInfer's TRT-LLM-gen mixture of experts, with room for LoRA between them.

    FP8 blocks   route -> gate_up GEMM, FP8 out -> activation with the delta, FP8 -> down GEMM -> sum with the delta
    NVFP4        route -> gather -> gate_up GEMM, BF16 out -> activation with the delta, NVFP4 -> down GEMM -> sum

The GEMMs and the routing are FlashInfer's, driven by csrc/sm100.cu; the rest are kernels of ours. FlashInfer's GEMMs work on
rows sorted by expert, each expert's padded to full tiles. FP8 has no gate_up GEMM with unquantized output, so gate and up
are rounded to FP8 before the delta, as FlashInfer does it without adapters. NVFP4 has none that finds a row's token itself,
so its rows are gathered first.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from lora_fastpath.kernels.launch import cdiv, power_of_2
from lora_fastpath.kernels.moe_routing import Routing
from lora_fastpath.kernels.moe_sum import moe_sum
from lora_fastpath.kernels.sm100_activate import sm100_activate
from lora_fastpath.kernels.sm100_gather import sm100_gather

TILES = {False: (8, 128), True: (8, 256)}
"""Fewest and most rows of a tile, for FP8 and for NVFP4; all powers of two between exist."""

LEAST_BYTES = 128 * 1024
"""FlashInfer gives its GEMMs' outputs at least this much, for their speed."""

NVFP4 = torch.uint8
"""Two E2M1 codes a byte."""


@dataclasses.dataclass(frozen=True)
class Rows:
    """One batch's tokens in the GEMMs' rows. All tensors int32."""

    permuted: torch.Tensor  # [T, top_k] row of a pair, -1 for an expert on another rank
    token_of_row: torch.Tensor  # [count + 1] undefined in rows that pad a tile; the GEMMs read one past the end
    in_use: torch.Tensor  # [1] rows
    tile_experts: torch.Tensor  # [tiles at most] this rank's number of a tile's expert
    tile_ends: torch.Tensor  # [tiles at most] the row after a tile's last pair
    tiles: torch.Tensor  # [1] in use
    count: int  # rows at most
    tile: int  # rows of a tile


@dataclasses.dataclass(frozen=True)
class BaseExperts:
    """One layer's experts on this rank, as FlashInfer's API takes them. E experts on this rank, sizes H and I.

    FP8 blocks, weights as loaded, up's rows before gate's:

        gemm1_weights  float8 e4m3 [E, 2I, H]   gemm1_weights_scale  float32 [E, 2I / 128, H / 128]
        gemm2_weights  float8 e4m3 [E, H, I]    gemm2_weights_scale  float32 [E, H / 128, I / 128]

    NVFP4, weights and scales shuffled for FlashInfer, up's and gate's rows in turn:

        gemm1_weights  uint8 [E, 2I, H / 2]     gemm1_weights_scale  float8 e4m3 [E, 2I, H / 16]
        gemm2_weights  uint8 [E, H, I / 2]      gemm2_weights_scale  float8 e4m3 [E, H, I / 16]
        gemm1_alphas, gemm2_alphas  float32 [E] what turns an expert's sums of codes into values
        activation_scale            float32 [1] the global scale of gemm2's input, see fp4.py

    All contiguous, on one device. Raises ValueError with the name of what does not fit.
    """

    library: Any
    """csrc/sm100.cu, loaded."""
    dtype: torch.dtype
    """Of what is not quantized."""
    gemm1_weights: torch.Tensor
    gemm1_weights_scale: torch.Tensor
    gemm2_weights: torch.Tensor
    gemm2_weights_scale: torch.Tensor
    num_experts: int
    """On all ranks."""
    local_expert_offset: int = 0
    """The first of this rank's."""
    gemm1_alphas: torch.Tensor | None = None
    gemm2_alphas: torch.Tensor | None = None
    activation_scale: torch.Tensor | None = None
    fast_math: bool = True
    """As FlashInfer compiles its activation; Triton's interpreter needs False."""
    pdl: bool = True

    def __post_init__(self) -> None:
        weights = self.gemm1_weights
        if weights.dtype not in (NVFP4, torch.float8_e4m3fn) or weights.dim() != 3:
            found = f"{weights.dtype} {list(weights.shape)}"
            raise ValueError(f"gemm1_weights: {found}, expected float8_e4m3fn or, for NVFP4, uint8 with 3 axes")
        experts, width, hidden, half = self.local_experts, 2 * self.intermediate, self.hidden, self.intermediate
        quantum = 64 if self.is_fp4 else 128
        if hidden % quantum or half % quantum or width != weights.shape[1]:
            raise ValueError(
                f"gemm1_weights: sizes H {hidden} and 2I {weights.shape[1]}, expected multiples of {quantum}"
            )
        if not 0 <= self.local_expert_offset <= self.num_experts - experts:
            there = f"{self.local_expert_offset} with {experts} experts here of {self.num_experts}"
            raise ValueError(f"local_expert_offset: {there}, expected 0 to {self.num_experts - experts}")
        if self.is_fp4:
            self._require("gemm1_weights", NVFP4, (experts, width, hidden // 2))
            self._require("gemm1_weights_scale", torch.float8_e4m3fn, (experts, width, hidden // 16))
            self._require("gemm2_weights", NVFP4, (experts, hidden, half // 2))
            self._require("gemm2_weights_scale", torch.float8_e4m3fn, (experts, hidden, half // 16))
            self._require("gemm1_alphas", torch.float32, (experts,))
            self._require("gemm2_alphas", torch.float32, (experts,))
            self._require("activation_scale", torch.float32, (1,))
        else:
            self._require("gemm1_weights", torch.float8_e4m3fn, (experts, width, hidden))
            self._require("gemm1_weights_scale", torch.float32, (experts, width // 128, hidden // 128))
            self._require("gemm2_weights", torch.float8_e4m3fn, (experts, hidden, half))
            self._require("gemm2_weights_scale", torch.float32, (experts, hidden // 128, half // 128))

    def _require(self, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        _require(name, getattr(self, name), dtype, shape, self.gemm1_weights.device)

    @property
    def is_fp4(self) -> bool:
        return self.gemm1_weights.dtype is NVFP4

    @property
    def local_experts(self) -> int:
        return self.gemm1_weights.shape[0]

    @property
    def hidden(self) -> int:
        return self.gemm1_weights.shape[2] * (2 if self.is_fp4 else 1)

    @property
    def intermediate(self) -> int:
        return self.gemm1_weights.shape[1] // 2

    def tile(self, pairs: int) -> int:
        """The tile that FlashInfer takes without tuning: half of what would hold an expert's share of the pairs."""
        least, most = TILES[self.is_fp4]
        share = min(max(power_of_2(cdiv(pairs, self.local_experts)), least), most)
        return max(share // 2, least)

    def require_kernels(self, top_k: int) -> None:
        """Raises ValueError for the first tile that FlashInfer has no GEMM for, at these sizes."""
        tile, most = TILES[self.is_fp4]
        sizes = {"gate_up": (2 * self.intermediate, self.hidden), "down": (self.hidden, self.intermediate)}
        while tile <= most:
            tokens = max(1, tile * self.local_experts // top_k)  # for which this tile is taken
            for name, (n, k) in sizes.items():
                routed = name == "gate_up" and not self.is_fp4
                problem = (n, k, self.local_experts, tokens, top_k, tile)
                try:
                    found = int(self.library.lora_fastpath_kernels(self.is_fp4, routed, *problem))
                except RuntimeError:  # none of any size
                    found = 0
                if not found:
                    kind = "NVFP4" if self.is_fp4 else "FP8 block"
                    raise ValueError(f"FlashInfer has no {kind} {name} GEMM of {n} x {k} with {tile} rows a tile")
            tile *= 2

    def route(self, topk_ids: torch.Tensor, topk_weights: torch.Tensor) -> Rows:
        """Sort a batch's pairs by expert.

        topk_ids      int32 [T, top_k]  numbers among all ranks' experts, contiguous
        topk_weights  BF16 [T, top_k]   contiguous
        """
        device = self.gemm1_weights.device
        tokens, top_k = topk_ids.shape
        if not 0 < top_k <= self.num_experts:
            raise ValueError(f"topk_ids: {top_k} experts a token, expected 1 to {self.num_experts}")
        _require("topk_ids", topk_ids, torch.int32, (tokens, top_k), device)
        _require("topk_weights", topk_weights, torch.bfloat16, (tokens, top_k), device)
        tile = self.tile(tokens * top_k)
        # FlashInfer's own bound for all ranks' experts: its routing fills tables as if all were here.
        tiles, count = (int(size) for size in self.library.lora_fastpath_sizes(tokens, top_k, self.num_experts, tile))
        counts = max(2 * self.num_experts, 512)
        sizes = (count + 1, 1, tiles, tiles, 1, counts)
        tables = [torch.empty(size, dtype=torch.int32, device=device) for size in sizes]
        rows = Rows(torch.empty_like(topk_ids), *tables[:5], count, tile)
        self.library.lora_fastpath_route(
            topk_ids, topk_weights, rows.permuted, rows.token_of_row, rows.in_use, rows.tile_experts, rows.tile_ends,
            rows.tiles, tables[5], self.num_experts, self.local_expert_offset, self.local_experts, tile, self.pdl,
        )  # fmt: skip
        return rows

    def rows_of(self, permuted: torch.Tensor, in_use: torch.Tensor, count: int) -> Rows:
        """Rows known already, in tiles of the fewest; for what needs neither routing nor GEMMs."""
        nothing = in_use.new_empty(0)
        return Rows(permuted, nothing, in_use, nothing, nothing, nothing, count, TILES[self.is_fp4][0])

    def gate_up(self, x: torch.Tensor, x_scale: torch.Tensor, rows: Rows) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The gate_up GEMM. Returns gate_up [rows, 2I], and with FP8 blocks its scales; see sm100_activate.py.

        FP8 blocks  x float8 e4m3 [T, H], x_scale float32 [H / 128, T]
        NVFP4       x uint8 [T, H / 2], x_scale float8 e4m3 [T, H / 16]
        """
        device, tokens = self.gemm1_weights.device, rows.permuted.shape[0]
        if not self.is_fp4:
            _require("x", x, torch.float8_e4m3fn, (tokens, self.hidden), device)
            _require("x_scale", x_scale, torch.float32, (self.hidden // 128, tokens), device)
            out = self._empty(rows, 2 * self.intermediate, torch.float8_e4m3fn)
            scales = torch.empty(2 * self.intermediate // 128 * len(out), dtype=torch.float32, device=device)
            self._gemm(x, x_scale, self.gemm1_weights, self.gemm1_weights_scale, None, out, scales, rows, route=True)
            return out, scales
        _require("x", x, NVFP4, (tokens, self.hidden // 2), device)
        _require("x_scale", x_scale, torch.float8_e4m3fn, (tokens, self.hidden // 16), device)
        gathered = self._empty(rows, self.hidden // 2, NVFP4)
        scales = self._empty(rows, self.hidden // 16, torch.uint8)
        sm100_gather(x, x_scale.view(torch.uint8), rows.permuted, gathered, scales, rows.tile, pdl=self.pdl)
        out = self._empty(rows, 2 * self.intermediate, self.dtype)
        weights = (self.gemm1_weights, self.gemm1_weights_scale, self.gemm1_alphas)
        self._gemm(gathered, scales, *weights, out, None, rows)
        return out, None

    def activate(
        self,
        gate_up: torch.Tensor,
        gate_up_scales: torch.Tensor | None,
        delta: torch.Tensor | None,
        routing: Routing,
        rows: Rows,
        out: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """silu(gate) * up with the delta [P, 2I] into out [P, I]; returns its codes and their scales in the GEMMs' rows."""
        width = self.intermediate
        if self.is_fp4:
            codes, scales = self._empty(rows, width // 2, NVFP4), self._empty(rows, width // 16, torch.uint8)
        else:
            codes = self._empty(rows, width, torch.float8_e4m3fn)
            scales = torch.empty(width // 128 * len(codes), dtype=torch.float32, device=codes.device)
        in_use = None if self.is_fp4 else rows.in_use
        sm100_activate(
            gate_up, gate_up_scales, delta, rows.permuted, in_use, routing, out, codes, scales, self.activation_scale,
            rows.tile, fast_math=self.fast_math, pdl=self.pdl,
        )  # fmt: skip
        return codes, scales

    def down(self, codes: torch.Tensor, scales: torch.Tensor, rows: Rows) -> torch.Tensor:
        """The down GEMM of what `activate` returned: [rows, H], without routing weights."""
        out = self._empty(rows, self.hidden, self.dtype)
        weights = (self.gemm2_weights, self.gemm2_weights_scale, self.gemm2_alphas)
        self._gemm(codes, scales, *weights, out, None, rows)
        return out

    def finalize(
        self,
        y: torch.Tensor,
        delta: torch.Tensor | None,
        topk_weights: torch.Tensor,
        routing: Routing,
        rows: Rows,
        out: torch.Tensor,
    ) -> None:
        """out [T, H]: what `down` returned times the routing weights, and the delta [T, top_k, H] (weights in it), summed."""
        moe_sum(y, delta, routing, 1.0, out, rows.permuted, topk_weights, pdl=self.pdl)

    def _empty(self, rows: Rows, columns: int, dtype: torch.dtype) -> torch.Tensor:
        count = max(rows.count, cdiv(LEAST_BYTES, columns * dtype.itemsize))
        count = cdiv(count, rows.tile) * rows.tile
        return torch.empty(count, columns, dtype=dtype, device=self.gemm1_weights.device)

    def _gemm(
        self,
        x: torch.Tensor,
        x_scales: torch.Tensor,
        weights: torch.Tensor,
        weights_scale: torch.Tensor,
        alphas: torch.Tensor | None,
        out: torch.Tensor,
        out_scales: torch.Tensor | None,
        rows: Rows,
        *,
        route: bool = False,
    ) -> None:
        tokens, top_k = rows.permuted.shape
        self.library.lora_fastpath_gemm(
            x, x_scales, weights, weights_scale, alphas, out, out_scales, rows.token_of_row if route else None,
            rows.in_use, rows.tile_experts, rows.tile_ends, rows.tiles, tokens, top_k, rows.tile, self.pdl,
        )  # fmt: skip


def _require(name: str, tensor: Any, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"{name}: {tensor!r}, expected {dtype} {list(shape)}")
    found = tensor.dtype, tuple(tensor.shape), tensor.device
    if found != (dtype, shape, device) or not tensor.is_contiguous():
        text = f"{found[0]} {list(found[1])} on {found[2]}{'' if tensor.is_contiguous() else ', not contiguous'}"
        raise ValueError(f"{name}: {text}, expected {dtype} {list(shape)} on {device}, contiguous")
