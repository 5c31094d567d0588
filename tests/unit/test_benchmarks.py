"""The measuring scripts: what they start, what they do with an engine that fails, what they make of the numbers."""

from __future__ import annotations

import dataclasses
import gzip
import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import engine_ab  # noqa: E402
import engine_pool  # noqa: E402
import model_folder  # noqa: E402
import real_weights  # noqa: E402
import sm100_model  # noqa: E402
from kernel_table import kernel_table  # noqa: E402

sys.path.remove(str(ROOT / "benchmarks"))

FAKE_WORKER = """
import json, os, sys, time
settings = json.loads(sys.stdin.readline())
print(json.dumps(settings["start"]), flush=True)
for line in sys.stdin:
    op = json.loads(line)["op"]
    if op == "die":
        print("last words", file=sys.stderr, flush=True)
        os._exit(3)
    if op == "hang":
        time.sleep(60)
    if op == "exit":
        break
    good = op != "refuse"
    print(json.dumps({"ok": good, "ms": [2.0], "tokens": []} if good else {"ok": False, "error": "no"}), flush=True)
"""


@pytest.fixture
def start(tmp_path, monkeypatch):
    """start(name, first answer): an EngineProcess whose engine is the script above."""
    worker = tmp_path / "worker.py"
    worker.write_text(FAKE_WORKER)
    monkeypatch.setattr(engine_pool, "WORKER", worker)
    engines = []

    def make(name: str, answer: dict | None = None) -> engine_pool.EngineProcess:
        engine = engine_pool.EngineProcess(
            name, {"start": answer or {"ok": True}}, dict(os.environ), tmp_path / f"{name}.log"
        )
        engines.append(engine)
        return engine

    yield make
    engine_pool.close_all(engines, patience=1)
    assert all(engine.process.poll() is not None for engine in engines)


class TestEngines:
    def test_answers(self, start):
        engine = start("a")
        engine.wait_until_up(20)
        assert engine.ask("decode", 20) == {"ms": [2.0], "tokens": []}
        assert engine.alive and engine.start_seconds > 0

    def test_a_refused_request_leaves_the_engine_alive(self, start):
        engine = start("a")
        engine.wait_until_up(20)
        with pytest.raises(engine_pool.EngineError, match="a: refuse: no"):
            engine.ask("refuse", 20)
        assert engine.ask("decode", 20)["ms"] == [2.0]

    def test_a_dead_engine_shows_its_last_words(self, start):
        engine = start("a")
        engine.wait_until_up(20)
        with pytest.raises(engine_pool.EngineError, match="(?s)a: its process ended during die.*last words"):
            engine.ask("die", 20)
        assert not engine.alive
        with pytest.raises(engine_pool.EngineError, match="not running"):
            engine.ask("decode", 20)

    def test_a_hung_engine_is_ended(self, start):
        engine = start("a")
        engine.wait_until_up(20)
        began = time.monotonic()
        with pytest.raises(engine_pool.EngineError, match="no answer to hang within 1 s"):
            engine.ask("hang", 1)
        assert engine.process.poll() is not None and time.monotonic() - began < 20

    def test_an_engine_that_does_not_start(self, start):
        engine = start("a", {"ok": False, "error": "out of memory"})
        with pytest.raises(engine_pool.EngineError, match="out of memory"):
            engine.wait_until_up(20)
        assert not engine.alive

    def test_the_others_are_measured_on(self, start):
        engines = [start(name) for name in "abc"]
        for engine in engines:
            engine.wait_until_up(20)
        ops = iter(["decode", "die", "decode"] + ["decode"] * 10)
        samples, _ = engine_ab.sample_in_turn(engines, 3, lambda engine: engine.ask(next(ops), 20))
        assert samples == {"a": [2.0] * 3, "c": [2.0] * 3}
        assert [engine.alive for engine in engines] == [True, False, True]

    def test_rounds_alternate_in_direction(self):
        order = []

        def ask(engine):
            order.append(engine.name)
            return {"ms": [1.0], "tokens": []}

        engine_ab.sample_in_turn([SimpleNamespace(name=n, alive=True) for n in "abc"], 3, ask)
        assert "".join(order) == "abccbaabc"

    def test_ports_differ(self):
        assert len(set(engine_pool.free_ports(8))) == 8


