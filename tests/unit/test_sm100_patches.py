"""The SM100 backend's name, the layer that sglang refuses, and what happens where it can't be served."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

from lora_fastpath import sm100_library as description
from lora_fastpath import stock
from lora_fastpath.gate import Path as BatchPath
from lora_fastpath.patches import moe, sm100, sm100_backend, sm100_library
from lora_fastpath.registry import LoraFastpathError, Unfit
from lora_fastpath.streams import Lanes

pytest.importorskip("sglang")
ROOT = Path(__file__).resolve().parents[2]

ASK = """
import contextlib, io, json
from lora_fastpath import stock
from sglang.srt import server_args
from sglang.srt.server_args import ServerArgs, prepare_server_args
found = {}

def ask(name, call):
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            args = call()
        found[name] = [args.moe_runner_backend, args.speculative_moe_runner_backend]
    except (ValueError, SystemExit) as error:
        found[name] = f"{type(error).__name__}: {error} {said.getvalue()[-300:]}"

ours = "experimental_sgl_trtllm"
argv = ["--model-path", "dummy", "--moe-runner-backend"]
ask("elsewhere", lambda: ServerArgs(model_path="dummy", moe_runner_backend=ours))
stock.not_blackwell = lambda: ""
ask("without", lambda: ServerArgs(model_path="dummy", moe_runner_backend=ours))
ask("with", lambda: ServerArgs(model_path="dummy", moe_runner_backend=ours, enable_lora=True))
ask("paths", lambda: ServerArgs(model_path="dummy", moe_runner_backend=ours, lora_paths=["a=b"]))
ask("off", lambda: ServerArgs(model_path="dummy", moe_runner_backend=ours, lora_paths=["a=b"], enable_lora=False))
ask("speculative", lambda: ServerArgs(model_path="dummy", speculative_moe_runner_backend=ours))
ask("others", lambda: ServerArgs(model_path="dummy", moe_runner_backend="triton", enable_lora=True))
ask("command line", lambda: prepare_server_args([*argv, ours, "--enable-lora"]))
ask("unknown", lambda: prepare_server_args([*argv, "no-such"]))
print(json.dumps(found | {"choices": server_args.MOE_RUNNER_BACKEND_CHOICES}))
"""


def ask(**environ: str) -> dict:
    env = {k: v for k, v in os.environ.items() if not k.startswith("LORA_FASTPATH")} | {"PYTHONPATH": str(ROOT), **environ}
    run = subprocess.run([sys.executable, "-W", "ignore", "-c", ASK], env=env, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout.splitlines()[-1])


def test_the_backends_name():
    found = ask(LORA_FASTPATH="1", CUDA_VISIBLE_DEVICES="")
    assert found["elsewhere"].startswith(
        "ValueError: --moe-runner-backend experimental_sgl_trtllm needs a GPU of compute capability 10.x, this machine has "
        "no CUDA GPU; choose triton"
    )
    assert found["without"] == ["flashinfer_trtllm", None]
    assert found["with"] == found["paths"] == found["command line"] == ["flashinfer_trtllm_routed", None]
    assert found["off"] == ["flashinfer_trtllm", None]
    assert found["speculative"] == ["auto", "flashinfer_trtllm"]
    assert found["others"] == ["triton", None]
    assert "SystemExit" in found["unknown"] and "experimental_sgl_trtllm" in found["unknown"]
    assert "experimental_sgl_trtllm" not in found["choices"]


def test_without_the_site_the_name_is_unknown():
    for switches in ({}, {"LORA_FASTPATH": "1", "LORA_FASTPATH_SITES": "all,-moe"}):
        found = ask(**switches)
        assert "invalid choice: 'experimental_sgl_trtllm'" in found["command line"]


class Base(torch.nn.Module):
    """FusedMoE as far as sglang's LoRA layer and the site see it."""

    def __init__(self) -> None:
        super().__init__()
        self.moe_runner_config = types.SimpleNamespace(
            gemm1_alpha=None, num_fused_shared_experts=0, activation="silu", is_gated=True, no_combine=False,
            apply_router_weight_on_input=False, gemm1_clamp_limit=None, swiglu_limit=None, top_k=2,
        )  # fmt: skip
        self.quant_method = types.SimpleNamespace(
            apply=lambda layer, dispatch_output: types.SimpleNamespace(hidden_states="base")
        )
        self.dispatcher = types.SimpleNamespace(
            dispatch=lambda hidden_states, topk_output: types.SimpleNamespace(
                hidden_states=hidden_states, topk_output=topk_output
            )
        )


@pytest.fixture
def backend(monkeypatch):
    """sglang set to the backend, with experts that are sglang's as far as it looks."""
    from sglang.srt.layers.moe import utils
    from sglang.srt.layers.moe.fused_moe_triton import layer

    monkeypatch.setattr(utils, "MOE_RUNNER_BACKEND", utils.MoeRunnerBackend("flashinfer_trtllm_routed"))
    monkeypatch.setattr(layer, "FusedMoE", Base)
    monkeypatch.setattr(stock, "unserved_placement", lambda: "")
    return utils


