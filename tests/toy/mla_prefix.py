"""DeepSeek's attention, not absorbed, over cached prefixes: what it projects, against float64 LoRA; prints JSON.

sglang's own attention layer, LoRA manager and KV pool; only the attention itself is left out. No CPU has the GEMM of q_a
and kv_a for few rows, so here it is a plain product that counts its calls.
"""

from __future__ import annotations

import json
import os
import sys
import types
from pathlib import Path

os.environ["SGLANG_MAX_KV_CHUNK_CAPACITY"] = "24"  # CHUNK rows for each of three requests

import torch

sys.path.insert(0, str(Path(__file__).parent))
import toy_manager as toy
from sglang.srt.layers.communicator import AttentionInputs, get_attn_tp_context
from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool
from sglang.srt.model_executor.forward_batch_deepseek_mha_mixin import ForwardBatchDeepSeekMHAMixin
from sglang.srt.models import deepseek_v2
from sglang.srt.models.deepseek_common.attention_forward_methods import forward_mha

HIDDEN, HEADS, NOPE, ROPE, V, Q_RANK, LATENT = 128, 4, 32, 16, 48, 64, 96
CHUNK = 8
PREFIXES, LENGTHS = [20, 0, 9], [3, 5, 4]
ALL = [prefix + length for prefix, length in zip(PREFIXES, LENGTHS)]


class Model(torch.nn.Module):
    """One attention layer."""

    target_modules = {"fused_qkv_a_proj_with_mqa", "kv_b_proj"}
    wide = {
        "q_a_proj": (HIDDEN, Q_RANK),
        "kv_a_proj_with_mqa": (HIDDEN, LATENT + ROPE),
        "kv_b_proj": (LATENT, HEADS * (NOPE + V)),
    }

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = types.SimpleNamespace(
            hidden_size=HIDDEN, num_hidden_layers=1, num_attention_heads=HEADS, vocab_size=64, rms_norm_eps=1e-6,
            architectures=["DeepseekV2ForCausalLM"], q_lora_rank=Q_RANK, kv_lora_rank=LATENT, qk_rope_head_dim=ROPE,
            qk_nope_head_dim=NOPE, v_head_dim=V, num_key_value_heads=HEADS,
        )  # fmt: skip
        attention = deepseek_v2.DeepseekV2AttentionMLA(
            self.config, HIDDEN, HEADS, NOPE, ROPE, V, Q_RANK, LATENT, layer_id=0, skip_rope=True
        )
        attention.use_min_latency_fused_a_gemm = True
        self.model = torch.nn.Module()
        self.model.layers = torch.nn.ModuleList([torch.nn.Module()])
        self.model.layers[0].self_attn = attention
        self.to(dtype)
        generator = torch.Generator().manual_seed(5)
        for weight in self.parameters():
            scale = weight.shape[-1] ** -0.5 if weight.dim() > 1 else 1
            weight.data.copy_(torch.randn(weight.shape, generator=generator) * scale)

    def adapted(self, rank: int) -> dict:
        return {
            f"model.layers.0.self_attn.{name}": ((rank, into), (out, rank))
            for name, (into, out) in self.wide.items()
            if rank > 4 or name == "kv_b_proj"  # adapters of a small rank: on kv_b_proj alone
        }


class MhaBatch(ForwardBatchDeepSeekMHAMixin, toy.Batch):
    """A prefill of requests with cached prefixes."""


class Recorder(torch.nn.Module):
    """In place of the attention: keeps k and v."""

    layer_id = 0

    def __init__(self) -> None:
        super().__init__()
        self.kept = []

    def forward(self, q, k, v, forward_batch, save_kv_cache):
        self.kept.append(torch.cat([k[..., :NOPE], v], -1))
        out = q.new_zeros(len(q), HEADS, V)
        return (out, out[..., 0]) if forward_batch.mha_return_lse else out


def new_batch(uids: list[str | None], pool: MLATokenToKVPool, places: torch.Tensor) -> MhaBatch:
    batch = MhaBatch(**vars(toy.extend_batch(uids, LENGTHS, "cpu")))
    batch.extend_prefix_lens_cpu, batch.extend_prefix_lens = PREFIXES, torch.tensor(PREFIXES, dtype=torch.int32)
    batch.seq_lens = batch.seq_lens_cpu = torch.tensor(ALL)
    batch.req_pool_indices, batch.req_to_token_pool = torch.arange(3), types.SimpleNamespace(req_to_token=places)
    batch.token_to_kv_pool, batch.attn_backend = pool, types.SimpleNamespace()
    batch.out_cache_loc = torch.cat([places[i, p:n] for i, (p, n) in enumerate(zip(PREFIXES, ALL))]).long()
    return batch