class TestEnvironment:
    def test_stock_knows_nothing_of_the_overlay(self, monkeypatch):
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), "/somewhere"]))
        for name in ("LORA_FASTPATH", "LORA_FASTPATH_SITES", "SGLANG_EXPERIMENTAL_LORA_OPTI"):
            monkeypatch.setenv(name, "1")
        env = engine_pool.environment("")
        assert env["PYTHONPATH"] == "/somewhere"
        assert not [name for name in env if name.startswith("LORA_FASTPATH") or name == "SGLANG_EXPERIMENTAL_LORA_OPTI"]

    def test_overlay_comes_first_and_keeps_the_callers_settings(self, monkeypatch):
        monkeypatch.setenv("PYTHONPATH", "/somewhere")
        monkeypatch.setenv("LORA_FASTPATH_SITES", "all,-row")
        env = engine_pool.environment("all", extra={"PYTHONPATH": "/shims"})
        assert env["PYTHONPATH"].split(os.pathsep) == [str(ROOT), "/shims"]
        assert (env["LORA_FASTPATH"], env["LORA_FASTPATH_SITES"]) == ("1", "all,-row")


class TestModels:
    def widths(self, shape: str, targets: str, layers: int = 1) -> dict[str, tuple[int, int]]:
        config = {**model_folder.SHAPES[shape], "num_hidden_layers": layers}
        found = model_folder.linears(config, targets)
        return {name.removeprefix("model.layers."): (out, into) for name, out, into in found}

    def test_qwen3_8b_layer(self):
        widths = self.widths("qwen3-8b-bf16", "all-linear")
        assert widths["0.self_attn.q_proj"] == (4096, 4096) and widths["0.self_attn.k_proj"] == (1024, 4096)
        assert widths["0.mlp.down_proj"] == (4096, 12288) and len(widths) == 7

    def test_targets(self):
        count = {t: len(self.widths("tiny-moe", t)) for t in model_folder.TARGETS}
        assert count == {"attention": 4, "all-linear": 4, "experts": 24, "all": 28}
        with pytest.raises(ValueError, match="'experts'"):
            model_folder.linears(model_folder.QWEN3_8B, "experts")

    def test_adapter_files(self, tmp_path):
        torch = pytest.importorskip("torch")
        load_file = pytest.importorskip("safetensors.torch").load_file
        config = model_folder.write_model(tmp_path / "model", "tiny-moe", 1)
        folders = model_folder.write_adapters(tmp_path, config, "all", 4, 2)
        first, second = (Path(folder) / "adapter_model.safetensors" for folder in folders.values())
        assert first.samefile(second) and first.parent != second.parent
        weights = load_file(first)
        key = "base_model.model.model.layers.0.mlp.experts.7.down_proj.lora_"
        assert weights[f"{key}A.weight"].shape == (4, 64) and weights[f"{key}B.weight"].shape == (128, 4)
        assert weights[f"{key}A.weight"].dtype == torch.bfloat16 and len(weights) == 2 * 28
        assert not torch.equal(weights[f"{key}A.weight"], weights[f"{key.replace('.7.', '.6.')}A.weight"])
        peft = json.loads((tmp_path / "adapter0/adapter_config.json").read_text())
        assert (peft["r"], peft["lora_alpha"]) == (4, 8) and "gate_proj" in peft["target_modules"]

    def test_shared_expert_beside_256(self):
        linear = self.widths("qwen2-moe-256x512-fp8", "all-linear")
        assert linear["0.mlp.shared_expert.down_proj"] == (2048, 512) and len(linear) == 7
        experts = self.widths("qwen2-moe-256x512-fp8", "experts")
        assert len(experts) == 3 * 256 and experts["0.mlp.experts.255.down_proj"] == (2048, 512)
        config = model_folder.SHAPES["qwen2-moe-256x512-fp8"]
        # sglang sizes and splits by these; a mismatch shows on a GPU alone
        assert config["intermediate_size"] == config["shared_expert_intermediate_size"]
        assert config["hidden_size"] == config["num_attention_heads"] * config["head_dim"]

    def test_deepseek_has_a_dense_layer_first(self):
        widths = self.widths("deepseek-v3-fp8", "all", layers=2)
        assert widths["0.mlp.down_proj"] == (7168, 18432) and "1.mlp.down_proj" not in widths
        assert widths["1.mlp.shared_experts.up_proj"] == (2048, 7168) and "0.mlp.experts.0.up_proj" not in widths
        assert widths["1.mlp.experts.255.down_proj"] == (7168, 2048)
        assert widths["0.self_attn.kv_a_proj_with_mqa"] == (576, 7168)
        assert widths["0.self_attn.q_b_proj"] == (128 * 192, 1536)
        assert len(widths) == 2 * 5 + 3 + 3 + 3 * 256

    def test_of_deepseek_v2_lite_only_what_sglang_can_load(self):
        widths = self.widths("deepseek-v2-lite-bf16", "all-linear", layers=2)
        assert {name for name in widths if "attn" in name} == {
            f"{layer}.self_attn.{name}_proj" for layer in (0, 1) for name in ("kv_b", "o")
        }
        assert widths["1.mlp.shared_experts.down_proj"] == (2048, 2 * 1408)

    def test_the_config_is_one_that_transformers_reads(self, tmp_path):
        transformers = pytest.importorskip("transformers")
        for shape in model_folder.SHAPES:
            written = model_folder.write_model(tmp_path / shape, shape, 2)
            read = transformers.AutoConfig.from_pretrained(tmp_path / shape)
            assert read.num_hidden_layers == 2 and read.hidden_size == written["hidden_size"]
            assert getattr(read, "num_experts", None) == written.get("num_experts")

    def test_adapters_are_made_anew_for_another_rank(self, tmp_path):
        load_file = pytest.importorskip("safetensors.torch").load_file
        config = model_folder.write_model(tmp_path / "model", "tiny-moe", 1)
        for rank in (4, 8):
            folder = model_folder.write_adapters(tmp_path, config, "attention", rank, 1)["adapter0"]
            weights = load_file(f"{folder}/adapter_model.safetensors")
            assert weights["base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"].shape[0] == rank


