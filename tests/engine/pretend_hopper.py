#!/usr/bin/env python3
"""Import sglang's CUDA paths as on an H200 and print what came of it, as JSON: pretend_hopper.py.

{"failed": {module: error}, "sites": {site: [state, reason]}}. Needs the stub libcuda on LD_LIBRARY_PATH. What imports
here is what imports on a GPU, so the overlay's sites can be seen to bind to what they would find there.
"""

from __future__ import annotations

import importlib
import json
import sys
import types

import torch

H200 = types.SimpleNamespace(
    name="NVIDIA H200",
    major=9,
    minor=0,
    total_memory=141 << 30,
    multi_processor_count=132,
    warp_size=32,
    L2_cache_size=60 << 20,
    shared_memory_per_block_optin=232448,
    max_threads_per_multi_processor=2048,
    regs_per_multiprocessor=65536,
)
MODULES = (
    "sglang.launch_server",
    "sglang.srt.entrypoints.engine",
    "sglang.srt.managers.scheduler",
    "sglang.srt.model_executor.model_runner",
    "sglang.srt.models.qwen3",
    "sglang.srt.models.qwen3_moe",
    "sglang.srt.models.deepseek_v2",
    "sglang.srt.lora.layers",
    "sglang.srt.lora.lora_manager",
    "sglang.srt.lora.backend.triton_backend",
)


def pretend() -> None:
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: 1
    torch.cuda.current_device = lambda: 0
    torch.cuda.get_device_capability = lambda *args, **kwargs: (H200.major, H200.minor)
    torch.cuda.get_device_properties = lambda *args, **kwargs: H200
    torch.cuda.get_device_name = lambda *args, **kwargs: H200.name


def main() -> None:
    pretend()
    failed = {}
    for name in MODULES:
        try:
            importlib.import_module(name)
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {error}"
    overlay = sys.modules.get("lora_fastpath.registry")
    entries = overlay.registry.entries if overlay else {}
    print(json.dumps({"failed": failed, "sites": {n: [e.state.name, e.reason] for n, e in entries.items()}}))


if __name__ == "__main__":
    main()
