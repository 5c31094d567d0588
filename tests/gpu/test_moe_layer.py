"""A whole expert layer on the GPU: sglang's grouped GEMMs with our deltas around them, eager, replayed and in two streams."""

from __future__ import annotations

import dataclasses
import sys
import types
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def layers():
    """The benchmark's layers, with small experts: (BF16, FP8 blocks)."""
    sys.path[:0] = [str(ROOT / "benchmarks")]
    try:
        import moe_layers
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))
    from lora_fastpath.streams import Lanes

    moe_layers.start_sglang()
    torch.manual_seed(0)
    lanes = Lanes(torch.device("cuda"))
    moe_layers.MODELS |= {"small-bf16": (512, 256, 16, 4, False), "small-fp8": (512, 256, 16, 4, True)}
    made = {name: moe_layers.Layer(name, 16, lanes) for name in ("small-bf16", "small-fp8")}
    return moe_layers, made


def batch_of(path: str, slots: torch.Tensor) -> types.SimpleNamespace:
    from lora_fastpath.gate import Path as GatePath

    ranks = torch.full((8,), 16, dtype=torch.int32, device="cuda")
    return types.SimpleNamespace(path=GatePath[path], rows=len(slots), row_slots=slots, slot_ranks=ranks)


def expected(layer, x: torch.Tensor, topk, slots: torch.Tensor) -> torch.Tensor:
    """The layer in float64, with the weights that the FP8 blocks stand for."""
    quant, experts = layer.sglang._quant_info, layer.experts
    w13, w2 = quant.w13_weight.double(), quant.w2_weight.double()
    if quant.use_fp8_w8a8:
        w13, w2 = w13 / 16, w2 / 16
    out = torch.zeros_like(x, dtype=torch.float64)
    for t, (slot, ids, weights) in enumerate(zip(slots.tolist(), topk.topk_ids.tolist(), topk.topk_weights.tolist())):
        for expert, weight in zip(ids, weights):
            row = x[t].double()
            gate_up = w13[expert] @ row
            if slot >= 0:
                a, b = experts.gate_up_a[slot, expert].double(), experts.gate_up_b[slot, expert].double()
                half, r = len(b) // 2, b.shape[1]
                gate_up = gate_up + torch.cat([b[:half] @ (a[:r] @ row), b[half:] @ (a[r:] @ row)])
            gate, up = gate_up.chunk(2)
            middle = torch.nn.functional.silu(gate) * up
            y = w2[expert] @ middle
            if slot >= 0:
                y = y + experts.down_b[slot, expert].double() @ (experts.down_a[slot, expert].double() @ middle)
            out[t] += weight * y
    return out


@pytest.mark.parametrize("path", ["ONE_STREAM", "TWO_STREAMS"])
@pytest.mark.parametrize("tokens", [1, 7, 64, 200])
@pytest.mark.parametrize("model,tolerance", [("small-bf16", 0.02), ("small-fp8", 0.08)])
def test_layer_is_float64(layers, model, tolerance, tokens, path):
    bench, made = layers
    layer = made[model]
    x = torch.randn(tokens, 512, device="cuda", dtype=torch.bfloat16)
    topk = bench.routing(tokens, 16, 4)
    slots = torch.arange(tokens, dtype=torch.int32, device="cuda") % 5 - 1
    slots[0] = 2
    with torch.inference_mode():
        before = x.clone()
        got = layer(x, topk, batch_of(path, slots))
        base = layer(x, topk, None)
    assert torch.equal(x, before), "the layer wrote into its input"
    right, none = expected(layer, x, topk, slots), expected(layer, x, topk, torch.full_like(slots, -1))
    assert ((none - right).norm() / right.norm()).item() > 0.3, "the adapters do not matter, so the test shows nothing"
    assert ((got.double() - right).norm() / right.norm()).item() < tolerance
    assert torch.equal(got[slots < 0], base[slots < 0]), "a token without an adapter lost its bits"


def test_routed_scaling_is_applied_once(layers):
    bench, made = layers
    layer = made["small-bf16"]
    runner = layer.sglang._lora_runner
    scaled = types.SimpleNamespace(_quant_info=layer.sglang._quant_info, _lora_runner=types.SimpleNamespace(
        config=dataclasses.replace(runner.config, routed_scaling_factor=2.5), runner_backend=runner.runner_backend))  # fmt: skip
    x, topk = torch.randn(40, 512, device="cuda", dtype=torch.bfloat16), bench.routing(40, 16, 4)
    slots = torch.zeros(40, dtype=torch.int32, device="cuda")
    from sglang.srt.layers.moe.token_dispatcher.standard import StandardDispatchOutput

    from lora_fastpath.patches import moe

    with torch.inference_mode():
        batch = batch_of("ONE_STREAM", slots)
        one = layer(x, topk, batch).float()
        more = moe.run(layer.experts, scaled, StandardDispatchOutput(x, None, topk), batch).float()
    torch.testing.assert_close(more, 2.5 * one, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("model", ["small-bf16", "small-fp8"])
def test_replay_with_any_adapters_equals_eager(layers, model):
    """Captured with no adapter; then routing, slots and inputs change under the graph, at a batch size of each kind."""
    bench, made = layers
    layer = made[model]
    for tokens in (1, 16, 100):
        x = torch.randn(tokens, 512, device="cuda", dtype=torch.bfloat16)
        topk = bench.routing(tokens, 16, 4)
        slots = torch.full((tokens,), -1, dtype=torch.int32, device="cuda")
        batch = batch_of("TWO_STREAMS", slots)
        with torch.inference_mode():
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                layer(x, topk, batch)
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, stream=stream):
                    out = layer(x, topk, batch)
            for step in range(60):
                new = bench.routing(tokens, 16, 4)
                for mine, theirs in ((topk.topk_ids, new.topk_ids), (topk.topk_weights, new.topk_weights)):
                    mine.copy_(theirs)
                x.normal_()
                slots.copy_(torch.randint(-1, 8 if step % 2 else 1, (tokens,), device="cuda"))
                graph.replay()
                assert torch.equal(out, layer(x, topk, batch)), f"{tokens} tokens, step {step}"
