"""Site `fused-a`: DeepseekV2AttentionMLA. The fused GEMM that sglang has for q_a and kv_a of up to 16 rows, with an adapter.

sglang 0.5.12.post1 gives it up once the layer is wrapped with LoRA, for requests without an adapter too.
"""

from __future__ import annotations

from typing import Any

import torch

from lora_fastpath import stock
from lora_fastpath.patches import dense


def prepare_qkv_latent(wrapped: Any, attention: Any, args: tuple, kwargs: dict) -> torch.Tensor:
    x = _hidden_states(*args, **kwargs)
    layer = attention.fused_qkv_a_proj_with_mqa
    projection = getattr(layer, "lora_fastpath", None)
    served = projection is not None and not projection.broken and projection.adapter_map.batch is not None
    if not served or not stock.has_fused_a_gemm(attention, x):
        return wrapped(*args, **kwargs)
    return dense.forked(layer, lambda: layer.apply_lora(stock.fused_a_gemm(layer, x), x))


def _hidden_states(hidden_states: Any, forward_batch: Any) -> Any:
    return hidden_states


WRAPPERS = {"DeepseekV2AttentionMLA.prepare_qkv_latent": prepare_qkv_latent}