class TestSettings:
    def test_defaults_fit_the_cells(self):
        args = engine_ab.arguments(["--prefill", "1,8192"])
        settings = engine_ab.engine_settings(args, model_folder.QWEN3_MOE, Path("m"))
        assert settings["cuda_graph_bs"] == [1, 16, 64, 256] and settings["max_running_requests"] == 256
        assert settings["max_total_tokens"] == 256 * 256 + 16384 and settings["context_length"] > 8192
        assert settings["moe_runner_backend"] == "triton"
        assert "moe_runner_backend" not in engine_ab.engine_settings(args, model_folder.QWEN3_8B, Path("m"))

    def test_each_engine_gets_its_own_arguments(self, monkeypatch, tmp_path):
        started = {}

        def engine(name, settings, env, log):
            started[name] = (settings["engine"], env.get("LORA_FASTPATH") and env.get("LORA_FASTPATH_SITES", "all"))
            return SimpleNamespace(name=name, start_seconds=1.0, started=0.0, wait_until_up=lambda timeout: None)

        monkeypatch.setattr(engine_ab, "EngineProcess", engine)
        args = engine_ab.arguments(["--engines", ",".join(engine_ab.ENGINES), "--out", str(tmp_path)])
        engine_ab.start_engines(args, model_folder.QWEN3_MOE, Path("m"), {"adapter0": "x"}, [])
        lora = {name: (e.get("lora_backend"), e.get("lora_use_virtual_experts", False)) for name, (e, _) in started.items()}
        assert lora == {
            "base": (None, False), "stock_csgmv": ("csgmv", False), "stock_triton": ("triton", False),
            "stock_mended": ("triton", False), "stock_virtual": ("triton", True), "fast": ("csgmv", False),
            "fast_triton": ("triton", False),
        }  # fmt: skip
        sites = {name: sites for name, (_, sites) in started.items() if sites}
        assert sites == {"fast": "all", "fast_triton": "all", "stock_mended": "fix-deepseek-experts"}
        assert "lora_paths" not in started["base"][0] and started["fast"][0]["lora_paths"] == {"adapter0": "x"}

    def test_sglang_knows_the_arguments(self):
        server_args = pytest.importorskip("sglang.srt.server_args")
        known = {field.name for field in dataclasses.fields(server_args.ServerArgs)}
        assert {name for lora, _ in engine_ab.ENGINES.values() for name in lora or ()} <= known

    def test_cpu_engines_start_one_by_one(self):
        args = engine_ab.arguments(["--device", "cpu"])
        assert args.start == "one-by-one"
        assert engine_ab.engine_settings(args, model_folder.TINY_MOE, Path("m"))["disable_cuda_graph"]

    def test_unknown_engine(self, capsys):
        with pytest.raises(SystemExit):
            engine_ab.arguments(["--engines", "base,turbo"])
        assert "turbo" in capsys.readouterr().err


