"""Expert layers for the tests of Blackwell's path, on any device: weights, what a layer has to compute, and a stand-in
for FlashInfer's routing and GEMMs in torch, where there is no GPU for the real ones.
"""

from __future__ import annotations

from typing import Any

import torch

from lora_fastpath.kernels.sm100 import BaseExperts
from lora_fastpath.moe_selfcheck import MoeCase

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
UNDEFINED = -77777

ROUNDING = {False: 0.09, True: 0.16}
"""Largest error of a layer in FP8 (False) and NVFP4: gate_up (FP8 alone) and the activation are rounded."""


def scale_offsets(rows: int, groups: int, tile: int, device: Any = "cpu") -> torch.Tensor:
    """Where the NVFP4 scale of [row, group] lies, by permuting axes."""
    every = torch.arange(rows * groups, device=device)
    if tile >= 128:  # [rows / 128, groups / 4, 32, 4, 4]: a row is 32 of the third axis, then the fourth's
        return every.view(rows // 128, groups // 4, 32, 4, 4).permute(0, 3, 2, 1, 4).reshape(rows, groups)
    return every.view(rows // 8, groups // 4, 8, 4).permute(0, 2, 1, 3).reshape(rows, groups)


def fp4_values(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """codes uint8 [..., K / 2] and scales e4m3 [..., K / 16] as float64 [..., K]."""
    nibbles = torch.stack([codes & 15, codes >> 4], -1).flatten(-2).long()
    values = E2M1.double().to(codes.device)[nibbles & 7] * (1 - 2.0 * (nibbles >> 3))
    return values * scales.double().repeat_interleave(16, -1)


def fp8_values(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """codes e4m3 [E, N, K] and scales [E, N / 128, K / 128] as float64."""
    return codes.double() * scales.double().repeat_interleave(128, 1).repeat_interleave(128, 2)


def quantize_fp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [..., K] as codes and scales of 128 columns each."""
    groups = x.view(*x.shape[:-1], -1, 128)
    scale = groups.abs().amax(-1) / 448
    return (groups / scale[..., None]).view(x.shape).to(torch.float8_e4m3fn), scale


def quantize_fp4(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [..., K] as packed codes and e4m3 scales of 16 columns each."""
    groups = x.view(*x.shape[:-1], -1, 16)
    scale = (groups.abs().amax(-1) / 6).to(torch.float8_e4m3fn)
    nearest = ((groups / scale.float()[..., None]).abs()[..., None] - E2M1.to(x.device)).abs().argmin(-1)
    code = (nearest + 8 * (groups < 0)).view(*x.shape[:-1], -1, 2).to(torch.uint8)
    return code[..., 0] | code[..., 1] << 4, scale


def make_base(
    library: Any, fp4: bool, experts: int, hidden: int, half: int, dtype: torch.dtype, device: Any, **options: Any
) -> tuple[BaseExperts, torch.Tensor, torch.Tensor]:
    """Experts, and their weights: gate_up with gate first [E, 2I, H], and down [E, H, I]; float64. Nothing is shuffled."""
    generator = torch.Generator(device).manual_seed(1)

    def normal(n: int, k: int) -> torch.Tensor:
        return torch.randn(experts, n, k, generator=generator, device=device) * k**-0.5

    up, gate, down = normal(half, hidden), normal(half, hidden), normal(hidden, half)
    shared = dict(library=library, dtype=dtype, num_experts=experts) | options
    if fp4:
        w1, s1 = quantize_fp4(torch.stack([up, gate], 2).flatten(1, 2) * 16)
        w2, s2 = quantize_fp4(down * 16)
        ones = torch.ones(experts, device=device)
        base = BaseExperts(
            gemm1_weights=w1, gemm1_weights_scale=s1, gemm2_weights=w2, gemm2_weights_scale=s2, gemm1_alphas=ones / 16,
            gemm2_alphas=ones / 16 / 50, activation_scale=torch.full((1,), 50.0, device=device), **shared,
        )  # fmt: skip
        both = fp4_values(w1, s1).view(experts, half, 2, hidden) / 16
        return base, torch.cat([both[:, :, 1], both[:, :, 0]], 1), fp4_values(w2, s2) / 16
    found = []
    for matrix in (torch.cat([up, gate], 1), down):
        _, n, k = matrix.shape
        scale = torch.rand(experts, n // 128, k // 128, generator=generator, device=device) / 448 + 1e-3
        codes = matrix / scale.repeat_interleave(128, 1).repeat_interleave(128, 2)
        found.append((codes.clamp(-448, 448).to(torch.float8_e4m3fn), scale))
    (w1, s1), (w2, s2) = found
    base = BaseExperts(gemm1_weights=w1, gemm1_weights_scale=s1, gemm2_weights=w2, gemm2_weights_scale=s2, **shared)
    return base, fp8_values(w1, s1).roll(half, 1), fp8_values(w2, s2)


def quantized(base: BaseExperts, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x as BaseExperts.gate_up takes it, codes and scales, and what they are worth in float64."""
    if base.is_fp4:
        codes, scale = quantize_fp4(x.float())
        return codes, scale, fp4_values(codes, scale)
    codes, scale = quantize_fp8(x.float())
    return codes, scale.T.contiguous(), codes.double() * scale.double().repeat_interleave(128, 1)


def expected(
    base: BaseExperts, case: MoeCase, seen: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, *, lora: bool = True
) -> torch.Tensor:
    """The layer's output on the base experts' rank, float64 [T, H]. seen: the x that they got."""
    first, half, max_rank = base.local_expert_offset, base.intermediate, case.down_a.shape[2]
    weights, out = case.weights.to(torch.bfloat16).double(), torch.zeros_like(seen)
    for expert in range(first, first + base.local_experts):
        token, k = (case.topk_ids == expert).nonzero(as_tuple=True)
        both, x, slots = seen[token] @ gate_up[expert - first].T, case.x[token].double(), case.row_slots[token]
        ranks = enumerate(case.slot_ranks.tolist()) if lora else ()
        served = [(slot, rank, slots == slot) for slot, rank in ranks if rank > 0]
        for slot, rank, mine in served:
            for s in (0, 1):
                a = case.gate_up_a[slot, expert, s * max_rank :][:rank].double()
                b = case.gate_up_b[slot, expert, s * half : (s + 1) * half, :rank].double()
                both[mine, s * half : (s + 1) * half] += x[mine] @ a.T @ b.T
        gate, up = both.chunk(2, 1)
        activated = torch.nn.functional.silu(gate) * up
        y = activated @ down[expert - first].T
        for slot, rank, mine in served:
            a, b = case.down_a[slot, expert, :rank].double(), case.down_b[slot, expert, :, :rank].double()
            y[mine] += activated[mine] @ a.T @ b.T
        out.index_add_(0, token, weights[token, k][:, None] * y)
    return out


def error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Root mean square, relative."""
    return ((got.double() - wanted).pow(2).mean() / wanted.pow(2).mean()).sqrt().item()


class Library:
    """What csrc/sm100.cu does, on the CPU. What that leaves undefined is undefined here too."""

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
