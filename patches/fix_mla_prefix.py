"""Site `fix-mla-prefix`: DeepSeek's attention that is not absorbed, over a cached prefix. Each row by its own request's adapter.

There kv_b_proj gets rows fetched from the cache, a request's prefix among them, which are not the rows of the batch. sglang
0.5.12.post1 maps them as if they were. What is fetched goes to kv_b_proj next, so the fetch announces which rows it holds.
"""

from __future__ import annotations

from typing import Any

from lora_fastpath import stock
from lora_fastpath.gate import Path


def fetch(wrapped: Any, attention: Any, args: tuple, kwargs: dict) -> Any:
    latent, rope = wrapped(*args, **kwargs)
    projection = getattr(attention.kv_b_proj, "lora_fastpath", None)
    batch = projection.adapter_map.batch if projection is not None else None
    if batch is not None and batch.path is Path.ONE_STREAM:  # lengths of prefixes are the host's: never in a graph
        projection.adapter_map.announce(latent, stock.fetched_rows(_forward_batch(*args, **kwargs)))
    return latent, rope


def _forward_batch(*args: Any, forward_batch: Any = None, **_: Any) -> Any:
    return args[-1] if forward_batch is None else forward_batch


WRAPPERS = {
    "DeepseekMHAForwardMixin._get_mla_kv_buffer": fetch,
    "DeepseekMHAForwardMixin._get_mla_kv_buffer_from_fp8_for_nsa": fetch,
}