SAMPLES = {
    "base": [1.0, 1.1, 0.9],
    "stock_csgmv": [2.0, 2.0, 2.0],
    "stock_triton": [1.6, 1.6, 1.6],
    "fast": [1.25, 1.25, 1.5],
}


class TestCells:
    def test_the_faster_stock_backend_counts(self):
        cell = engine_ab.make_cell({"tokens": 16}, SAMPLES, {"fast": [[1]]})
        assert (cell["ms_base"], cell["ms_stock"], cell["ms_fast"], cell["stock_backend"]) == (1.0, 1.6, 1.25, "triton")
        assert (cell["kept_stock"], cell["kept_fast"]) == (0.625, 0.8)
        assert (cell["ms_stock_csgmv"], cell["ms_stock_triton"]) == (2.0, 1.6)
        assert cell["spread"] == 0.2 and cell["tokens"] == 16  # 1.5 against 1.25

    def test_virtual_experts_are_shown_and_not_the_stock_to_beat(self):
        cell = engine_ab.make_cell({"tokens": 16}, SAMPLES | {"stock_virtual": [1.4, 1.4, 1.4]}, {})
        assert (cell["ms_stock_virtual"], cell["ms_stock"], cell["stock_backend"]) == (1.4, 1.6, "triton")
        lines = engine_ab.table([cell | {"phase": "decode", "batch": 1, "adapters": 1}]).splitlines()
        assert lines[1][: lines[0].index("virtual") + len("virtual")].endswith(" 1.400")

    def test_missing_engines_leave_gaps(self):
        cell = engine_ab.make_cell({}, {"fast": [1.0], "base": []}, {})
        assert (cell["ms_base"], cell["ms_stock"], cell["kept_fast"], cell["stock_backend"]) == (None,) * 4
        assert "1.000" in engine_ab.table([cell | {"phase": "decode", "batch": 1, "tokens": 1, "adapters": 1}])

    def test_no_cell_after_the_time_limit(self, tmp_path):
        args = engine_ab.arguments(
            ["--time-limit", "-1", "--results", str(tmp_path), "--batches", "1", "--adapters", "1"]
        )
        run = engine_ab.Run(args, [], {"cells": []})
        run.measure()
        assert run.result["cells"] == []

    def test_each_cell_is_written_at_once(self, tmp_path):
        # the limit counts from the script's start, and a test session runs longer than a benchmark
        args = engine_ab.arguments(["--results", str(tmp_path), "--name", "n", "--time-limit", "1e9"])
        engine = SimpleNamespace(name="base", alive=True, ask=lambda *a, **k: {"ms": [1.0], "tokens": []})
        run = engine_ab.Run(args, [engine], {"cells": []})
        run.cell({"phase": "decode", "batch": 1, "tokens": 1, "adapters": 1}, 5, {}, lambda e: e.ask())
        written = json.loads((tmp_path / "n.json").read_text())["cells"]
        assert len(written) == 1 and written[0]["samples"] == {"base": [1.0] * 5}
        assert {"model", "layers", "targets", "rank"} <= set(written[0])


