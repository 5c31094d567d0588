"""Site `fix-stale-experts`: LoRAMemoryPool. An adapter without expert weights gets none.

sglang 0.5.12.post1 loads a slot's expert weights where the adapter has some, and leaves what the slot's last adapter
had where it has none.
"""

from __future__ import annotations

from typing import Any

from lora_fastpath import stock


def load_lora_weight_to_buffer(wrapped: Any, pool: Any, args: tuple, kwargs: dict) -> None:
    _clear(pool, *args, **kwargs)
    wrapped(*args, **kwargs)


def _clear(pool: Any, uid: str | None, buffer_id: int, *_: Any, **__: Any) -> None:
    if uid is not None:  # the slot of "no adapter" is cleared by sglang
        for buffer in stock.expert_pool_buffers(pool):
            buffer[buffer_id].zero_()


WRAPPERS = {"LoRAMemoryPool.load_lora_weight_to_buffer": load_lora_weight_to_buffer}