def product(manager, attention, name: str, x: torch.Tensor, owners: list[str | None]) -> torch.Tensor:
    """x through one projection in float64, row i with adapter owners[i]."""
    y = x.double() @ getattr(attention, name).base_layer.weight.double().T
    for row, uid in enumerate(owners):
        weights = manager.loras[uid].layers[0].weights if uid else {}
        halves = [next((w for n, w in weights.items() if name in n and f"lora_{half}" in n), None) for half in "AB"]
        if halves[0] is None:
            continue
        a, b = (half.half().double() for half in halves)
        rank, start = len(b[0]), 0
        for piece, wide in enumerate((Q_RANK, LATENT + ROPE) if len(a) > rank else (len(b),)):
            h = a[piece * rank : (piece + 1) * rank] @ x[row].double()
            y[row, start : start + wide] += manager.loras[uid].scaling * b[start : start + wide] @ h
            start += wide
    return y


def main() -> None:
    torch.set_default_dtype(torch.float16)
    toy.start_sglang("cpu")
    model, few = Model(torch.float16), []
    manager = toy.make_manager(model, "csgmv", 4, {"a": 8, "kv_b": 4, "zero": 3}, torch.float16)
    for name, weight in manager.loras["zero"].layers[0].weights.items():
        weight.mul_(0 if "lora_B" in name else 1)
    attention = model.model.layers[0].self_attn
    attention.attn_mha = recorder = Recorder()
    forward_mha.merge_state_v2 = lambda *_: None
    deepseek_v2.dsv3_fused_a_gemm = lambda x, weight: few.append(len(x)) or x @ weight
    pool = MLATokenToKVPool(96, 1, torch.float16, LATENT, ROPE, 1, "cpu", False)
    generator = torch.Generator().manual_seed(0)
    pool.kv_buffer[0].copy_(torch.randn(pool.kv_buffer[0].shape, generator=generator))
    places = (1 + torch.randperm(96, generator=generator))[: 3 * max(ALL)].int().view(3, -1)
    hidden = torch.randn(sum(LENGTHS), HIDDEN, generator=generator).half()

    def project(uids: list[str | None], one_shot: bool) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The latents of the batch's rows [T, Q_RANK + LATENT + ROPE], and k and v of every fetch."""
        manager.fetch_new_loras(set(uids))
        batch = new_batch(uids, pool, places)
        manager.prepare_lora_batch(batch)
        inputs = AttentionInputs(hidden, batch, attention.prepare_qkv_latent)
        get_attn_tp_context().set_attn_inputs(inputs)
        recorder.kept.clear()
        latent = inputs.fetch_qkv_latent().clone()  # what follows writes into it
        way = "one_shot" if one_shot else "chunked_kv"
        prepared = getattr(attention, f"forward_normal_{way}_prepare")(None, hidden, batch, None)
        getattr(attention, f"forward_normal_{way}_core")(*prepared)
        return latent, list(recorder.kept)

    found = {"error": 0.0, "latent_error": 0.0, "moved": 1.0, "fetches": []}
    with torch.inference_mode():
        for uids in (["a", None, "kv_b"], ["kv_b", "a", None]):
            for one_shot in (True, False):
                latent, fetched = project(uids, one_shot)
                right = product(manager, attention, "fused_qkv_a_proj_with_mqa", hidden, repeated(uids, LENGTHS))
                found["latent_error"] = max(found["latent_error"], distance(latent, right))
                found["fetches"].append([len(k_and_v) for k_and_v in fetched])
                held = pool.kv_buffer[0][:, 0, :LATENT]
                for k_and_v, span in zip(fetched, spans(one_shot), strict=True):
                    x = torch.cat([held[places[i, start:end].long()] for i, (start, end) in enumerate(span)])
                    rows = repeated(uids, [end - start for start, end in span])
                    right = product(manager, attention, "kv_b_proj", x, rows)
                    base = product(manager, attention, "kv_b_proj", x, [None] * len(x))
                    found["error"] = max(found["error"], distance(k_and_v.flatten(1), right))
                    found["moved"] = min(found["moved"], distance(base, right))
        found["fused_gemms"] = len(few)
        without, zero = (project(uids, one_shot=False) for uids in (["a", None, None], ["a", "zero", None]))
        found["zero_unequal"] = [
            int((x != y).sum()) for x, y in zip([without[0], *without[1]], [zero[0], *zero[1]], strict=True)
        ]
        few.clear()
        project([None] * 3, one_shot=True)
        found["fused_gemms_without_adapters"] = len(few)
    print(json.dumps(found))


def spans(one_shot: bool) -> list[list[tuple[int, int]]]:
    """What kv_b_proj gets, call by call: from where to where of each request."""
    if one_shot:
        return [[(0, n) for n in ALL]]
    chunks = [[(min(i, p), min(i + CHUNK, p)) for p in PREFIXES] for i in range(0, max(PREFIXES), CHUNK)]
    return [list(zip(PREFIXES, ALL)), *chunks]


def repeated(uids: list[str | None], counts: list[int]) -> list[str | None]:
    return [uid for uid, count in zip(uids, counts, strict=True) for _ in range(count)]


def distance(got: torch.Tensor, right: torch.Tensor) -> float:
    return ((got.double() - right).norm() / right.norm()).item()


if __name__ == "__main__":
    main()