class TestKernelTable:
    def trace(self, tmp_path, steps: int) -> str:
        events, now = [], 0
        for _ in range(steps):
            for name, dur in (("void gemm<float>(int)", 30), ("_shrink", 5), ("_shrink", 7), ("reduce<ArgMax>", 3)):
                events.append({"cat": "kernel", "name": name, "ts": now, "dur": dur})
                now += dur + 1
        path = tmp_path / "t.json.gz"
        with gzip.open(path, "wt") as file:
            json.dump({"traceEvents": [{"cat": "cpu_op", "name": "x", "ts": 0, "dur": 1}, *events]}, file)
        return str(path)

    def test_sums_a_step(self, tmp_path):
        lines = kernel_table(self.trace(tmp_path, 12)).splitlines()
        assert "launches 4" in lines[0] and "sum 45 us" in lines[0]
        assert lines[1].split() == ["30.0", "us", "x", "1.0", "30.00", "us", "each", "gemm"]
        assert lines[2].split()[:4] == ["12.0", "us", "x", "2.0"]

    def test_says_when_there_is_no_step(self, tmp_path):
        with pytest.raises(ValueError, match="no decode steps"):
            kernel_table(self.trace(tmp_path, 4))


RESULT = {
    "gpu": "NVIDIA H200", "driver": "1", "sglang": "0.5.12.post1", "torch": "2", "triton": "3", "date": "2026-01-02T03:04:05",
    "command": "python x", "commit": "abc",
    "cells": [{"model": "m", "layers": 16, "targets": "attention", "rank": 16, "adapters": 1, "phase": phase, "batch": 1,
               "tokens": 8, "ms_base": 1.0, "ms_stock": 2.0, "stock_backend": "triton", "ms_fast": None,
               "kept_stock": 0.5, "kept_fast": None, "spread": 0.011} for phase in ("decode", "prefill")],
}  # fmt: skip


