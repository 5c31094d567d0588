"""Everything that is read from sglang's insides: what a new release may move stands here and nowhere else."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from lora_fastpath.kernels.tiles import NO_ADAPTER
from lora_fastpath.registry import Unfit

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
    if manager.embed_tokens_module is not None or manager.lm_head_module is not None:
        return "embedding or lm_head adapters"
    return ""


def absorbed_attention(manager: Any, name: str) -> torch.nn.Module | None:
    """The attention module that applies the layer `name` by itself when absorbed; None for any other layer."""
    parent, _, last = name.rpartition(".")
    return manager.base_model.get_submodule(parent) if last == "kv_b_proj" else None


def absorbed_heads(attention: torch.nn.Module) -> tuple[int, int, int]:
    """(heads on this rank, width of a head's q without position and of its k, width of a head's v)."""
    return attention.num_local_heads, attention.qk_nope_head_dim, attention.v_head_dim


def before_corrections(attention: torch.nn.Module) -> tuple[torch.nn.Module, torch.nn.Module]:
    """The modules that return what the q and the v correction work on."""
    return attention.q_proj if attention.q_lora_rank is None else attention.q_b_proj, attention.attn_mqa


def fetched_rows(forward_batch: Any) -> np.ndarray:
    """int [requests]: the rows of each request that attention over a cached prefix fetches next."""
    if forward_batch.mha_one_shot:  # all of them, prefix and new
        return np.asarray(forward_batch.seq_lens_cpu, np.int64)
    length = forward_batch.prefix_chunk_len  # of a prefix, so many tokens at a time
    start = length * forward_batch.prefix_chunk_idx
    return np.clip(np.asarray(forward_batch.extend_prefix_lens_cpu, np.int64) - start, 0, length)


def has_fused_a_gemm(attention: torch.nn.Module, x: Any) -> bool:
    """Whether sglang would multiply x [T, H] with q_a and kv_a in its GEMM for few rows, were there no adapters."""
    return attention.use_min_latency_fused_a_gemm and isinstance(x, torch.Tensor) and 1 <= x.shape[0] <= 16


def fused_a_gemm(layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """[T, N] of the LoRA layer's base weight [N, H]; without a bias, as sglang has none there."""
    from sglang.srt.models import deepseek_v2

    return deepseek_v2.dsv3_fused_a_gemm(x, layer.base_layer.weight.T)


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


def expert_buffers(layer: torch.nn.Module) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The expert layer's A [S, E or 1, 2R, H] and B [S, E, 2I, R] of gate and up, A [S, E, R, I] and B [S, E or 1, H, R]
    of down. Each is spaced at the largest rank; B has the adapter's scaling folded in."""
    return (
        layer.gate_up_lora_a_weights,
        layer.gate_up_lora_b_weights,
        layer.down_lora_a_weights,
        layer.down_lora_b_weights,
    )


def expert_pool_buffers(pool: Any) -> list[torch.Tensor]:
    """Every layer's adapter buffer for experts in a LoRAMemoryPool, [slots, ...] each."""
    buffers = (pool.A_buffer, pool.B_buffer)
    return [b for by_name in buffers for name, layers in by_name.items() if pool.is_moe_module(name) for b in layers]


def unserved_experts(layer: torch.nn.Module) -> str:
    """Why this expert layer is not one that the overlay serves, or ""."""
    from sglang.srt.server_args import get_global_server_args

    runner = layer._lora_runner
    if not runner.runner_backend.is_triton():
        return f"its experts run on {runner.runner_backend.value}, the overlay serves triton"
    if reason := unserved_placement():
        return reason
    if get_global_server_args().enable_fused_moe_sum_all_reduce:
        return "--enable-fused-moe-sum-all-reduce is set: it has no place for the down delta"
    if reason := unserved_activation(runner.config):
        return reason
    quant = layer._quant_info
    if quant.use_int8_w8a8 or quant.use_int8_w8a16 or quant.use_int4_w4a16 or quant.per_channel_quant:
        return "its experts are quantized to integers or by channel, the overlay serves FP8 blocks and no quantization"
    if quant.use_fp8_w8a8 and quant.block_shape is None:
        return "its experts are FP8 with one scale a tensor, the overlay serves FP8 blocks and no quantization"
    return ""


def expert_widths(layer: torch.nn.Module) -> tuple[int, int]:
    """Columns that the layer's two grouped GEMMs write: (2I, H)."""
    return layer._quant_info.w13_weight.shape[1], layer._quant_info.w2_weight.shape[1]


