"""The sites: what is wrapped, for which releases, and what the wrapped functions have to look like. Data alone."""

from __future__ import annotations

from lora_fastpath.registry import Site

RELEASES = ">=0.5.12,<0.5.13"
LAYERS = "sglang.srt.lora.layers"
MANAGER = "sglang.srt.lora.lora_manager"


def _dense(name: str, layer: str, *forward: str) -> Site:
    return Site(
        name=name,
        module=LAYERS,
        targets={f"{layer}.forward": ("self", *forward), f"{layer}.apply_lora": ("self", "base_output", "x")},
        releases=RELEASES,
        patch=f"lora_fastpath.patches.{name}",
        requires=("adapters",),
    )


SITES = (
    Site(
        name="adapters",
        module=MANAGER,
        targets={
            "LoRAManager.init_state": ("self", "max_lora_rank", "target_modules", "lora_paths"),
            "LoRAManager.init_cuda_graph_batch_info": ("self", "max_bs_in_cuda_graph", "num_tokens_per_bs"),
            "LoRAManager.prepare_lora_batch": ("self", "forward_batch"),
        },
        releases=RELEASES,
        patch="lora_fastpath.patches.adapters",
        differs=(
            "stock's csgmv backend freezes the number of segments into a CUDA graph and then skips adapters; stock gives "
            "slot 0 to requests whose adapter is unknown or of rank 0: here every row gets its own adapter, or none"
        ),
    ),
    _dense("qkv", "QKVParallelLinearWithLoRA", "input_"),
    _dense("merged", "MergedColumnParallelLinearWithLoRA", "input_"),
    _dense("column", "ColumnParallelLinearWithLoRA", "input_"),
    _dense("row", "RowParallelLinearWithLoRA", "input_", "skip_all_reduce", "forward_batch"),
    _dense("replicated", "ReplicatedLinearWithLoRA", "x"),
    Site(
        name="moe",
        module=LAYERS,
        targets={"FusedMoEWithLoRA.forward": ("self", "hidden_states", "topk_output", "kwargs")},
        releases=RELEASES,
        patch="lora_fastpath.patches.moe",
        requires=("adapters",),
        differs=(
            "with --lora-use-virtual-experts stock computes the up projection's delta with gate's A; with a TMA down "
            "configuration it adds deltas to the wrong rows; expert ids past the adapters' read another slot: here every "
            "token gets its own adapter's delta"
        ),
    ),
    Site(
        name="sm100-library",
        module="flashinfer.jit.fused_moe",
        targets={"gen_trtllm_gen_fused_moe_sm100_module": ()},
        releases=">=0.6.11,<0.6.13",
        patch="lora_fastpath.patches.sm100_library",
    ),
    Site(
        name="sm100",
        module=LAYERS,
        targets={"get_lora_layer": ("layer", "lora_backend")},
        releases=RELEASES,
        patch="lora_fastpath.patches.sm100",
        requires=("adapters", "moe", "sm100-library"),
        differs="on flashinfer_trtllm_routed stock refuses adapters on experts: here they are served",
    ),
    Site(
        name="sm100-backend",
        module="sglang.srt.server_args",
        targets={"prepare_server_args": ("argv",), "ServerArgs.__post_init__": ("self",)},
        releases=RELEASES,
        patch="lora_fastpath.patches.sm100_backend",
        requires=("adapters", "moe", "sm100-library", "sm100"),
        differs="stock has no --moe-runner-backend experimental_sgl_trtllm",
    ),
    Site(
        name="mla",
        module="sglang.srt.lora.deepseek_mla_correction",
        targets={
            "apply_q_correction": ("attn_module", "q_nope", "q_nope_out"),
            "apply_v_correction": ("attn_module", "attn_output", "attn_bmm_flat"),
        },
        releases=RELEASES,
        patch="lora_fastpath.patches.mla",
        requires=("adapters",),
    ),
    Site(
        name="fused-a",
        module="sglang.srt.models.deepseek_v2",
        targets={"DeepseekV2AttentionMLA.prepare_qkv_latent": ("self", "hidden_states", "forward_batch")},
        releases=RELEASES,
        patch="lora_fastpath.patches.fused_a",
        requires=("adapters", "replicated"),
    ),
    Site(
        name="fix-mla-prefix",
        module="sglang.srt.models.deepseek_common.attention_forward_methods.forward_mha",
        targets={
            "DeepseekMHAForwardMixin._get_mla_kv_buffer": ("self", "kv_indices", "dst_dtype", "forward_batch"),
            "DeepseekMHAForwardMixin._get_mla_kv_buffer_from_fp8_for_nsa": ("self", "forward_batch"),
        },
        releases=RELEASES,
        patch="lora_fastpath.patches.fix_mla_prefix",
        requires=("adapters", "column"),
        differs=(
            "where attention with a cached prefix is not absorbed, stock gives kv_b_proj's rows the adapters of other rows: "
            "here every row gets its own"
        ),
    ),
    Site(
        name="fix-deepseek-experts",
        module=LAYERS,
        targets={"FusedMoEWithLoRA.__init__": ("self", "base_layer", "lora_backend")},
        releases=RELEASES,
        patch="lora_fastpath.patches.fix_deepseek_experts",
        differs=(
            "with adapters on a DeepSeek model's experts stock's prefill reads an attribute that the LoRA layer lacks: here it "
            "has it"
        ),
    ),
    Site(
        name="fix-stale-experts",
        module="sglang.srt.lora.mem_pool",
        targets={
            "LoRAMemoryPool.load_lora_weight_to_buffer": (
                "self",
                "uid",
                "buffer_id",
                "lora_adapter",
                "lora_modules",
                "lora_embed_tokens_module",
                "lora_lm_head_module",
            )
        },
        releases=RELEASES,
        patch="lora_fastpath.patches.fix_stale_experts",
        differs=(
            "an adapter without expert weights inherits those of the adapter that had its slot before: here it has none"
        ),
    ),
    Site(
        name="fix-lm-head-logprobs",
        module="sglang.srt.lora.backend.triton_backend",
        targets={
            "TritonLoRABackend._prepare_lm_head_batch_info": ("self", "forward_batch", "weight_indices", "batch_info")
        },
        releases=RELEASES,
        patch="lora_fastpath.patches.fix_lm_head_logprobs",
        differs=(
            "with lora_backend triton and an adapter on lm_head, stock's scheduler dies when the logprobs of a long prompt "
            "are computed in chunks: here the request is answered"
        ),
    ),
)
