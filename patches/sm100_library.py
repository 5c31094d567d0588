"""Site `sm100-library`: FlashInfer's gen_trtllm_gen_fused_moe_sm100_module. Ours is described from what it says.

Whoever calls it gets FlashInfer's own description, and with it FlashInfer's own library, prebuilt or not.
"""

from __future__ import annotations

import functools
from typing import Any

from lora_fastpath import report, sm100_library
from lora_fastpath.registry import Unfit, registry

SITE = "sm100-library"

_described: list[Any] = []


def generate(wrapped: Any, _: Any, args: tuple, kwargs: dict) -> Any:
    spec = wrapped(*args, **kwargs)
    try:
        _described[:] = [sm100_library.describe(spec)]
    except Exception as error:  # noqa: BLE001 - FlashInfer's callers get theirs whatever we make of it
        registry.decline(SITE, f"{type(error).__name__}: {error}", failed=not isinstance(error, Unfit))
    return spec


@functools.cache
def library() -> Any:
    """Our library, compiled if it is not yet; raises Unfit with the reason if it can't be had."""
    from flashinfer.jit import fused_moe

    _described.clear()
    try:
        fused_moe.gen_trtllm_gen_fused_moe_sm100_module()  # runs `generate`
    except Exception as error:  # noqa: BLE001 - it downloads, and wants nvcc and a GPU that it knows
        raise Unfit(f"FlashInfer can't describe its SM100 module: {type(error).__name__}: {error}") from error
    if not _described:
        raise Unfit(f"site {SITE} is not in service: {registry.entries[SITE].reason}")
    if not _described[0].is_compiled:
        report.line(f"compiling {_described[0].name} with {len(_described[0].sources)} sources, once: minutes")
    return sm100_library.load(sm100_library.build(_described[0]))


WRAPPERS = {"gen_trtllm_gen_fused_moe_sm100_module": generate}
