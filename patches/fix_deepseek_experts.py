"""Site `fix-deepseek-experts`: FusedMoEWithLoRA. DeepSeek's eager forward reads `moe_runner_config` of its experts.

sglang 0.5.12.post1's LoRA layer around them has no such attribute.
"""

from __future__ import annotations

from typing import Any


def init(wrapped: Any, layer: Any, args: tuple, kwargs: dict) -> None:
    wrapped(*args, **kwargs)
    layer.moe_runner_config = layer.base_layer.moe_runner_config


WRAPPERS = {"FusedMoEWithLoRA.__init__": init}
