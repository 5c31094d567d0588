"""Our own float64 model of what the engine should compute: Qwen3, Qwen3-MoE and DeepSeek-V3, one adapter a request.

Reads the same files as the engine. Written for clarity: no cache, no batching, one whole sequence at a time.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Callable

import torch
from safetensors.torch import load_file


@dataclasses.dataclass(frozen=True)
class Adapter:
    weights: dict[str, torch.Tensor]
    scaling: float

    @classmethod
    def read(cls, folder: pathlib.Path) -> Adapter:
        config = json.loads((folder / "adapter_config.json").read_text())
        prefix = "base_model.model."
        weights = {
            k.removeprefix(prefix): w.double() for k, w in load_file(folder / "adapter_model.safetensors").items()
        }
        return cls(weights, config["lora_alpha"] / config["r"])

    def delta(self, name: str, x: torch.Tensor) -> torch.Tensor | float:
        """scaling * B(A x) of linear layer `name`, 0 where the adapter has no weights for it."""
        a = self.weights.get(f"{name}.lora_A.weight")
        return 0.0 if a is None else self.scaling * (x @ a.T) @ self.weights[f"{name}.lora_B.weight"].T


NO_ADAPTER = Adapter({}, 1.0)
SIGMOID_STEEPNESS = 0.25  # at most


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention of [tokens, heads, dim], as [tokens, heads * v's dim]."""
    scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
    future = torch.ones(len(q), len(q), dtype=torch.bool).triu(1)
    weights = scores.masked_fill(future, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v).reshape(len(q), -1)


def neighbours(x: torch.Tensor) -> torch.Tensor:
    """Reorder the last dimension so that `rotate` turns what were pairs (2i, 2i + 1), as MLA's rotary embedding does.

    Scores do not depend on the order in which the turned pairs then stand.
    """
    return torch.cat([x[..., 0::2], x[..., 1::2]], -1)


