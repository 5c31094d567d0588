#!/usr/bin/env python3
"""Write the engine tests' models and adapters: tiny_models.py DIR makes DIR/dense, DIR/moe, DIR/deepseek and their adapters.

The first two are Qwen3, the third is DeepSeek-V3: a dense layer, then one of routed experts and a shared one. All have
two layers and random weights of sane scale (every linear layer's output has unit variance, logits a spread of about 2),
in float16, so that the files hold exactly what the engine computes with. Sizes are small and uneven on purpose: q and
k/v have different widths, hidden and intermediate sizes are no powers of two. (sglang pads intermediate sizes to a
multiple of 32 on the CPU, and an adapter of the unpadded size no longer fits.)
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import sys

import torch
from safetensors.torch import save_file

LAYERS, HEADS, KV_HEADS, HEAD_DIM = 2, 4, 2, 16
HIDDEN, INTERMEDIATE, VOCAB = 96, 160, 256
EXPERTS, TOP_K, EXPERT_INTERMEDIATE = 8, 2, 32

ATTENTION = {
    "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
    "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
    "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
}


def gated_mlp(at: str, intermediate: int) -> dict[str, tuple[int, int]]:
    return {
        f"{at}.gate_proj": (intermediate, HIDDEN),
        f"{at}.up_proj": (intermediate, HIDDEN),
        f"{at}.down_proj": (HIDDEN, intermediate),
    }


MLP = gated_mlp("mlp", INTERMEDIATE)
EXPERT_MLP = {
    name: shape
    for expert in range(EXPERTS)
    for name, shape in gated_mlp(f"mlp.experts.{expert}", EXPERT_INTERMEDIATE).items()
}
SHARED_EXPERTS = 2
SHARED_MLP = gated_mlp("mlp.shared_experts", SHARED_EXPERTS * EXPERT_INTERMEDIATE)
HEAD = "lm_head"
Q_RANK, KV_RANK, ROPE_DIM = 40, 32, 16
MLA = {
    "self_attn.q_a_proj": (Q_RANK, HIDDEN),
    "self_attn.kv_a_proj_with_mqa": (KV_RANK + ROPE_DIM, HIDDEN),
    "self_attn.q_b_proj": (HEADS * (HEAD_DIM + ROPE_DIM), Q_RANK),
    "self_attn.kv_b_proj": (HEADS * 2 * HEAD_DIM, KV_RANK),
    "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
}
LINEARS = {
    "dense": [ATTENTION | MLP] * LAYERS,
    "moe": [ATTENTION | EXPERT_MLP] * LAYERS,
    "deepseek": [MLA | MLP, MLA | SHARED_MLP | EXPERT_MLP],
}
"""By model and decoder layer: linear layers by their path inside it, as (out, in)."""

SEEDS = {"dense": 24, "moe": 40, "deepseek": 1}
"""Chosen so that on the tests' prompts no two best tokens and no two experts at the border of the routing nearly tie:
where they do, float16 and float64 may rightly take different ones."""

EFFECT = 0.7
"""Size of an adapter's delta relative to the base layer's output: large enough to change most tokens."""


@dataclasses.dataclass(frozen=True)
class Adapter:
    rank: int
    alpha: int
    modules: tuple[str, ...]  # keys of LINEARS, of any layer, or HEAD


ALL_DENSE = (*ATTENTION, *MLP)
QV = ("self_attn.q_proj", "self_attn.v_proj")
GATE_UP = tuple(name for name in MLP | SHARED_MLP if "down" not in name)
ADAPTERS = {
    "dense": {
        "a": Adapter(8, 16, ALL_DENSE),
        "b": Adapter(16, 8, ALL_DENSE),
        "c": Adapter(4, 16, ALL_DENSE),
        "partial": Adapter(16, 16, ("self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj")),
        "qv": Adapter(6, 12, QV),
        "late": Adapter(3, 6, ALL_DENSE),
        "later": Adapter(16, 32, ALL_DENSE),
        "head": Adapter(8, 16, (*QV, HEAD)),
    },
    "moe": {
        "a": Adapter(8, 16, tuple(ATTENTION)),
        "b": Adapter(16, 8, tuple(ATTENTION)),
        "qv": Adapter(4, 8, QV),
        "late": Adapter(3, 6, tuple(ATTENTION)),
        "experts": Adapter(8, 16, (*ATTENTION, *EXPERT_MLP)),
        "experts2": Adapter(4, 16, (*ATTENTION, *EXPERT_MLP)),
        "only_experts": Adapter(16, 16, tuple(EXPERT_MLP)),
    },
    "deepseek": {
        "a": Adapter(8, 16, (*MLA, *GATE_UP)),
        "b": Adapter(4, 8, ("self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa", "self_attn.q_b_proj")),
        "kv_b": Adapter(16, 16, ("self_attn.kv_b_proj",)),
        "experts": Adapter(8, 16, (*MLA, *MLP, *SHARED_MLP, *EXPERT_MLP)),
        "experts2": Adapter(4, 16, (*MLP, *SHARED_MLP, *EXPERT_MLP)),
        "only_experts": Adapter(16, 16, tuple(EXPERT_MLP)),
    },
}
"""By model. `partial` and `qv` leave modules alone; `late` and `later` are loaded while serving."""


NO_SCALING = {
    "rope_type": "yarn",
    "factor": 1.0,
    "original_max_position_embeddings": 2048,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
"""sglang's rotary embedding on the CPU knows only the scaled kind; with factor 1 it changes nothing."""


