"""A toy of nothing but experts for toy_manager.make_manager: sglang's FusedMoE, its LoRA layer and its memory pool.

Adapters are per expert, or "shared outer" as sglang calls it: one A for gate and up and one B for down, used by all
experts. The routing depends on the toy's input alone, so that forward and the float64 model always take the same experts.
"""

from __future__ import annotations

import functools
import itertools
import types

import torch


class ExpertsToy(torch.nn.Module):
    """Two layers of experts with a residual, normalized before; of `ranks` ranks, `expert_ranks` groups have experts of
    their own, and the ranks of a group a shard of each.

    `full` keeps the whole weights, [layer] -> (gate_up [E, 2I, H], down [E, H, I]), the same on every rank.
    """

    # No powers of two: tails in every direction of every kernel.
    hidden, intermediate, experts, taken = 80, 48, 6, 3
    target_modules = {"gate_up_proj", "down_proj"}
    only = experts
    """How many experts the routing chooses from."""

    def __init__(
        self,
        dtype: torch.dtype,
        device: str,
        rank: int = 0,
        ranks: int = 1,
        expert_ranks: int = 1,
        shared: bool = False,
    ) -> None:
        from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE

        super().__init__()
        self.ranks, self.shared = ranks, shared
        self.config = types.SimpleNamespace(
            hidden_size=self.hidden, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4, head_dim=20,
            vocab_size=512, intermediate_size=self.intermediate, moe_intermediate_size=self.intermediate,
            num_experts=self.experts,
        )  # fmt: skip
        generator = torch.Generator().manual_seed(1)

        def random(*shape: int) -> torch.Tensor:
            return (torch.randn(*shape, generator=generator, device="cpu") * shape[-1] ** -0.5).to(device, dtype)

        self.full, self.routers = [], []
        self.model = torch.nn.Module()
        self.model.layers = torch.nn.ModuleList()
        for layer_id in range(2):
            layer = torch.nn.Module()
            layer.mlp = torch.nn.Module()
            layer.mlp.experts = FusedMoE(
                self.experts, self.hidden, self.intermediate, layer_id, top_k=self.taken, params_dtype=dtype
            )
            gate_up = random(self.experts, 2 * self.intermediate, self.hidden)
            down = random(self.experts, self.hidden, self.intermediate)
            self.full.append((gate_up, down))
            self.routers.append(4 * random(self.experts, self.hidden))
            shards = ranks // expert_ranks
            group, shard = divmod(rank, shards)
            gate_up, down = (w.chunk(expert_ranks)[group] for w in (gate_up, down))
            gate, up = (half.chunk(shards, 1)[shard] for half in gate_up.chunk(2, 1))
            gate_up, down = torch.cat([gate, up], 1), down.chunk(shards, 2)[shard]
            layer.mlp.experts.w13_weight.data.copy_(gate_up)
            layer.mlp.experts.w2_weight.data.copy_(down)
            self.model.layers.append(layer)

    def route(self, layer_id: int, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(weights, experts, logits) for the toy's input rows; in float64, so that no batch shape changes a choice."""
        logits = x.double() @ self.routers[layer_id].double().T
        logits[:, self.only :] -= 100
        weights, experts = logits.softmax(-1).topk(self.taken)
        return weights / weights.sum(-1, keepdim=True), experts, logits

    def norm(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.normalize(x, dim=-1) * self.hidden**0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from sglang.srt.distributed import tensor_model_parallel_all_reduce
        from sglang.srt.layers.moe.topk import StandardTopKOutput

        asked = x
        for layer_id, layer in enumerate(self.model.layers):
            weights, experts, logits = self.route(layer_id, asked)
            routing = StandardTopKOutput(weights.float(), experts.int(), logits.float())
            # norm gives a new tensor: sglang's layer may write its output into what it is given
            y = layer.mlp.experts(self.norm(x), routing)
            x = x + (tensor_model_parallel_all_reduce(y) if self.ranks > 1 else y)
        return x

    def adapted(self, rank: int) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
        """What an adapter of that rank has: path of a projection -> shapes of its A and B."""
        into, out, many = self.hidden, self.intermediate, self.experts
        shapes = {}
        for at in (f"model.layers.{layer}.mlp.experts" for layer in range(2)):
            if self.shared:
                shapes |= {f"{at}.{name}": ((1, rank, into), (many, out, rank)) for name in ("gate_proj", "up_proj")}
                shapes[f"{at}.down_proj"] = ((many, rank, out), (1, into, rank))
                continue
            for expert in range(many):
                for name in ("gate_proj", "up_proj"):
                    shapes[f"{at}.{expert}.{name}"] = ((rank, into), (out, rank))
                shapes[f"{at}.{expert}.down_proj"] = ((rank, out), (into, rank))
        return shapes

    def expected(self, manager, owner: list[str | None], x: torch.Tensor) -> torch.Tensor:
        """`forward` in float64, row i with adapter owner[i]."""
        asked, x = x, x.double()
        for layer_id, (gate_up, down) in enumerate(self.full):
            weights, experts, _ = self.route(layer_id, asked)
            h, out = self.norm(x), x.clone()
            for uid, expert in itertools.product(set(owner), range(self.experts)):
                mine = torch.tensor([u == uid for u in owner], device=x.device)
                rows, which = (mine[:, None] & (experts == expert)).nonzero(as_tuple=True)
                delta = functools.partial(self.delta, manager, uid, layer_id, expert)
                gate, up = (h[rows] @ gate_up[expert].double().T).chunk(2, -1)
                gate, up = gate + delta("gate", h[rows]), up + delta("up", h[rows])
                middle = torch.nn.functional.silu(gate) * up
                y = middle @ down[expert].double().T + delta("down", middle)
                out.index_add_(0, rows, weights[rows, which, None] * y)
            x = out
        return x

    def delta(
        self, manager, uid: str | None, layer_id: int, expert: int, name: str, x: torch.Tensor
    ) -> torch.Tensor | float:
        """scaling * B(A x) of one expert's projection, x [rows, in], from what the manager has read."""
        if uid is None:
            return 0.0
        adapter = manager.loras[uid]
        at = f"model.layers.{layer_id}.mlp.experts." + ("" if self.shared else f"{expert}.")
        at += "down_proj" if name == "down" else "gate_up_proj"  # sglang has stacked gate and up
        a, b = (
            next(w for n, w in adapter.layers[layer_id].weights.items() if n.endswith(f"{at}.lora_{half}.weight"))
            for half in "AB"
        )
        if self.shared:
            a, b = (w[expert if len(w) > 1 else 0] for w in (a, b))
        if name != "down":
            a, b = (w.chunk(2)[name == "up"] for w in (a, b))
        # The pool holds B with the scaling in it, in the manager's dtype; scaling is 2 here, so nothing is rounded twice.
        a, b = (w.to(x.device, manager.dtype).double() for w in (a, b))
        return adapter.scaling * (x @ a.T) @ b.T