def test_the_layer_that_sglang_refuses_is_made_whole(backend, monkeypatch):
    from sglang.srt.lora.layers import FusedMoEWithLoRA

    base, lora = Base(), types.SimpleNamespace(name="csgmv")
    with pytest.raises(NotImplementedError, match="LoRA MoE not supported for backend"):
        FusedMoEWithLoRA(base, lora)
    made = sm100.get_lora_layer(lambda *_: "stock", None, (base, lora), {})
    assert type(made) is FusedMoEWithLoRA and made.base_layer is base and made.lora_backend is lora
    assert not made.experts_shared_outer_loras and made.tp_size == 1 and made.moe_runner_config is base.moe_runner_config
    assert sm100.get_lora_layer(lambda *_: "stock", None, (torch.nn.Linear(1, 1), lora), {}) == "stock"
    monkeypatch.setattr(backend, "MOE_RUNNER_BACKEND", backend.MoeRunnerBackend("triton"))
    assert sm100.get_lora_layer(lambda **_: "stock", None, (), {"layer": base, "lora_backend": lora}) == "stock"


class Map:
    def __init__(self, batch: object) -> None:
        self.batch, self.lanes, self.sites = batch, Lanes(torch.device("cpu")), set()


def layer_of(monkeypatch, batch: object = None, **adapters) -> tuple[torch.nn.Module, Map, list]:
    """sglang's layer, attached; and what `run` was called with."""
    calls = []
    made = stock.trtllm_lora_layer(Base(), None)
    lora = types.SimpleNamespace(adapter_map=Map(batch), **adapters)
    served = types.SimpleNamespace(base="base experts", adapters=lora, shape="shape")
    monkeypatch.setattr(sm100, "serve", lambda layer, adapter_map: served)
    monkeypatch.setattr(sm100, "self_check", lambda served: "")
    monkeypatch.setattr(sm100, "registry", types.SimpleNamespace(is_bound=lambda name: True))
    monkeypatch.setattr(stock, "combine", lambda layer, out: out)
    monkeypatch.setattr(stock, "is_standard_topk", lambda topk: topk.standard)
    monkeypatch.setattr(stock, "trtllm_quantize", lambda layer, x: ("codes", "scales"))
    monkeypatch.setattr(sm100, "run", lambda *args: calls.append(args) or "with adapters")
    sm100.attach("layers.0.experts", made, lora.adapter_map, {})
    return made, lora.adapter_map, calls


def topk_of(tokens: int, standard: bool = True) -> types.SimpleNamespace:
    return types.SimpleNamespace(topk_ids=torch.zeros(tokens, 2, dtype=torch.int64), topk_weights="w", standard=standard)


def batch_of(path: BatchPath, rows: int = 3) -> types.SimpleNamespace:
    return types.SimpleNamespace(path=path, rows=rows, row_slots="slots", slot_ranks="ranks")


def test_forward(backend, monkeypatch):
    x = torch.zeros(3, 8)
    layer, adapter_map, calls = layer_of(monkeypatch, batch_of(BatchPath.BASE))
    assert layer(x, topk_of(3)) == "base" and not calls and adapter_map.sites == {"sm100"}
    for path, lanes in ((BatchPath.ONE_STREAM, False), (BatchPath.TWO_STREAMS, True)):
        adapter_map.batch = batch_of(path)
        assert layer(x, topk_of(3)) == "with adapters"
        base, _, given, codes, scales, ids, weights, slots, ranks, lane = calls.pop()
        assert (base, given is x, codes, scales, weights, slots, ranks) == (
            "base experts", True, "codes", "scales", "w", "slots", "ranks",
        )  # fmt: skip
        assert ids.dtype is torch.int32 and (lane is not None) is lanes


@pytest.mark.parametrize(("rows", "standard"), [(4, True), (3, False)])
def test_no_batch_is_served_without_its_adapters(backend, monkeypatch, rows, standard):
    layer, adapter_map, calls = layer_of(monkeypatch, batch_of(BatchPath.ONE_STREAM, rows))
    with pytest.raises(LoraFastpathError, match=rf"experts got \(3, 8\) and a SimpleNamespace, expected {rows} rows"):
        layer(torch.zeros(3, 8), topk_of(3, standard))
    adapter_map.batch = None
    with pytest.raises(LoraFastpathError, match="could not be mapped"):
        layer(torch.zeros(3, 8), topk_of(3))
    assert not calls