def config(model: str) -> dict:
    """The model's Hugging Face config."""
    common = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "initializer_range": 0.02,
        "intermediate_size": INTERMEDIATE,
        "max_position_embeddings": 2048,
        "max_window_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_hidden_layers": LAYERS,
        "num_key_value_heads": KV_HEADS,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": 1e6,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": VOCAB,
    }
    if model == "dense":
        return common
    if model == "deepseek":
        return common | {
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": "deepseek_v3",
            "first_k_dense_replace": 1,
            "kv_lora_rank": KV_RANK,
            "moe_intermediate_size": EXPERT_INTERMEDIATE,
            "moe_layer_freq": 1,
            "n_group": 4,
            "n_routed_experts": EXPERTS,
            "n_shared_experts": SHARED_EXPERTS,
            "norm_topk_prob": True,
            "num_experts_per_tok": TOP_K,
            "num_key_value_heads": HEADS,
            "q_lora_rank": Q_RANK,
            "qk_nope_head_dim": HEAD_DIM,
            "qk_rope_head_dim": ROPE_DIM,
            "rope_scaling": NO_SCALING,
            "routed_scaling_factor": 2.5,
            "scoring_func": "sigmoid",
            "topk_group": 2,
            "topk_method": "noaux_tc",
            "v_head_dim": HEAD_DIM,
        }
    return common | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "moe_intermediate_size": EXPERT_INTERMEDIATE,
        "norm_topk_prob": True,
        "num_experts": EXPERTS,
        "num_experts_per_tok": TOP_K,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
    }


def random(generator: torch.Generator, *shape: int, scale: float) -> torch.Tensor:
    return (torch.randn(*shape, generator=generator) * scale).to(torch.float16)


def model_weights(model: str) -> dict[str, torch.Tensor]:
    rng = torch.Generator().manual_seed(SEEDS[model])
    weights = {
        "model.embed_tokens.weight": random(rng, VOCAB, HIDDEN, scale=1.0),
        "lm_head.weight": random(rng, VOCAB, HIDDEN, scale=2.0 * HIDDEN**-0.5),
        "model.norm.weight": 1 + random(rng, HIDDEN, scale=0.1),
    }
    for layer, linears in enumerate(LINEARS[model]):
        at = f"model.layers.{layer}."
        for name, (out, into) in linears.items():
            weights[f"{at}{name}.weight"] = random(rng, out, into, scale=into**-0.5)
        for name, size in (("input_layernorm", HIDDEN), ("post_attention_layernorm", HIDDEN)):
            weights[f"{at}{name}.weight"] = 1 + random(rng, size, scale=0.1)
        norms = (
            {"q_a_layernorm": Q_RANK, "kv_a_layernorm": KV_RANK}
            if model == "deepseek"
            else dict.fromkeys(("q_norm", "k_norm"), HEAD_DIM)
        )
        for name, size in norms.items():
            weights[f"{at}self_attn.{name}.weight"] = 1 + random(rng, size, scale=0.1)
        if linears.keys() >= EXPERT_MLP.keys():
            weights[f"{at}mlp.gate.weight"] = random(rng, EXPERTS, HIDDEN, scale=4.0 * HIDDEN**-0.5)
            if model == "deepseek":
                weights[f"{at}mlp.gate.e_score_correction_bias"] = random(rng, EXPERTS, scale=0.3)
    return weights


def adapter_weights(model: str, adapter: Adapter, seed: int) -> dict[str, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    weights = {}
    shapes = {f"model.layers.{i}.{name}": s for i, linears in enumerate(LINEARS[model]) for name, s in linears.items()}
    for place, (out, into) in (shapes | {HEAD: (VOCAB, HIDDEN)}).items():
        if not place.endswith(adapter.modules):
            continue
        at = f"base_model.model.{place}"
        weights[f"{at}.lora_A.weight"] = random(rng, adapter.rank, into, scale=into**-0.5)
        scale = EFFECT * adapter.rank / adapter.alpha * adapter.rank**-0.5
        weights[f"{at}.lora_B.weight"] = random(rng, out, adapter.rank, scale=scale)
    return weights


def write(root: pathlib.Path) -> None:
    """Write root/MODEL/base and root/MODEL/ADAPTER for all models."""
    for model, adapters in ADAPTERS.items():
        base = root / model / "base"
        base.mkdir(parents=True, exist_ok=True)
        (base / "config.json").write_text(json.dumps(config(model)))
        (base / "generation_config.json").write_text("{}")
        save_file(model_weights(model), base / "model.safetensors")
        for seed, (name, adapter) in enumerate(adapters.items(), start=100):
            folder = root / model / name
            folder.mkdir(exist_ok=True)
            save_file(adapter_weights(model, adapter, seed), folder / "adapter_model.safetensors")
            peft = {
                "peft_type": "LORA",
                "r": adapter.rank,
                "lora_alpha": adapter.alpha,
                "bias": "none",
                "task_type": "CAUSAL_LM",
                "target_modules": sorted({module.rpartition(".")[2] for module in adapter.modules}),
            }
            (folder / "adapter_config.json").write_text(json.dumps(peft))


if __name__ == "__main__":
    write(pathlib.Path(sys.argv[1]))