class Model:
    def __init__(self, folder: pathlib.Path) -> None:
        """`folder` holds base/ and one folder an adapter."""
        self.folder = folder
        self.config = json.loads((folder / "base" / "config.json").read_text())
        self.weights = {k: w.double() for k, w in load_file(folder / "base" / "model.safetensors").items()}
        self.adapters: dict[str | None, Adapter] = {None: NO_ADAPTER}
        self.router_gap = float("inf")
        """Smallest distance seen between the last expert or group taken and the first one not taken, in router logits."""

    def adapter(self, name: str | None) -> Adapter:
        if name not in self.adapters:
            self.adapters[name] = Adapter.read(self.folder / name)
        return self.adapters[name]

    def logprobs(self, tokens: list[int], adapter: str | None) -> torch.Tensor:
        """float64 [len(tokens), vocab]: row i holds the log-probabilities of the token after tokens[: i + 1]."""
        lora = self.adapter(adapter)
        attention = self.latent_attention if "kv_lora_rank" in self.config else self.attention
        x = self.weights["model.embed_tokens.weight"][tokens]
        for layer in range(self.config["num_hidden_layers"]):
            at = f"model.layers.{layer}"
            mlp = self.feed_forward(layer)
            x = x + attention(f"{at}.self_attn", self.norm(f"{at}.input_layernorm", x), lora)
            x = x + mlp(f"{at}.mlp", self.norm(f"{at}.post_attention_layernorm", x), lora)
        return self.linear("lm_head", self.norm("model.norm", x), lora).log_softmax(-1)

    def linear(self, name: str, x: torch.Tensor, lora: Adapter) -> torch.Tensor:
        return x @ self.weights[f"{name}.weight"].T + lora.delta(name, x)

    def norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        mean_square = x.square().mean(-1, keepdim=True)
        return x / (mean_square + self.config["rms_norm_eps"]).sqrt() * self.weights[f"{name}.weight"]

    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        """Rotary embedding of [tokens, heads, head_dim]: pairs (i, i + head_dim / 2)."""
        half = x.shape[-1] // 2
        frequency = self.config["rope_theta"] ** (-torch.arange(half, dtype=torch.float64) / half)
        angle = torch.arange(len(x), dtype=torch.float64)[:, None, None] * frequency
        first, second = x[..., :half], x[..., half:]
        turned = (first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin())
        return torch.cat(turned, -1)

    def attention(self, at: str, x: torch.Tensor, lora: Adapter) -> torch.Tensor:
        heads, kv_heads, dim = (self.config[k] for k in ("num_attention_heads", "num_key_value_heads", "head_dim"))
        tokens = len(x)
        q = self.linear(f"{at}.q_proj", x, lora).view(tokens, heads, dim)
        k = self.linear(f"{at}.k_proj", x, lora).view(tokens, kv_heads, dim)
        v = self.linear(f"{at}.v_proj", x, lora).view(tokens, kv_heads, dim)
        q, k = self.rotate(self.norm(f"{at}.q_norm", q)), self.rotate(self.norm(f"{at}.k_norm", k))
        k, v = (t.repeat_interleave(heads // kv_heads, dim=1) for t in (k, v))
        return self.linear(f"{at}.o_proj", attend(q, k, v), lora)

    def latent_attention(self, at: str, x: torch.Tensor, lora: Adapter) -> torch.Tensor:
        """DeepSeek's MLA, not absorbed: keys and values made from a normalized latent, one rotary key for all heads."""
        config, tokens = self.config, len(x)
        heads, latent, v_dim = config["num_attention_heads"], config["kv_lora_rank"], config["v_head_dim"]
        nope, rope = config["qk_nope_head_dim"], config["qk_rope_head_dim"]
        q = self.norm(f"{at}.q_a_layernorm", self.linear(f"{at}.q_a_proj", x, lora))
        q_nope, q_pe = self.linear(f"{at}.q_b_proj", q, lora).view(tokens, heads, nope + rope).split([nope, rope], -1)
        kv, k_pe = self.linear(f"{at}.kv_a_proj_with_mqa", x, lora).split([latent, rope], -1)
        kv = self.linear(f"{at}.kv_b_proj", self.norm(f"{at}.kv_a_layernorm", kv), lora)
        k_nope, v = kv.view(tokens, heads, nope + v_dim).split([nope, v_dim], -1)
        q_pe, k_pe = self.rotate(neighbours(q_pe)), self.rotate(neighbours(k_pe[:, None]))
        q, k = torch.cat([q_nope, q_pe], -1), torch.cat([k_nope, k_pe.expand(-1, heads, -1)], -1)
        return self.linear(f"{at}.o_proj", attend(q, k, v), lora)

    def feed_forward(self, layer: int) -> Callable[[str, torch.Tensor, Adapter], torch.Tensor]:
        """What follows the attention in this layer: an MLP, experts, or experts with a shared one beside them."""
        if "n_routed_experts" in self.config:
            return self.mlp if layer < self.config["first_k_dense_replace"] else self.shared_and_routed_experts
        return self.experts if "num_experts" in self.config else self.mlp

    def mlp(self, at: str, x: torch.Tensor, lora: Adapter) -> torch.Tensor:
        gate, up = self.linear(f"{at}.gate_proj", x, lora), self.linear(f"{at}.up_proj", x, lora)
        return self.linear(f"{at}.down_proj", torch.nn.functional.silu(gate) * up, lora)

    def experts(self, at: str, x: torch.Tensor, lora: Adapter) -> torch.Tensor:
        router = x @ self.weights[f"{at}.gate.weight"].T
        experts = self.best(router, self.config["num_experts_per_tok"])
        return self.mix(at, x, lora, router.softmax(-1), experts)

    def shared_and_routed_experts(self, at: str, x: torch.Tensor, lora: Adapter) -> torch.Tensor:
        """DeepSeek-V3: the best groups by the sum of their two best experts, in them the best experts. A bias counts when
        experts are chosen, not when they are weighted."""
        config = self.config
        scores = (x @ self.weights[f"{at}.gate.weight"].T).sigmoid()
        choice = scores + self.weights[f"{at}.gate.e_score_correction_bias"]
        by_group = choice.view(len(x), config["n_group"], -1)
        groups = self.best(by_group.topk(2).values.sum(-1), config["topk_group"], SIGMOID_STEEPNESS)
        allowed = torch.zeros(by_group.shape[:2], dtype=torch.bool).scatter(1, groups, True)
        choice = by_group.masked_fill(~allowed[..., None], float("-inf")).flatten(1)
        experts = self.best(choice, config["num_experts_per_tok"], SIGMOID_STEEPNESS)
        routed = config["routed_scaling_factor"] * self.mix(at, x, lora, scores, experts)
        return routed + self.mlp(f"{at}.shared_experts", x, lora)

    def best(self, scores: torch.Tensor, count: int, steepness: float = 1.0) -> torch.Tensor:
        """The places of each row's `count` best scores, which change by up to `steepness` times their router logits."""
        values, places = scores.topk(count + 1)
        gap = (values[:, count - 1] - values[:, count]).min().item() / steepness
        self.router_gap = min(self.router_gap, gap)
        return places[:, :count]

    def mix(
        self, at: str, x: torch.Tensor, lora: Adapter, scores: torch.Tensor, experts: torch.Tensor
    ) -> torch.Tensor:
        """Each row's sum over its experts, weighted by their scores, which are made to add up to 1."""
        weights = scores.gather(1, experts)
        weights = weights / weights.sum(-1, keepdim=True)
        out = torch.zeros_like(x)
        for expert in experts.unique().tolist():
            rows, which = (experts == expert).nonzero(as_tuple=True)
            out[rows] += weights[rows, which, None] * self.mlp(f"{at}.experts.{expert}", x[rows], lora)
        return out