def test_what_cannot_be_served_is_an_error_with_a_way_out(backend, monkeypatch):
    layer, adapter_map, _ = layer_of(monkeypatch)
    ways = r"start with --moe-runner-backend triton, or leave the experts out of --lora-target-modules"

    def unfit(*_: object) -> None:
        raise Unfit("too small")

    def out_of_memory(*_: object) -> None:
        raise MemoryError("no room")

    for name, replaced, reason in (
        ("self_check", lambda served: "self-check: wrong", "self-check: wrong"),
        ("self_check", out_of_memory, "MemoryError: no room"),
        ("serve", unfit, "too small"),
        ("registry", types.SimpleNamespace(is_bound=lambda name: name != "moe"), "site moe is not in service"),
    ):
        monkeypatch.setattr(sm100, name, replaced)
        with pytest.raises(LoraFastpathError, match=rf"layers.7.experts: {reason}.*{ways}"):
            sm100.attach("layers.7.experts", layer, adapter_map, {})
    with pytest.raises(LoraFastpathError, match="layers.7.experts: --enable-dp-attention is set"):
        sm100.refuse([("other", torch.nn.Linear(1, 1)), ("layers.7.experts", layer)], "--enable-dp-attention is set")
    sm100.refuse([("other", torch.nn.Linear(1, 1))], "--enable-dp-attention is set")


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"activation": "gelu"}, "its activation is gelu"),
        ({"swiglu_limit": 7.0}, "swiglu_limit=7.0"),
        ({"num_fused_shared_experts": 1}, "fused shared experts"),
    ],
)
def test_unserved_layers(backend, change, found):
    layer = stock.trtllm_lora_layer(Base(), None)
    vars(layer.moe_runner_config).update(change)
    with pytest.raises(Unfit, match=found):
        sm100.serve(layer, None)


def adapters(dtype: torch.dtype = torch.bfloat16, intermediate: int = 128) -> moe.Experts:
    a, b = torch.zeros(2, 4, 32, 256, dtype=dtype), torch.zeros(2, 4, 2 * intermediate, 16, dtype=dtype)
    down = torch.zeros(2, 4, 16, intermediate, dtype=dtype), torch.zeros(2, 4, 256, 16, dtype=dtype)
    return moe.Experts("sm100", None, a, b, *down, None, False, False)


def weights(experts: int = 4) -> dict:
    fp8 = torch.float8_e4m3fn
    return dict(
        gemm1_weights=torch.zeros(experts, 256, 256, dtype=fp8), gemm1_weights_scale=torch.zeros(experts, 2, 2),
        gemm2_weights=torch.zeros(experts, 256, 128, dtype=fp8), gemm2_weights_scale=torch.zeros(experts, 2, 1),
        num_experts=4, local_expert_offset=4 - experts,
    )  # fmt: skip


def test_a_layer_that_fits(backend, monkeypatch):
    import sm100_layers

    monkeypatch.setattr(sm100_library, "library", sm100_layers.Library)
    monkeypatch.setattr(stock, "trtllm_weights", lambda layer: weights(2))
    monkeypatch.setattr(moe, "adapters_of", lambda *_: adapters())
    served = sm100.serve(stock.trtllm_lora_layer(Base(), None), None)
    assert (served.base.local_experts, served.base.local_expert_offset, served.base.hidden) == (2, 2, 256)
    for unfit, found in (
        (adapters(torch.float16), "torch.float16, FlashInfer's GEMMs write bfloat16"),
        (adapters(intermediate=96), r"are \(4, 256, 256\), the adapters' \(4, 192, 256\); FlashInfer pads"),
    ):
        monkeypatch.setattr(moe, "adapters_of", lambda *_, unfit=unfit: unfit)
        with pytest.raises(Unfit, match=found):
            sm100.serve(stock.trtllm_lora_layer(Base(), None), None)


def test_flashinfers_callers_get_flashinfers_description(monkeypatch):
    declined = []
    fake = types.SimpleNamespace(decline=lambda site, reason, failed: declined.append((site, reason, failed)))
    monkeypatch.setattr(sm100_library, "registry", fake)
    spec = types.SimpleNamespace(sources=[Path("other.cu")])
    assert sm100_library.generate(lambda: spec, None, (), {}) is spec
    (site, reason, failed) = declined[0]
    assert site == "sm100-library" and "has the sources other.cu, expected" in reason and not failed
    ours = types.SimpleNamespace(name="ours")
    monkeypatch.setattr(description, "describe", lambda stock: ours)
    assert sm100_library.generate(lambda: spec, None, (), {}) is spec and sm100_library._described == [ours]


def test_the_names_of_blackwell(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    for capability, found in (((9, 0), "NVIDIA H200 of 9.0"), ((10, 0), ""), ((10, 3), ""), ((12, 0), "NVIDIA H200 of 12.0")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda capability=capability: capability)
        assert stock.not_blackwell() == found
    args = types.SimpleNamespace(moe_runner_backend=sm100_backend.BACKEND, speculative_moe_runner_backend=None)
    with pytest.raises(ValueError, match="this machine has NVIDIA H200 of 12.0; choose triton"):
        sm100_backend.post_init(lambda: None, args, (), {})
