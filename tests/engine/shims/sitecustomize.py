"""What an unmodified sglang 0.5.12 lacks on a machine without a CUDA driver, put in as the modules are imported.

Stands on PYTHONPATH of the engine tests' processes alone. ENGINE_FAULT names one thing to break (faults.py).
"""

import functools
import os

import overlay_report
from import_hooks import after_import

overlay_report.install()
if os.environ.get("ENGINE_FAULT"):
    import faults

    faults.install(os.environ["ENGINE_FAULT"])


@after_import("torch")
def no_pinned_memory(torch):
    """Pinned memory needs a driver, and some metadata is asked for on "cuda" by name."""

    def on_cpu(factory):
        @functools.wraps(factory)
        def call(*args, **kwargs):
            kwargs.pop("pin_memory", None)
            if str(kwargs.get("device", "")).startswith("cuda"):
                kwargs["device"] = "cpu"
            return factory(*args, **kwargs)

        return call

    for name in ("tensor", "empty", "zeros", "ones", "full", "arange", "empty_like", "zeros_like"):
        setattr(torch, name, on_cpu(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda self, *args, **kwargs: self


def align_block_size(topk_ids, experts, block, sorted_ids, expert_ids, total, cumsum=None, pad=False):
    """sgl_kernel.moe_align_block_size in Python: (token, k) rows by expert, each expert's padded to `block` rows.

    As there, the rows of id -1 (another rank's experts) come first, in blocks of expert -1; `pad` fills all of sorted_ids
    first; and expert_ids is not written behind the last block, so nobody may read it there. The kernel's order of the
    rows within an expert is that of its atomics, here it is ascending.
    """
    import torch

    flat = topk_ids.reshape(-1)
    if pad:
        sorted_ids.fill_(flat.numel())
    row = 0
    for expert in flat.unique().tolist():
        members = (flat == expert).nonzero().flatten().to(torch.int32)
        blocks = -(-members.numel() // block)
        sorted_ids[row : row + members.numel()] = members
        expert_ids[row // block : row // block + blocks] = expert
        row += blocks * block
    total.fill_(row)


@after_import("sglang.srt.utils.common")
def device_name(module):
    module.get_device_name = lambda *args, **kwargs: "cpu"


@after_import("sglang.srt.layers.attention.torch_native_backend")
def latent_attention(module):
    """What DeepSeek's attention needs of this backend and GPU backends have: values narrower than keys (absorbed, from
    the cache), and prefill from the keys and values at hand (not absorbed, nothing cached before)."""
    import torch

    stock_attend, stock_extend = module.scaled_dot_product_attention, module.TorchNativeAttnBackend.forward_extend

    def attend(query, key, value, **options):
        missing = key.shape[-1] - value.shape[-1]
        if not missing:
            return stock_attend(query, key, value, **options)
        return stock_attend(query, key, torch.nn.functional.pad(value, (0, missing)), **options)[..., :-missing]

    def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True):
        if save_kv_cache:
            return stock_extend(self, q, k, v, layer, forward_batch)
        heads, lengths = layer.tp_q_head_num, forward_batch.extend_seq_lens_cpu
        parts = (t.view(len(t), heads, -1).transpose(0, 1).split(lengths, dim=1) for t in (q, k, v))
        out = [attend(*qkv, is_causal=True, scale=layer.scaling) for qkv in zip(*parts, strict=True)]
        return torch.cat(out, dim=1).transpose(0, 1).reshape(len(q), -1)

    module.scaled_dot_product_attention = attend
    module.TorchNativeAttnBackend.forward_extend = forward_extend


@after_import("sglang.srt.layers.moe.moe_runner.triton_utils.moe_align_block_size")
def align_for_base_experts(module):
    module.sgl_moe_align_block_size = align_block_size


@after_import("sglang.srt.layers.moe.token_dispatcher.standard")
def experts_of_other_ranks(module):
    module.get_device = lambda *args, **kwargs: "cpu"  # where the table from global to local expert ids goes


@after_import("sglang.jit_kernel.moe_align")
def align_for_expert_adapters(module):
    module.moe_align_block_size = align_block_size


@after_import("sglang.srt.lora.lora_moe_runners")
def always_sorted_rows(module):
    # The other way of aligning is a CUDA kernel.
    module._SPARSITY_FACTOR = 0


@after_import("sglang.srt.lora.triton_ops")
def expert_adapters_without_dispatcher(module):
    # The torch op is registered for CUDA alone; this is the function behind it.
    from sglang.srt.lora.triton_ops import fused_moe_lora_kernel

    module.fused_moe_lora = fused_moe_lora_kernel._fused_moe_lora