def is_standard_topk(topk_output: Any) -> bool:
    from sglang.srt.layers.moe.topk import TopKOutputChecker

    return TopKOutputChecker.format_is_standard(topk_output)


def runner_without_lora(layer: torch.nn.Module) -> Any:
    """sglang's own runner of the layer's experts, without LoRA; whatever the layer's `inplace` says, it keeps its input."""
    from sglang.srt.layers.moe.moe_runner.runner import MoeRunner

    config = dataclasses.replace(layer._lora_runner.config, inplace=False)
    return MoeRunner(layer._lora_runner.runner_backend, config, lora_enabled=True)  # not the op that CUDA alone has


def combine(layer: torch.nn.Module, hidden_states: torch.Tensor) -> torch.Tensor:
    from sglang.srt.layers.moe.token_dispatcher.standard import StandardCombineInput

    return layer.base_layer.dispatcher.combine(combine_input=StandardCombineInput(hidden_states=hidden_states))


def activate(gate_up: torch.Tensor, out: torch.Tensor) -> None:
    """sglang's SwiGLU on a GPU: gate_up [P, 2I], out [P, I]."""
    from sglang.srt.layers.moe.moe_runner.triton_utils import fused_moe

    fused_moe.silu_and_mul(gate_up, out)


def quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """sglang's FP8 codes [T, K] of x and their scales [T, K / 128], as its grouped GEMMs of FP8 blocks make them."""
    from sglang.srt.layers.moe.moe_runner.triton_utils import fused_moe_triton_kernels

    return fused_moe_triton_kernels.sglang_per_token_group_quant_fp8(x, 128)


def has_fp8_blocks(layer: torch.nn.Module) -> bool:
    """Whether the layer's grouped GEMMs quantize their input, 128 columns at a time."""
    quant = layer._quant_info
    return bool(quant.use_fp8_w8a8 and quant.block_shape and quant.block_shape[1] == 128)


@contextlib.contextmanager
def _instead(module: Any, name: str, ours: Callable | None) -> Iterator[None]:
    """While sglang runs one call of ours, module.name is `ours` (None: sglang's own)."""
    if ours is None:
        yield
        return
    own = getattr(module, name)
    setattr(module, name, ours)
    try:
        yield
    finally:
        setattr(module, name, own)


def _quantized(x: torch.Tensor, codes: tuple | None) -> contextlib.AbstractContextManager:
    """Within it a grouped GEMM of x takes `codes` and does not quantize x again."""
    from sglang.srt.layers.moe.moe_runner.triton_utils import fused_moe_triton_kernels

    name = "sglang_per_token_group_quant_fp8"
    if codes is None:
        return _instead(fused_moe_triton_kernels, name, None)
    own = getattr(fused_moe_triton_kernels, name)

    def given(asked: torch.Tensor, *args: Any, **options: Any) -> tuple:
        return codes if asked is x else own(asked, *args, **options)

    return _instead(fused_moe_triton_kernels, name, given)


