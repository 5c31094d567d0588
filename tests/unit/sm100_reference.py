"""What csrc/sm100.cu does, in torch on the CPU: FlashInfer's routing and GEMMs as the stages see them.

It stands in where there is no GPU for the real ones, and leaves undefined what they leave undefined.
"""

from __future__ import annotations

import torch

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
UNDEFINED = -77777


def scale_offsets(rows: int, groups: int, tile: int) -> torch.Tensor:
    """Where the NVFP4 scale of [row, group] lies, by permuting axes."""
    every = torch.arange(rows * groups)
    if tile >= 128:  # [rows / 128, groups / 4, 32, 4, 4]: a row is 32 of the third axis, then the fourth's
        return every.view(rows // 128, groups // 4, 32, 4, 4).permute(0, 3, 2, 1, 4).reshape(rows, groups)
    return every.view(rows // 8, groups // 4, 8, 4).permute(0, 2, 1, 3).reshape(rows, groups)


def fp4_values(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """codes uint8 [..., K / 2] and scales e4m3 [..., K / 16] as float64 [..., K]."""
    nibbles = torch.stack([codes & 15, codes >> 4], -1).flatten(-2).long()
    values = E2M1.double()[nibbles & 7] * (1 - 2.0 * (nibbles >> 3))
    return values * scales.double().repeat_interleave(16, -1)


def fp8_values(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """codes e4m3 [E, N, K] and scales [E, N / 128, K / 128] as float64."""
    return codes.double() * scales.double().repeat_interleave(128, 1).repeat_interleave(128, 2)


class Library:
    def __init__(self) -> None:
        self.tiles: set[int] = set()
        self.without = 0

    def lora_fastpath_sizes(self, tokens: int, top_k: int, experts: int, tile: int) -> list[int]:
        filled = min(experts, tokens * top_k)
        tiles = filled + (tokens * top_k - filled) // tile
        return [tiles, tiles * tile]

    def lora_fastpath_route(
        self, ids, weights, permuted, token_of_row, in_use, tile_experts, tile_ends, tiles, counts, experts, first,
        local, tile, pdl,
    ) -> None:  # fmt: skip
        self.tiles.add(tile)
        for table in (token_of_row, tile_experts, tile_ends, counts):
            table.fill_(UNDEFINED)
        permuted.fill_(-1)
        row = number = 0
        for expert in range(local):
            own = (ids.flatten() == expert + first).nonzero().flatten()
            permuted.view(-1)[own] = row + torch.arange(len(own), dtype=torch.int32)
            token_of_row[row : row + len(own)] = own // ids.shape[1]
            for start in range(0, len(own), tile):
                tile_experts[number], tile_ends[number] = expert, row + min(len(own), start + tile)
                number += 1
            row = number * tile
        in_use[0], tiles[0] = row, number

    def lora_fastpath_gemm(
        self, x, x_scales, weights, weights_scale, alphas, out, out_scales, token_of_row, in_use, tile_experts,
        tile_ends, tiles, tokens, top_k, tile, pdl,
    ) -> None:  # fmt: skip
        used, fp4 = int(in_use), x.dtype == torch.uint8
        if fp4:
            scales = x_scales.flatten()[scale_offsets(len(x), x_scales.shape[-1], tile)].view(torch.float8_e4m3fn)
            values, matrices = fp4_values(x, scales), fp4_values(weights, weights_scale)
        else:
            stride = tokens if token_of_row is not None else used
            scales = x_scales.flatten()[: x.shape[1] // 128 * stride].view(-1, stride).T
            values = x[:stride].double() * scales.double().repeat_interleave(128, 1)
            matrices = fp8_values(weights, weights_scale)
        for number in range(int(tiles)):
            expert, rows = int(tile_experts[number]), torch.arange(number * tile, int(tile_ends[number]))
            tokens_of = rows if token_of_row is None else token_of_row[rows].long()
            y = values[tokens_of] @ matrices[expert].T
            if alphas is not None:
                y *= alphas[expert].double()
            if out_scales is None:
                out[rows] = y.to(out.dtype)
                continue
            groups = y.view(len(y), -1, 128)
            scale = groups.abs().amax(2) / 448
            out[rows] = (groups / scale[..., None]).view(y.shape).float().to(out.dtype)
            out_scales[: out.shape[1] // 128 * used].view(-1, used)[:, rows] = scale.T.float()

    def lora_fastpath_kernels(
        self, fp4: bool, routed: bool, n: int, k: int, experts: int, tokens: int, top_k: int, tile: int
    ) -> int:
        if routed and tile == self.without:
            raise RuntimeError("No kernel found")
        return 0 if not routed and tile == self.without else 4