class TestReport:
    @pytest.fixture
    def report(self):
        import importlib.util

        spec = importlib.util.spec_from_file_location("benchmark_report", ROOT / "benchmarks" / "report.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    def test_page_has_every_cell(self, report):
        page = report.page({"run": RESULT}, {})
        assert "| 1 | 1 | 1.000 | 2.000 (triton) | - | 50.0% | - | 1.1% |" in page
        assert "| 1 | 8 | 1.000 |" in page and "Commit abc." in page

    def test_virtual_experts_have_a_column_where_they_were_measured(self, report):
        cells = [RESULT["cells"][0] | {"ms_stock_virtual": 1.5}, RESULT["cells"][0] | {"batch": 2}]
        page = report.page({"run": RESULT | {"cells": cells}}, {})
        assert "| stock (backend) | stock, virtual experts | overlay |" in page
        assert "| 1 | 1 | 1.000 | 2.000 (triton) | 1.500 | - |" in page
        assert "| 1 | 2 | 1.000 | 2.000 (triton) | - | - |" in page
        assert len({line.count("|") for line in page.splitlines() if line.startswith("|")}) == 1

    def test_layers_have_a_table_of_their_own(self, report):
        cell = {"model": "30b-fp8", "rank": 16, "rows": 64, "adapters": 8, "us_base": 165.04}
        cell |= {"us_added": {"two streams": 37.9, "one stream": 60.0}, "adapter_mb": 108.0, "us_to_read_adapters": 25.7}
        page = report.page({}, {"moe": RESULT | {"cells": [cell]}})
        assert "## Layers: moe" in page and "| 30b-fp8 | 16 | 8 | 64 | 165.0 | 37.9 | 60.0 | 108.0 | 25.7 |" in page

    def test_figures_go_between_the_markers(self, report):
        readme = "a\n<!-- figures: made by benchmarks/report.py -->\nold\n<!-- end of figures -->\nb\n"
        new = report.between_markers(readme, "figures", report.summary({"run": RESULT}))
        assert new.startswith("a\n") and new.endswith("\nb\n") and "old" not in new and "50.0%" in new
        assert report.between_markers(new, "figures", "old") == readme
        with pytest.raises(ValueError, match="no lines"):
            report.between_markers("nothing", "figures", "x")

    def test_every_site_is_listed(self, report):
        from lora_fastpath.sites import SITES

        table = report.site_table()
        assert all(f"| `{site.name}` |" in table for site in SITES) and len(table.splitlines()) == 2 + len(SITES)

    def test_the_committed_pages_say_what_the_results_say(self, report):
        assert report.main(["--check"]) == 0


def answer(tokens: str, runner_up: str = "zzzz", margin: float = 1.0) -> dict:
    top = [[[-1.0, ord(a)], [-1.0 - margin, ord(b)]] for a, b in zip(tokens, runner_up)]
    return {"tokens": [ord(t) for t in tokens], "logprobs": [-1.0] * len(tokens), "top": top}


def test_a_first_difference_is_a_tie_only_between_the_two_best_that_are_near():
    stock = [answer("abcd"), answer("abcd", "zzxz", 0.01), answer("abcd", "zzxz", 0.5), answer("abcd", "zzxz", 0.01)]
    ours = [answer("abcd"), answer("abxy"), answer("abxy"), answer("abyy")]
    found = real_weights.compare(stock, ours, tie=0.1)
    assert found["prompts_equal"] == 1 and found["tokens_before_difference"] == 4 + 2 + 2 + 2
    assert found["differences_that_are_no_tie"] == [2, 3]
    assert found["largest_margin_at_difference"] == pytest.approx(0.5)


def test_logprobs_are_compared_up_to_the_first_difference():
    stock, ours = [answer("abcd", "zzxz")], [answer("abxd")]
    ours[0]["logprobs"] = [-1.0, -1.25, -9.0, -9.0]
    assert real_weights.compare(stock, ours, tie=2.0)["largest_logprob_difference"] == pytest.approx(0.25)


def test_fp8_blocks_stand_for_the_weight():
    import torch

    weight = torch.randn(200, 300, generator=torch.Generator().manual_seed(0)).half()
    codes, scales = real_weights.fp8_blocks(weight)
    assert codes.shape == weight.shape and scales.shape == (2, 3)
    back = codes.float() * scales.repeat_interleave(128, 0)[:200].repeat_interleave(128, 1)[:, :300]
    assert ((back - weight.float()).norm() / weight.float().norm()).item() < 0.04


class TestBlackwellModel:
    def test_the_committed_page_is_what_it_prints(self):
        assert sm100_model.PAGE.read_text() == sm100_model.page(), "run benchmarks/sm100_model.py --write"

    def test_bytes_of_one_token(self):
        found = {stage.name: stage.bytes for stage in sm100_model.stages("Kimi-K2.5, NVFP4", 1, 1)}
        weights = 8 * 2 * 2048 * 7168 * (0.5 + 1 / 16)  # 8 experts, gate and up, codes and a scale for 16
        assert weights < found["gate_up GEMM"] < 1.01 * weights
        adapter = 8 * 2 * 16 * (2 * 7168 + 2 * 2048)  # BF16: A of gate and of up, B of both
        assert adapter < found["gate_up delta"] < 1.1 * adapter

    def test_what_adapters_add(self):
        for layer in sm100_model.LAYERS:
            for tokens, adapters in sm100_model.BATCHES:
                base, ours = sm100_model.stages(layer, tokens, 0), sm100_model.stages(layer, tokens, adapters)
                assert sm100_model.seconds(base) < sm100_model.seconds(ours) < 2 * sm100_model.seconds(base)
                assert not any(stage.side for stage in base) and sum(stage.side for stage in ours) == 2