class ExpertGemms:
    """sglang's two grouped GEMMs of one expert layer and one batch, and the alignment that they share.

    Down GEMMs tuned for TMA run without it: with it the first GEMM's rows are in sorted order, where sglang's own LoRA
    hooks (and ours) expect them in the order of the tokens.

    align: takes the place of sglang's alignment, (topk_ids, block size, experts) -> (pairs sorted by expert, each
    block's expert, how many entries are in use).
    """

    def __init__(self, layer: torch.nn.Module, dispatched: Any, align: Callable | None = None) -> None:
        from sglang.srt.layers.moe.moe_runner.triton_utils import fused_moe

        self._sglang, self._config, self._quant = fused_moe, layer._lora_runner.config, layer._quant_info
        topk = dispatched.topk_output
        self._x, self._top_k = dispatched.hidden_states, topk.topk_ids.shape[1]
        fields = (
            "use_fp8_w8a8",
            "use_int8_w8a8",
            "use_int8_w8a16",
            "use_int4_w4a16",
            "per_channel_quant",
            "block_shape",
        )
        quant = {name: getattr(self._quant, name) for name in fields}
        with _instead(fused_moe, "moe_align_block_size", align):
            self._gate_up_config, self._down_config, _, *alignment = fused_moe._prepare_fused_moe_run(
                self._x, self._quant.w13_weight, self._quant.w2_weight, topk.topk_ids, **quant
            )
        self._routing = (topk.topk_weights, topk.topk_ids, *alignment)
        config = self._config
        self._shared = quant | {
            "compute_type": fused_moe.tl.bfloat16 if self._x.dtype == torch.bfloat16 else fused_moe.tl.float16,
            "filter_expert": config.num_experts is None or config.num_experts != config.num_local_experts,
        }

    def blocks(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
        """Pairs sorted by expert into blocks, each block's expert, how many entries are in use, and the block size."""
        return (*self._routing[2:], self._gate_up_config["BLOCK_SIZE_M"])

    @property
    def scaling(self) -> float:
        """What the sum over experts is multiplied with."""
        return 1.0 if self._config.routed_scaling_factor is None else self._config.routed_scaling_factor

    def gate_up(self, out: torch.Tensor, codes: tuple | None = None) -> None:
        """out [P, 2I] = x times each pair's expert. codes: what `quantize` would give for x, if it has been made."""
        quant = self._quant
        with _quantized(self._x, codes):
            self._sglang.invoke_fused_moe_kernel(
                self._x, quant.w13_weight, quant.b13, out, quant.a13_scale, quant.w13_scale, quant.w13_zp,
                *self._routing, False, self._top_k, self._gate_up_config, **self._shared,
            )  # fmt: skip

    def down(self, activated: torch.Tensor, out: torch.Tensor, codes: tuple | None = None) -> None:
        """out [T, top_k, H] = the routing weight times activated [P, I] times each pair's expert."""
        quant = self._quant
        with _quantized(activated, codes):
            self._sglang.invoke_fused_moe_kernel(
                activated, quant.w2_weight, quant.b2, out, quant.a2_scale, quant.w2_scale, quant.w2_zp,
                *self._routing, True, 1, self._down_config or self._gate_up_config,
                router_topk=self._top_k, **self._shared,
            )  # fmt: skip

    def sums_in_order(self) -> bool:
        """Whether the reduction below adds a token's experts in their order, in float32.

        torch.compile unrolls sums of up to 8; it takes longer ones in an order of its own.
        """
        if not self._sglang._is_cuda:
            return not self._sglang._has_vllm_ops
        return len(self._x) > 32 or self._top_k <= 8

    def sum_over_experts(self, y: torch.Tensor) -> torch.Tensor:
        """[T, H] from [T, top_k, H], by the reduction that sglang uses for a batch of this size."""
        out, scaling = torch.empty_like(self._x), self.scaling
        if not self._sglang._is_cuda and self._sglang._has_vllm_ops:
            self._sglang.vllm_ops.moe_sum(y, out)  # without the scaling, as sglang has it there
        elif not self._sglang._is_cuda:
            self._sglang.moe_sum_reduce_triton(y, out, scaling)
        elif y.shape[1] == 1 and scaling == 1.0:
            out.copy_(y[:, 0])
        elif y.shape[1] == 2 and scaling == 1.0:
            torch.add(y[:, 0], y[:, 1], out=out)
        elif len(y) <= 32:
            self._sglang.moe_sum_reduce_torch_compile(y, out, scaling)
        else:
            self._sglang.moe_sum_reduce(y, out, scaling)
        return out


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


def align(
    topk_ids: torch.Tensor, block_size: int, experts: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pairs [T, top_k] sorted by expert into blocks, each block's expert, how many entries are in use; on a GPU."""
    from sglang.srt.layers.moe.moe_runner.triton_utils.moe_align_block_size import moe_align_block_size

    return moe_align_block_size(topk_ids, block_size, experts)


def runs_on_trtllm(layer: torch.nn.Module | None) -> bool:
    """Whether a base layer's experts run on FlashInfer's TRT-LLM-gen kernels, routed by sglang."""
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
    from sglang.srt.layers.moe.utils import get_moe_runner_backend

    return isinstance(layer, FusedMoE) and get_moe_runner_backend().is_flashinfer_trtllm_routed()


def trtllm_lora_layer(layer: torch.nn.Module, lora_backend: Any) -> torch.nn.Module:
    """sglang's LoRA layer around such experts. sglang refuses it as the last thing of its set-up, when the layer is whole."""
    from sglang.srt.lora.layers import FusedMoEWithLoRA

    made = FusedMoEWithLoRA.__new__(FusedMoEWithLoRA)
    with contextlib.suppress(NotImplementedError):
        made.__init__(layer, lora_backend)
    made.moe_runner_config, made._quant_info = layer.moe_runner_config, None
    return made


def trtllm_weights(layer: torch.nn.Module) -> dict[str, Any]:
    """A base layer's experts in the terms of kernels/sm100.py; raises Unfit if they are quantized in another way."""
    from sglang.srt.layers.quantization.fp8 import Fp8MoEMethod
    from sglang.srt.layers.quantization.modelopt_quant import ModelOptNvFp4FusedMoEMethod

    method = layer.quant_method
    ours = {
        "gemm1_weights": layer.w13_weight.data,
        "gemm2_weights": layer.w2_weight.data,
        "num_experts": layer.num_experts,
        "local_expert_offset": layer.moe_ep_rank * layer.num_local_experts,
    }
    if isinstance(method, Fp8MoEMethod) and method.block_quant and not method.use_mxfp8:
        scales = layer.w13_weight_scale_inv.data, layer.w2_weight_scale_inv.data
        return ours | dict(zip(("gemm1_weights_scale", "gemm2_weights_scale"), scales))
    if isinstance(method, ModelOptNvFp4FusedMoEMethod) and hasattr(layer, "g1_scale_c"):
        return ours | {
            "gemm1_weights_scale": layer.w13_weight_scale.data.view(torch.float8_e4m3fn),
            "gemm2_weights_scale": layer.w2_weight_scale.data.view(torch.float8_e4m3fn),
            "gemm1_alphas": layer.g1_alphas.data,
            "gemm2_alphas": layer.g2_alphas.data,
            "activation_scale": layer.w2_input_scale_quant.data.reshape(1),
        }
    raise Unfit(f"its experts are {type(method).__name__}'s, the overlay serves FP8 blocks of 128 and ModelOpt's NVFP4 there")


def trtllm_quantize(layer: torch.nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x as sglang hands it to a base layer's experts on that backend: codes and scales; see BaseExperts.gate_up."""
    from sglang.srt.layers.moe.moe_runner import flashinfer_trtllm

    if layer.w13_weight.dtype == torch.uint8:
        return flashinfer_trtllm.quantize_hidden_states_fp4(x, layer.w13_input_scale_quant)
    codes, scales = flashinfer_trtllm.per_token_group_quant_fp8(x, 128)
    return codes, scales.t().contiguous()


def run_base_experts(layer: torch.nn.Module, dispatched: Any) -> torch.Tensor:
    """The base experts alone, as sglang runs them without adapters."""
    return layer.quant_method.apply(layer=layer, dispatch_output=dispatched).hidden_states


def unserved_activation(config: Any) -> str:
    """Why experts with this MoeRunnerConfig are not what our activation computes, or ""."""
    if config.activation != "silu" or not config.is_gated:
        return f"its activation is {'' if config.is_gated else 'ungated '}{config.activation}, the overlay serves gated silu"
    for name in ("no_combine", "apply_router_weight_on_input", "gemm1_alpha", "gemm1_clamp_limit", "swiglu_limit"):
        if getattr(config, name):
            return f"it has {name}={getattr(config, name)}, which the overlay does not serve"
    return ""


def unserved_placement() -> str:
    """Why this server's experts and their adapters may not be on the same rank, or ""."""
    from sglang.srt.layers.moe.utils import get_moe_a2a_backend
    from sglang.srt.server_args import get_global_server_args

    if not get_moe_a2a_backend().is_none():
        return f"--moe-a2a-backend is {get_moe_a2a_backend().value}, the overlay serves none"
    args = get_global_server_args()
    if args.enable_eplb or args.ep_num_redundant_experts or args.init_expert_location not in (None, "trivial"):
        return "experts are moved or copied between ranks (EPLB), and the adapters' experts are not"
    return ""


@contextlib.contextmanager
def also_allowed(backend: str) -> Iterator[None]:
    """--moe-runner-backend and its like take this name too, while a command line is parsed."""
    from sglang.srt import server_args

    choices = server_args.MOE_RUNNER_BACKEND_CHOICES
    added = backend not in choices
    if added:
        choices.append(backend)
    try:
        yield
    finally:
        if added:
            choices.remove(backend)


def not_blackwell() -> str:
    """What stands where a GPU of compute capability 10.x is needed, or "" if there is one."""
    if not torch.cuda.is_available():
        return "no CUDA GPU"
    major, minor = torch.cuda.get_device_capability()
    return "" if major == 10 else f"{torch.cuda.get_device_name()} of {major}.{minor}"
