"""Write what an engine needs to be timed: a model folder (a config, no weights) and random PEFT adapters for it.

Speed depends on sizes and layouts alone, so the base weights are sglang's dummies (load_format="dummy"). Nothing here
says anything about results: those are checked with real weights by the tests.
"""

from __future__ import annotations

import json
from pathlib import Path

FP8_BLOCKS = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}
QWEN3 = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 40960,
    "num_attention_heads": 32,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN3_MOE = {
    **QWEN3,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "decoder_sparse_step": 1,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
}
QWEN3_8B = {
    **QWEN3,
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "max_window_layers": 36,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
}
# The expert sizes of Qwen3.5-35B-A3B (256 experts, 512 wide, a shared one) in Qwen2-MoE's layer: full attention in every
# layer, where Qwen3.5 has linear attention in three of four and a vision tower, which have nothing to do with adapters
# on experts. 8 of 256 experts a token are more distinct ones a batch than 8 of 128.
QWEN2_MOE_256 = {
    "architectures": ["Qwen2MoeForCausalLM"],
    "model_type": "qwen2_moe",
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 512,  # sglang sizes the shared expert's adapter buffers by this
    "max_position_embeddings": 40960,
    "max_window_layers": 40,
    "mlp_only_layers": [],
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
    "num_attention_heads": 16,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "output_router_logits": False,
    "qkv_bias": False,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "shared_expert_intermediate_size": 512,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
DEEPSEEK = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_layer_freq": 1,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-6,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "v_head_dim": 128,
}
DEEPSEEK_V2_LITE = {
    **DEEPSEEK,
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "topk_group": 1,
    "topk_method": "greedy",
    "vocab_size": 102400,
}
# One dense layer, where DeepSeek-V3 has three of 61: of the few layers that fit, most shall be what most layers are.
DEEPSEEK_V3 = {
    **DEEPSEEK,
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "vocab_size": 129280,
}
TINY_MOE = {
    **QWEN3_MOE,
    "head_dim": 32,
    "hidden_size": 128,
    "intermediate_size": 256,
    "max_window_layers": 2,
    "moe_intermediate_size": 64,
    "num_attention_heads": 4,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "vocab_size": 1024,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# A shape is a Hugging Face config. To add one: put its config here under the name the results shall carry.
SHAPES = {
    "qwen3-30b-a3b-fp8": {**QWEN3_MOE, "quantization_config": FP8_BLOCKS},
    "qwen3-30b-a3b-bf16": QWEN3_MOE,
    "qwen3-8b-bf16": QWEN3_8B,
    "qwen2-moe-256x512-fp8": {**QWEN2_MOE_256, "quantization_config": FP8_BLOCKS},
    "deepseek-v2-lite-bf16": DEEPSEEK_V2_LITE,
    "deepseek-v3-fp8": {**DEEPSEEK_V3, "quantization_config": FP8_BLOCKS},
    "tiny-moe": TINY_MOE,  # small enough for a CPU
}
TARGETS = ("attention", "all-linear", "experts", "all")


def is_moe(config: dict) -> bool:
    return "num_experts" in config or "n_routed_experts" in config


def linears(config: dict, targets: str) -> list[tuple[str, int, int]]:
    """Modules that an adapter touches: (name, output width, input width), layer by layer.

    `all-linear` leaves the experts out (that is what PEFT's "all-linear" does with fused experts), `all` has them.
    Raises ValueError where the model has no such modules.
    """
    if targets == "experts" and not is_moe(config):
        raise ValueError(f"targets={targets!r}: this model has no such layers")
    return [
        (f"model.layers.{layer}.{name}", out, into)
        for layer in range(config["num_hidden_layers"])
        for name, out, into in _of_layer(config, targets, layer)
    ]


def _of_layer(config: dict, targets: str, layer: int) -> list[tuple[str, int, int]]:
    attention = _latent_attention(config) if "kv_lora_rank" in config else _attention(config)
    hidden, wide = config["hidden_size"], config.get("moe_intermediate_size", 0)
    mlp: list[tuple[str, int, int]] = []
    experts: list[tuple[str, int, int]] = []
    if not is_moe(config) or layer < config.get("first_k_dense_replace", 0):
        mlp = _gated("mlp", hidden, config["intermediate_size"])
    else:
        if shared := config.get("shared_expert_intermediate_size"):
            mlp = _gated("mlp.shared_expert", hidden, shared)
        elif shared := config.get("n_shared_experts"):
            mlp = _gated("mlp.shared_experts", hidden, shared * wide)
        for e in range(config.get("num_experts") or config["n_routed_experts"]):
            experts += _gated(f"mlp.experts.{e}", hidden, wide)
    return {
        "attention": attention,
        "all-linear": attention + mlp,
        "experts": experts,
        "all": attention + mlp + experts,
    }[targets]


def _attention(config: dict) -> list[tuple[str, int, int]]:
    hidden, heads, kv = config["hidden_size"], config["num_attention_heads"], config["num_key_value_heads"]
    head = config["head_dim"]
    return [
        ("self_attn.q_proj", heads * head, hidden),
        ("self_attn.k_proj", kv * head, hidden),
        ("self_attn.v_proj", kv * head, hidden),
        ("self_attn.o_proj", hidden, heads * head),
    ]


def _latent_attention(config: dict) -> list[tuple[str, int, int]]:
    """DeepSeek's. Without a q_lora_rank sglang 0.5.12.post1 loads no adapter on q_proj and wraps no kv_a_proj_with_mqa."""
    hidden, heads, latent = config["hidden_size"], config["num_attention_heads"], config["kv_lora_rank"]
    nope, rope, v = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    always = [
        ("self_attn.kv_b_proj", heads * (nope + v), latent),
        ("self_attn.o_proj", hidden, heads * v),
    ]
    if not (rank := config["q_lora_rank"]):
        return always
    return [
        ("self_attn.q_a_proj", rank, hidden),
        ("self_attn.q_b_proj", heads * (nope + rope), rank),
        ("self_attn.kv_a_proj_with_mqa", latent + rope, hidden),
        *always,
    ]


def _gated(prefix: str, hidden: int, wide: int) -> list[tuple[str, int, int]]:
    return [
        (f"{prefix}.gate_proj", wide, hidden),
        (f"{prefix}.up_proj", wide, hidden),
        (f"{prefix}.down_proj", hidden, wide),
    ]


def write_model(folder: Path, shape: str, layers: int | None) -> dict:
    """Write FOLDER/config.json for `shape` cut to `layers` layers (None: all); returns the config."""
    config = dict(SHAPES[shape])
    config["num_hidden_layers"] = layers or config["num_hidden_layers"]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    tokens = {key: config[key] for key in ("bos_token_id", "eos_token_id")}
    (folder / "generation_config.json").write_text(json.dumps(tokens))
    return config


def write_adapters(root: Path, config: dict, targets: str, rank: int, count: int) -> dict[str, str]:
    """Write ROOT/adapter0.. (bfloat16, lora_alpha = 2 * rank); returns name -> folder. Reuses what an equal call wrote.

    The adapters' weights are hard links to one file: an engine reads each into its own memory and slot all the same, and
    eight adapters on 256 experts of 16 layers are then 1 GB to write and to keep in the page cache, not 8.
    """
    modules = linears(config, targets)
    wanted = json.dumps([config, targets, rank, count], sort_keys=True)
    stamp = root / "adapters.json"
    folders = {f"adapter{k}": str(root / f"adapter{k}") for k in range(count)}
    if stamp.exists() and stamp.read_text() == wanted:
        return folders

    import torch
    from safetensors.torch import save_file

    # Every matrix is a window of one pool of random numbers: drawing billions of them would take minutes.
    # The pool is scaled so that deltas are small beside the base outputs, as a trained adapter's are.
    biggest = rank * max(max(out, into) for _, out, into in modules)
    pool = (torch.randn(max(1 << 22, 2 * biggest), generator=torch.Generator().manual_seed(0)) * 0.02).to(torch.bfloat16)

    starts = torch.Generator().manual_seed(1)

    def window(rows: int, columns: int) -> torch.Tensor:
        start = int(torch.randint(pool.numel() - rows * columns + 1, (1,), generator=starts))
        return pool[start : start + rows * columns].view(rows, columns).clone()

    tensors = {}
    for name, out, into in modules:
        tensors[f"base_model.model.{name}.lora_A.weight"] = window(rank, into)
        tensors[f"base_model.model.{name}.lora_B.weight"] = window(out, rank)
    root.mkdir(parents=True, exist_ok=True)
    stamp.unlink(missing_ok=True)  # a call cut short from here on leaves nothing to reuse
    save_file(tensors, root / "adapter_model.safetensors")
    for folder in map(Path, folders.values()):
        folder.mkdir(exist_ok=True)
        link = folder / "adapter_model.safetensors"
        link.unlink(missing_ok=True)
        link.hardlink_to(root / "adapter_model.safetensors")
        peft = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "r": rank,
            "lora_alpha": 2 * rank,
            "lora_dropout": 0.0,
            "bias": "none",
            "target_modules": sorted({name.rsplit(".", 1)[1] for name, _, _ in modules}),
        }
        (folder / "adapter_config.json").write_text(json.dumps(peft))
    stamp.write_text(wanted)
    return folders
