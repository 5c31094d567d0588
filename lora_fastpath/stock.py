"""Everything that is read from sglang's insides: what a new release may move stands here and nowhere else."""

from __future__ import annotations

import datetime
from typing import Any

import numpy as np
import torch

from lora_fastpath.kernels.tiles import NO_ADAPTER

BACKENDS = ("csgmv", "triton")
"""lora_backend values whose layers the dense sites serve; others (torch_native, ascend) keep their own kernels."""


def capturing() -> bool:
    """True while sglang records a CUDA graph, its warm-up runs included."""
    from sglang.srt.model_executor import cuda_graph_runner

    return cuda_graph_runner.get_is_capture_mode()


def nolora_graph() -> bool:
    """True while sglang records the second graph, the one that it replays for batches without any adapter."""
    from sglang.srt.model_executor import cuda_graph_runner

    return cuda_graph_runner.get_capture_lora_variant() == "nolora"


def rows_per_request(forward_batch: Any) -> np.ndarray:
    """int [requests]: the rows that each request has in this batch. ValueError for a mode that has no such shape."""
    mode, requests = forward_batch.forward_mode, forward_batch.batch_size
    if mode.is_idle():
        return np.zeros(requests, np.int64)
    if mode.is_decode():
        return np.ones(requests, np.int64)
    if mode.is_target_verify():
        return np.full(requests, forward_batch.spec_info.draft_token_num, np.int64)
    if mode.is_extend():
        return np.asarray(forward_batch.extend_seq_lens_cpu, np.int64)
    raise ValueError(f"forward mode {mode} has no rows per request")


def may_replay(manager: Any, forward_batch: Any) -> bool:
    """True when sglang may serve this batch from a captured graph, whose kernels read the static tables."""
    return (
        forward_batch.batch_size <= getattr(manager, "max_bs_in_cuda_graph", 0)
        and forward_batch.forward_mode.is_cuda_graph()
    )


def request_slots(manager: Any, forward_batch: Any) -> tuple[list[int], dict[int, tuple[int, float]]]:
    """Adapter slot of each request, NO_ADAPTER for none; and (rank, scaling) of each slot in use.

    Only a loaded adapter of rank > 0 counts: stock turns unknown ids into slot 0 and calls rank-0 slots enabled.
    """
    slots: list[int] = []
    adapters: dict[int, tuple[int, float]] = {}
    for uid in forward_batch.lora_ids:
        slot = NO_ADAPTER
        if uid is not None and uid in manager.memory_pool.uid_to_buffer_id and uid in manager.loras:
            adapter = manager.loras[uid]
            if adapter.config.r > 0:
                slot = manager.memory_pool.get_buffer_id(uid)
                adapters[slot] = (adapter.config.r, adapter.scaling)
        slots.append(slot)
    return slots, adapters


def lora_layers(manager: Any) -> list[tuple[str, torch.nn.Module]]:
    """(module name, layer) of every layer that this manager wrapped, embedding and lm_head excepted."""
    return [item for layer in manager.lora_modules for item in layer.items()]


def unserved_mode() -> str:
    """Why this server's way of running the model is not one that the overlay serves, or ""."""
    from sglang.srt.server_args import get_global_server_args

    args = get_global_server_args()
    modes = {
        "enable_torch_compile": "torch.compile traces sglang's own LoRA layers",
        "enforce_piecewise_cuda_graph": "prefill graphs are captured without adapters",
        "enable_two_batch_overlap": "a layer sees half of the batch that was prepared",
        "enable_pdmux": "two batches are under way at once",
        "enable_dp_attention": "idle ranks run layers for batches that are not mapped",
        "enable_deterministic_inference": "kernel settings follow the batch's size, and so do a row's last bits",
    }
    for name, why in modes.items():
        if getattr(args, name, False):
            return f"--{name.replace('_', '-')} is set: {why}"
    return ""


def needs_stock_batch(manager: Any) -> str:
    """Why sglang's own per-step LoRA metadata is needed beside ours; "" when none of its kernels can run."""
    from sglang.srt.lora.layers import FusedMoEWithLoRA

    if manager.embed_tokens_module is not None or manager.lm_head_module is not None:
        return "embedding or lm_head adapters"
    for name, layer in lora_layers(manager):
        if isinstance(layer, FusedMoEWithLoRA):
            return "expert adapters"
        if name.endswith(".kv_b_proj"):
            return "kv_b_proj adapters, which absorbed MLA applies by itself"
    return ""


def adapter_buffers(layer: torch.nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    """The layer's stacked A [slots, slices * R, K] and B [slots, N, R]."""
    if hasattr(layer, "A_buffer_qkv"):
        return layer.A_buffer_qkv, layer.B_buffer_qkv
    return layer.A_buffer, layer.B_buffer


def slice_ends(layer: torch.nn.Module) -> tuple[int, ...]:
    """Where each slice of the layer's B (and of its output) ends, in columns."""
    if hasattr(layer, "output_offset_cpu"):
        return tuple(layer.output_offset_cpu.tolist()[1:])
    return tuple(layer._output_offset.tolist()[1:])  # ReplicatedLinearWithLoRA


def reduces_output(layer: torch.nn.Module) -> bool:
    """True for a row-parallel layer whose partial outputs are summed over ranks in its forward."""
    return layer.base_layer.reduce_results and layer.base_layer.tp_size > 1


def ranks_that_bound(sites: list[str], manager: Any, patience: float = 60.0) -> dict[int, list[str] | None]:
    """What each rank of the tensor-parallel group says it has bound: rank -> `sites`, None for one that does not answer.

    Through the key-value store that torch.distributed was started with, not a collective: a rank that runs without the
    overlay would leave a collective hanging. patience: seconds to wait for the others.
    """
    import torch.distributed as dist
    from sglang.srt.distributed import get_tp_group

    group = get_tp_group()
    store = dist.PrefixStore("lora_fastpath", dist.distributed_c10d._get_default_store())
    key = f"{group.unique_name}/{store.add(f'{group.unique_name}/managers/{dist.get_rank()}', 1)}"
    store.set(f"{key}/{dist.get_rank()}", ",".join(sites))
    answers: dict[int, list[str] | None] = {}
    for rank in group.ranks:
        try:
            store.wait([f"{key}/{rank}"], datetime.timedelta(seconds=patience))
            answers[rank] = store.get(f"{key}/{rank}").decode().split(",")
        except dist.DistStoreError:
            answers[rank] = None
    return answers


def all_reduce(partial: torch.Tensor) -> torch.Tensor:
    from sglang.srt.lora import layers

    return layers.tensor_model_parallel_all_reduce(partial)
