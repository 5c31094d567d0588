"""A real LoRAManager of the installed sglang on a toy model of real sglang layers: no scheduler, no engine, any device.

Run in a process of its own (decode_steps.py, tensor_parallel.py, expert_parallel.py), because the overlay's hooks have to be there before sglang is imported.
"""

from __future__ import annotations

import dataclasses
import types
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from toy_experts import ExpertsToy


class Toy(torch.nn.Module):
    """Two decoder layers' worth of projections, Qwen3-like: qkv, o, gate_up, down; this rank's shard of each.

    `full` keeps the whole weights, [layer][projection] -> [out, in], the same on every rank.
    """

    hidden, heads, kv_heads, head_dim, intermediate = 256, 8, 4, 32, 384
    target_modules = {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"}
    widths = {"qkv_proj": (256, 128, 128), "o_proj": (256,), "gate_up_proj": (384, 384), "down_proj": (256,)}
    inputs = {"qkv_proj": 256, "o_proj": 256, "gate_up_proj": 256, "down_proj": 384}

    def __init__(self, dtype: torch.dtype, device: str, rank: int = 0, ranks: int = 1) -> None:
        from sglang.srt.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear

        super().__init__()
        self.config = types.SimpleNamespace(
            hidden_size=self.hidden, num_hidden_layers=2, num_attention_heads=self.heads, vocab_size=512,
            num_key_value_heads=self.kv_heads, head_dim=self.head_dim, intermediate_size=self.intermediate,
        )  # fmt: skip
        self.q_width = self.heads * self.head_dim // ranks
        self.full = []
        self.model = torch.nn.Module()
        self.model.layers = torch.nn.ModuleList()
        generator = torch.Generator().manual_seed(1)
        for _ in range(2):
            layer = torch.nn.Module()
            layer.self_attn, layer.mlp = torch.nn.Module(), torch.nn.Module()
            layer.self_attn.qkv_proj = QKVParallelLinear(
                self.hidden, self.head_dim, self.heads, self.kv_heads, bias=False, params_dtype=dtype
            )
            layer.self_attn.o_proj = RowParallelLinear(
                self.heads * self.head_dim, self.hidden, bias=False, params_dtype=dtype
            )
            layer.mlp.gate_up_proj = MergedColumnParallelLinear(
                self.hidden, [self.intermediate] * 2, bias=False, params_dtype=dtype
            )
            layer.mlp.down_proj = RowParallelLinear(self.intermediate, self.hidden, bias=False, params_dtype=dtype)
            self.model.layers.append(layer)
            self.full.append({})
            for name, widths in self.widths.items():
                into = self.inputs[name]
                whole = (torch.randn(sum(widths), into, generator=generator, device="cpu") * into**-0.5).to(
                    device, dtype
                )
                self.full[-1][name] = whole
                if name in ("o_proj", "down_proj"):
                    shard = whole.chunk(ranks, 1)[rank]
                else:
                    shard = torch.cat([part.chunk(ranks, 0)[rank] for part in whole.split(widths)])
                module = getattr(layer.self_attn if name in ("qkv_proj", "o_proj") else layer.mlp, name)
                module.weight.data.copy_(shard)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.model.layers:
            qkv, _ = layer.self_attn.qkv_proj(x)
            o, _ = layer.self_attn.o_proj(qkv[:, : self.q_width].contiguous())
            gate, up = layer.mlp.gate_up_proj(o)[0].chunk(2, -1)
            down, _ = layer.mlp.down_proj(torch.nn.functional.silu(gate) * up)
            x = torch.nn.functional.normalize(x + down, dim=-1) * self.hidden**0.5
        return x

    def adapted(self, rank: int) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
        """What an adapter of that rank has: path of a projection -> shapes of its A and B."""
        shapes, width = {}, {"q_proj": 256, "k_proj": 128, "v_proj": 128, "o_proj": 256}
        width |= {"gate_proj": 384, "up_proj": 384, "down_proj": 256}
        for layer in range(2):
            for name, out in width.items():
                part = "self_attn" if name[0] in "qkvo" else "mlp"
                into = self.intermediate if name == "down_proj" else self.hidden
                shapes[f"model.layers.{layer}.{part}.{name}"] = ((rank, into), (out, rank))
        return shapes

    def expected(self, manager, owner: list[str | None], x: torch.Tensor) -> torch.Tensor:
        """`forward` in float64, row i with adapter owner[i]."""

        def project(layer_id: int, name: str, x: torch.Tensor) -> torch.Tensor:
            y = x @ self.full[layer_id][name].double().T
            for uid in {u for u in owner if u is not None}:
                adapter = manager.loras[uid]
                a, b = (
                    next(w for n, w in adapter.layers[layer_id].weights.items() if name in n and f"lora_{half}" in n)
                    for half in "AB"
                )
                a, b = (w.to(x.device, manager.dtype).double() for w in (a, b))
                rows = torch.tensor([u == uid for u in owner], device=x.device)
                start = 0
                for piece, wide in enumerate(self.widths[name]):
                    h = x[rows] @ a[piece * adapter.config.r : (piece + 1) * adapter.config.r].T
                    y[rows, start : start + wide] += adapter.scaling * h @ b[start : start + wide].T
                    start += wide
            return y

        x = x.double()
        for i in range(len(self.full)):
            o = project(i, "o_proj", project(i, "qkv_proj", x)[:, :256])
            gate, up = project(i, "gate_up_proj", o).chunk(2, -1)
            down = project(i, "down_proj", torch.nn.functional.silu(gate) * up)
            x = torch.nn.functional.normalize(x + down, dim=-1) * self.hidden**0.5
        return x


def start_sglang(
    device: str, rank: int = 0, ranks: int = 1, port: int = 0, expert_ranks: int = 1, **arguments: object
) -> None:
    """Join `ranks` ranks of tensor parallelism (`port`: where they meet), of which `expert_ranks` have experts of their
    own; server arguments are as by default but for `arguments`."""
    from sglang.srt import server_args
    from sglang.srt.distributed import init_distributed_environment, initialize_model_parallel

    if device == "cpu":  # a CUDA build of torch makes sglang set up NCCL, which gloo tests have no use for
        from sglang.srt.distributed.device_communicators import custom_all_reduce, pynccl

        pynccl.PyNcclCommunicator = custom_all_reduce.CustomAllreduce = lambda *args, **kwargs: types.SimpleNamespace(
            disabled=True
        )
    args = object.__new__(server_args.ServerArgs)
    for field in dataclasses.fields(server_args.ServerArgs):
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        setattr(args, field.name, None if default is dataclasses.MISSING else default)
    for name, value in ({"enable_lora_overlap_loading": False} | arguments).items():
        setattr(args, name, value)
    server_args.set_global_server_args_for_scheduler(args)
    init_distributed_environment(
        backend="nccl" if device == "cuda" else "gloo", world_size=ranks, rank=rank, local_rank=rank,
        distributed_init_method=f"tcp://127.0.0.1:{port}",
    )  # fmt: skip
    initialize_model_parallel(tensor_model_parallel_size=ranks, expert_model_parallel_size=expert_ranks)
    start_sglang.args, start_sglang.rank, start_sglang.ranks = args, rank, ranks


def make_manager(model: Toy | ExpertsToy, backend: str, slots: int, ranks: dict[str, int], dtype: torch.dtype):
    """A LoRAManager for `model` with one random adapter for each name in `ranks`, on everything `model` can adapt."""
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.lora.lora_manager import LoRAManager

    manager = LoRAManager(
        base_model=model, base_hf_config=model.config, max_loras_per_batch=slots, load_config=LoadConfig(), dtype=dtype,
        server_args=start_sglang.args, lora_backend=backend, max_lora_rank=max(ranks.values()),
        tp_size=start_sglang.ranks, tp_rank=start_sglang.rank, target_modules=model.target_modules,
    )  # fmt: skip
    for number, (name, rank) in enumerate(ranks.items()):
        load(manager, model, name, rank, number)
    return manager


def load(manager, model: Toy | ExpertsToy, name: str, rank: int, seed: int) -> None:
    """Load a random adapter of that name and rank, on everything `model` can adapt."""
    from sglang.srt.lora.lora_registry import LoRARef

    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for at, (a, b) in model.adapted(rank).items():
        tensors[f"base_model.model.{at}.lora_A.weight"] = torch.randn(a, generator=generator) * a[-1] ** -0.5
        tensors[f"base_model.model.{at}.lora_B.weight"] = torch.randn(b, generator=generator) * rank**-0.5
    modules = sorted({at.rpartition(".")[2] for at in model.adapted(rank)})
    config = {"r": rank, "lora_alpha": rank * 2, "target_modules": modules, "peft_type": "LORA", "bias": "none"}
    reference = LoRARef(lora_id=name, lora_name=name, lora_path=f"__{name}__", pinned=False)
    result = manager.load_lora_adapter_from_tensors(reference, tensors, config)
    assert result.success, result.error_message


class Batch(types.SimpleNamespace):
    """What LoRAManager reads of a ForwardBatch."""


def decode_batch(uids: list[str | None]):
    """A decode batch of one row a request, with the fields that LoRAManager reads."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    return Batch(
        forward_mode=ForwardMode.DECODE, batch_size=len(uids), lora_ids=uids, spec_info=None, return_logprob=False
    )


def extend_batch(uids: list[str | None], lengths: list[int], device: str):
    """A prefill batch with `lengths[i]` rows for request i."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    return Batch(
        forward_mode=ForwardMode.EXTEND, batch_size=len(uids), lora_ids=uids, spec_info=None, return_logprob=False,
        extend_seq_lens_cpu=lengths, extend_seq_lens=torch.tensor(lengths, dtype=torch.int32, device=device),
        extend_num_tokens=sum(lengths),
    )  # fmt: skip


def compared(model: Toy, manager, uids: list[str | None], x: torch.Tensor) -> tuple[float, float]:
    """One decode step: the relative error against float64, and how far the adapters move the output."""
    with torch.inference_mode():
        manager.fetch_new_loras(set(uids))
        batch = decode_batch(uids)  # lives as long as its forward, as in sglang
        manager.prepare_lora_batch(batch)
        got = model(x)
        right = expected(model, manager, uids, [1] * len(uids), x)
        base = expected(model, manager, [None] * len(uids), [1] * len(uids), x)
    error, moved = (((y.double() - right).norm() / right.norm()).item() for y in (got, base))
    return error, moved


def expected(
    model: Toy | ExpertsToy, manager, uids: list[str | None], lengths: list[int], x: torch.Tensor
) -> torch.Tensor:
    """The toy's output in float64, each row with its request's own adapter."""
    return model.expected(manager, [uid for uid, length in zip(uids, lengths) for _ in range(length)], x)
