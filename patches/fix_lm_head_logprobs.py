"""Site `fix-lm-head-logprobs`: TritonLoRABackend. Prompt logprobs in chunks, with an adapter on lm_head.

sglang 0.5.12.post1 collects one piece of metadata a chunk in an attribute that is still None, so the scheduler dies of
an AttributeError. Given a list there it does the rest right, but returns an empty list of its own.
"""

from __future__ import annotations

from typing import Any


def prepare_lm_head_batch_info(wrapped: Any, backend: Any, args: tuple, kwargs: dict) -> tuple:
    backend.lm_head_pass_batch_infos = []
    whole, passes = wrapped(*args, **kwargs)
    return whole, backend.lm_head_pass_batch_infos or passes


WRAPPERS = {"TritonLoRABackend._prepare_lm_head_batch_info": prepare_lm_head_batch_info}
