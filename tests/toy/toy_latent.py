"""A toy of DeepSeek's attention projections for toy_manager.make_manager: replicated, column- and row-parallel layers.

x -> fused q_a and kv_a (on every rank whole) -> q_b and kv_b (by heads) -> their product -> o (reduced)
"""

from __future__ import annotations

import types

import torch

Q_RANK, LATENT, ROPE, NOPE, V = 48, 40, 8, 16, 24


class LatentToy(torch.nn.Module):
    """Two layers; `full` keeps the whole weights, [layer][projection] -> [out, in], the same on every rank."""

    hidden, heads = 96, 8
    target_modules = {"fused_qkv_a_proj_with_mqa", "q_b_proj", "kv_b_proj", "o_proj"}
    shapes = {
        "q_a_proj": (Q_RANK, hidden),
        "kv_a_proj_with_mqa": (LATENT + ROPE, hidden),
        "q_b_proj": (heads * (NOPE + ROPE), Q_RANK),
        "kv_b_proj": (heads * (NOPE + V), LATENT),
        "o_proj": (hidden, heads * V),
    }

    def __init__(self, dtype: torch.dtype, device: str, rank: int = 0, ranks: int = 1) -> None:
        from sglang.srt.layers.linear import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear

        super().__init__()
        self.config = types.SimpleNamespace(
            hidden_size=self.hidden, num_hidden_layers=2, num_attention_heads=self.heads, vocab_size=512,
            num_key_value_heads=self.heads, q_lora_rank=Q_RANK, kv_lora_rank=LATENT, qk_rope_head_dim=ROPE,
            qk_nope_head_dim=NOPE, v_head_dim=V, intermediate_size=64,
        )  # fmt: skip
        generator = torch.Generator().manual_seed(1)
        self.full = []
        self.model = torch.nn.Module()
        self.model.layers = torch.nn.ModuleList()
        for _ in range(2):
            attention = torch.nn.Module()
            bias = {"bias": False, "params_dtype": dtype}
            attention.fused_qkv_a_proj_with_mqa = ReplicatedLinear(self.hidden, Q_RANK + LATENT + ROPE, **bias)
            attention.q_b_proj = ColumnParallelLinear(Q_RANK, self.shapes["q_b_proj"][0], **bias)
            attention.kv_b_proj = ColumnParallelLinear(LATENT, self.shapes["kv_b_proj"][0], **bias)
            attention.o_proj = RowParallelLinear(self.heads * V, self.hidden, **bias)
            self.full.append(
                {
                    name: (torch.randn(s, generator=generator) * s[1] ** -0.5).to(device, dtype)
                    for name, s in self.shapes.items()
                }
            )
            full = self.full[-1]
            attention.fused_qkv_a_proj_with_mqa.weight.data.copy_(
                torch.cat([full["q_a_proj"], full["kv_a_proj_with_mqa"]])
            )
            attention.q_b_proj.weight.data.copy_(full["q_b_proj"].chunk(ranks)[rank])
            attention.kv_b_proj.weight.data.copy_(full["kv_b_proj"].chunk(ranks)[rank])
            attention.o_proj.weight.data.copy_(full["o_proj"].chunk(ranks, 1)[rank])
            layer = torch.nn.Module()
            layer.self_attn = attention
            self.model.layers.append(layer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.model.layers:
            attention = layer.self_attn
            latent = attention.fused_qkv_a_proj_with_mqa(x)[0]
            q = attention.q_b_proj(latent[:, :Q_RANK].contiguous())[0]
            kv = attention.kv_b_proj(latent[:, Q_RANK : Q_RANK + LATENT].contiguous())[0]
            x = self.normed(x + attention.o_proj(self.mixed(q, kv))[0])
        return x

    def mixed(self, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        """Stands for the attention: [T, heads * V] of every head's own q and kv."""
        q, kv = q.view(len(q), -1, NOPE + ROPE), kv.view(len(kv), -1, NOPE + V)
        return (torch.tanh(q[..., :V]) * (kv[..., NOPE:] + kv[..., :1])).flatten(1)

    def normed(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.normalize(x, dim=-1) * self.hidden**0.5

    def adapted(self, rank: int) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
        """What an adapter of that rank has: path of a projection -> shapes of its A and B."""
        return {
            f"model.layers.{layer}.self_attn.{name}": ((rank, into), (out, rank))
            for layer in range(2)
            for name, (out, into) in self.shapes.items()
        }

    def expected(self, manager, owner: list[str | None], x: torch.Tensor) -> torch.Tensor:
        """`forward` in float64, row i with adapter owner[i]."""

        def project(layer_id: int, name: str, x: torch.Tensor) -> torch.Tensor:
            y = x @ self.full[layer_id][name].double().T
            for row, uid in enumerate(owner):
                if uid is not None:
                    a, b = self.factors(manager.loras[uid], layer_id, name, manager.dtype)
                    y[row] += manager.loras[uid].scaling * (x[row] @ a.T) @ b.T
            return y

        x = x.double()
        for i in range(len(self.full)):
            q = project(i, "q_b_proj", project(i, "q_a_proj", x))
            kv = project(i, "kv_b_proj", project(i, "kv_a_proj_with_mqa", x)[:, :LATENT])
            x = self.normed(x + project(i, "o_proj", self.mixed(q, kv)))
        return x

    def factors(self, adapter, layer_id: int, name: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """A [r, in] and B [out, r] of one projection; sglang has stacked those of q_a and kv_a."""
        stacked = {"q_a_proj": 0, "kv_a_proj_with_mqa": 1}
        at = "fused_qkv_a_proj_with_mqa" if name in stacked else name
        weights = adapter.layers[layer_id].weights
        a, b = (next(w for n, w in weights.items() if at in n and f"lora_{half}" in n) for half in "AB")
        if name in stacked:
            a, b = a.chunk(2)[stacked[name]], b.split([Q_RANK, LATENT + ROPE])[stacked[name]]
        return a.to(dtype).double(), b.to(dtype).double()
