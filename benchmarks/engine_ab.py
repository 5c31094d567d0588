"""What LoRA costs in a real sglang engine: without LoRA, stock LoRA (both backends) and the overlay, in one command.

    python benchmarks/engine_ab.py --shape qwen3-30b-a3b-fp8 --layers 16 --targets attention --name qwen3-30b-attention

The engines are started together, stay alive side by side, and are measured in turn, one sample each a round, the rounds
alternating in direction: drift of the machine then hits all alike. A decode step is the difference of two generations
that differ by --steps steps, divided by it. Writes --results/NAME.json after every cell, so a killed run keeps what it had.

Needs one CUDA GPU and sglang; nothing else beyond what sglang brings. `--device cpu` runs the same code with a tiny
model for the tests (see tests/engine): its times say nothing.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # also when loaded by path, as the tests do

from engine_pool import REPOSITORY, EngineError, EngineProcess, close_all, environment, free_ports
from model_folder import SHAPES, TARGETS, is_moe, write_adapters, write_model

ENGINES = {  # name -> (sglang's LoRA arguments or None for no LoRA, the overlay's sites)
    "base": (None, ""),
    "stock_csgmv": ({"lora_backend": "csgmv"}, ""),
    "stock_triton": ({"lora_backend": "triton"}, ""),
    # stock cannot serve adapters on DeepSeek's experts: this is stock with that one fault mended
    "stock_mended": ({"lora_backend": "triton"}, "fix-deepseek-experts"),
    "stock_virtual": ({"lora_backend": "triton", "lora_use_virtual_experts": True}, ""),
    "fast": ({"lora_backend": "csgmv"}, "all"),  # csgmv is sglang's default, so what a user of the overlay runs
    "fast_triton": ({"lora_backend": "triton"}, "all"),
}
STOCK = ("stock_csgmv", "stock_triton", "stock_mended")
"""The engines that `ms_stock` is the faster of. Virtual experts are timed beside them: their results are wrong for
gated experts (up's delta is computed with gate's A), so they are no speed to be held against."""


def integers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    ap = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ap.add_argument("--shape", default="qwen3-30b-a3b-fp8", choices=sorted(SHAPES))
    ap.add_argument("--layers", type=int, help="default: the model's own number")
    ap.add_argument("--targets", default="attention", choices=TARGETS)
    ap.add_argument("--rank", type=int, default=16)
    ap.add_argument("--adapters", type=integers, default=[1, 8], help="how many are in use at once, e.g. 1,8")
    ap.add_argument("--batches", type=integers, default=[1, 16, 64, 256])
    ap.add_argument("--prefill", type=integers, default=[1, 16, 128, 1024, 8192], help="prompt lengths; '' for none")
    ap.add_argument("--engines", default="base,stock_csgmv,stock_triton,fast", help=f"of {','.join(ENGINES)}")
    ap.add_argument("--steps", type=int, default=128, help="decode steps a sample")
    ap.add_argument("--reps", type=int, default=5, help="samples an engine and cell")
    ap.add_argument("--prefill-reps", type=int, default=5, help="rounds of prefill (five samples each)")
    ap.add_argument("--input-len", type=int, default=64, help="prompt length of the decode cells")
    ap.add_argument("--name", help="of the result; default: shape-targets-rank")
    ap.add_argument("--results", type=Path, default=Path(__file__).resolve().parent / "results")
    ap.add_argument("--out", type=Path, default=Path("/tmp/lora-fastpath-ab"), help="models, adapters, engines' logs")
    ap.add_argument("--commit", default=os.environ.get("AB_COMMIT"), help="git commit, where there is no .git")
    ap.add_argument("--time-limit", type=float, default=540, help="seconds after which no further cell is begun")
    ap.add_argument("--start", choices=("together", "one-by-one"), help="default: together on a GPU")
    ap.add_argument("--start-timeout", type=float, default=300, help="seconds an engine may take to start")
    ap.add_argument("--profile", type=integers, default=[], help="batches to profile after the timing, e.g. 1,16")
    ap.add_argument("--extra", type=json.loads, default={}, help="further arguments of sglang.Engine, as JSON")
    ap.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    ap.add_argument("--cpu-harness", type=Path, default=REPOSITORY / "tests" / "engine", help="stub_libcuda.py, shims/")
    args = ap.parse_args(argv)
    args.engines = [name for name in args.engines.split(",") if name]
    unknown = set(args.engines) - set(ENGINES)
    if unknown or not args.engines:
        ap.error(f"--engines: {sorted(unknown)} not known; allowed are {', '.join(ENGINES)}")
    if not args.batches or min(args.batches) < 1 or not args.adapters or min(args.adapters) < 1:
        ap.error("--batches and --adapters need at least one number, each at least 1")
    args.name = args.name or f"{args.shape}-{args.targets}-r{args.rank}"
    args.start = args.start or ("together" if args.device == "cuda" else "one-by-one")
    args.out = args.out.resolve()
    return args


def engine_settings(args: argparse.Namespace, config: dict, model: Path) -> dict:
    """Arguments of sglang.Engine that all engines of a run share."""
    a_request = args.input_len + 16 + args.steps + 16
    longest = max([0, *args.prefill])
    settings = {
        "model_path": str(model),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "disable_radix_cache": True,  # the samples repeat their prompts
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "cuda_graph_bs": sorted(args.batches),
        "max_running_requests": max(args.batches),
        "context_length": max(4096, longest + 64, a_request),
        "chunked_prefill_size": 8192,
        # no more KV cache than the run needs: all engines share the GPU. The fraction is of what is free when an
        # engine starts and only has to be large enough for that cap, whatever the others take meanwhile.
        "max_total_tokens": max(args.batches) * max(256, a_request) + max(16384, 2 * longest),
        "mem_fraction_static": 0.9,
        "disable_piecewise_cuda_graph": True,  # sglang turns it off for LoRA; so for the base too
        "sleep_on_idle": True,  # engines that wait must not spin beside the one that is measured
        "log_level": "error",
        "random_seed": 1,
    }
    if args.device == "cpu":
        settings.update(
            device="cpu", dtype="float16", attention_backend="torch_native", disable_cuda_graph=True,
            disable_overlap_schedule=True, mem_fraction_static=0.3,
        )  # fmt: skip
        del settings["cuda_graph_bs"]
    else:
        settings.update(dtype="bfloat16", attention_backend="triton")
        if is_moe(config):
            # "auto" records no graph without LoRA beside the one with it
            settings["moe_runner_backend"] = "triton"
    return settings | args.extra


def cpu_environment(harness: Path, out: Path) -> dict[str, str]:
    """What an engine needs on a CPU: a stub libcuda (written to OUT/stub), the tests' shims, Triton's interpreter."""
    subprocess.run([sys.executable, str(harness / "stub_libcuda.py"), str(out / "stub")], check=True)

    def in_front(folder: Path, name: str) -> str:
        return os.pathsep.join([str(folder), *filter(None, [os.environ.get(name)])])

    return {
        "LD_LIBRARY_PATH": in_front(out / "stub", "LD_LIBRARY_PATH"),
        "PYTHONPATH": in_front(harness / "shims", "PYTHONPATH"),
        "TRITON_INTERPRET": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }


def start_engines(
    args: argparse.Namespace, config: dict, model: Path, adapters: dict[str, str], engines: list[EngineProcess]
) -> None:
    """Start args.engines into `engines`; those that do not come up are reported, closed and stay there, not alive."""
    shared = engine_settings(args, config, model)
    extra = cpu_environment(args.cpu_harness, args.out) if args.device == "cpu" else {}
    for name, port in zip(args.engines, free_ports(len(args.engines)), strict=True):
        lora, sites = ENGINES[name]
        engine = shared | {"nccl_port": port}
        if lora:
            slots = max(2, len(adapters))
            engine |= {"enable_lora": True, "lora_paths": adapters, "max_loras_per_batch": slots} | lora
        settings = {"engine": engine, "vocabulary": config["vocab_size"]}
        engines.append(EngineProcess(name, settings, environment(sites, extra), args.out / f"{name}.log"))
        if args.start == "one-by-one":
            wait(engines[-1], args.start_timeout)
    if args.start == "together":
        for engine in engines:
            wait(engine, max(1.0, args.start_timeout - (time.monotonic() - engine.started)))


def wait(engine: EngineProcess, timeout: float) -> None:
    try:
        engine.wait_until_up(timeout)
        say(f"{engine.name} up after {engine.start_seconds:.0f} s")
    except EngineError as error:
        say(f"DEAD {error}")


def sample_in_turn(
    engines: list[EngineProcess], rounds: int, ask: Callable[[EngineProcess], dict]
) -> tuple[dict[str, list[float]], dict[str, list]]:
    """`rounds` rounds of one `ask` an engine, every other round backwards: engine -> milliseconds, engine -> tokens.

    An engine that fails is reported and left out from then on; what it had answered for this cell is dropped.
    """
    samples: dict[str, list[float]] = {e.name: [] for e in engines if e.alive}
    tokens: dict[str, list] = {}
    for number in range(rounds):
        for engine in engines if number % 2 == 0 else reversed(engines):
            if engine.name not in samples:
                continue
            try:
                answer = ask(engine)
            except EngineError as error:
                say(f"FAILED {error}")
                engine.error = engine.error or str(error).splitlines()[0]
                del samples[engine.name]
                tokens.pop(engine.name, None)
                continue
            samples[engine.name] += answer["ms"]
            tokens[engine.name] = answer["tokens"]
    return samples, tokens


def make_cell(facts: dict, samples: dict[str, list[float]], tokens: dict[str, list]) -> dict:
    """One cell of the result file: medians (ms), the shares of the no-LoRA speed kept, the samples themselves.

    `ms_stock` is the faster of stock's backends; `spread` the largest relative deviation of a sample from its median.
    """
    medians = {name: statistics.median(values) for name, values in samples.items() if values}
    stock = {name: medians[name] for name in STOCK if name in medians}
    faster = min(stock, key=stock.get) if stock else None
    base, fast = medians.get("base"), medians.get("fast", medians.get("fast_triton"))
    counted = [n for n in ("base", faster, "fast" if "fast" in medians else "fast_triton") if n in medians]

    def rounded(value: float | None) -> float | None:
        return None if value is None else round(value, 4)

    def kept(value: float | None) -> float | None:
        return rounded(base / value) if base and value else None

    return facts | {
        "ms_base": rounded(base),
        "ms_stock": rounded(stock.get(faster)),
        "ms_fast": rounded(fast),
        "kept_stock": kept(stock.get(faster)),
        "kept_fast": kept(fast),
        "spread": rounded(max((abs(v / medians[n] - 1) for n in counted for v in samples[n]), default=None)),
        "stock_backend": faster.removeprefix("stock_") if faster else None,
        **{f"ms_{name}": rounded(medians.get(name)) for name in (*STOCK, "stock_virtual", "fast_triton") if name in medians},
        "samples": {name: [round(v, 4) for v in values] for name, values in samples.items()},
        "first_tokens": tokens,  # of two requests: with dummy weights they show a broken engine, no more
    }


def header(args: argparse.Namespace, argv: list[str], script: str = "engine_ab.py") -> dict:
    """What was measured on what: the fields of the result file beside its cells."""
    gpu = driver = ""
    if args.device == "cuda":
        query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        first = (output(query).splitlines() or [","])[0]
        gpu, _, driver = (part.strip() for part in first.partition(","))
    commit = args.commit or output(["git", "-C", str(REPOSITORY), "rev-parse", "HEAD"])
    if commit and not args.commit and output(["git", "-C", str(REPOSITORY), "status", "--porcelain"]):
        commit += " with changes"
    return {
        "gpu": gpu or "none (CPU)",
        "driver": driver,
        **{package: version(package) for package in ("sglang", "torch", "triton")},
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join(["python", f"benchmarks/{script}", *argv]),
        "commit": commit,
        "engines": {},
        "cells": [],
    }


def output(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def save(result: dict, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(result, indent=1) + "\n")
    part.replace(path)  # a run killed while writing leaves the file of the cell before


def table(cells: list[dict]) -> str:
    """The cells as plain text, one line each."""

    def number(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    lines = [
        "phase    batch  tokens adapters |    base   stock (backend) virtual    fast | kept stock  kept fast  spread"
    ]
    for c in cells:
        base, stock, virtual, fast = (number(c.get(f"ms_{n}"), ".3f") for n in ("base", "stock", "stock_virtual", "fast"))
        lines.append(
            f"{c['phase']:8} {c['batch']:5} {c['tokens']:7} {c['adapters']:8} | {base:>7} {stock:>7} "
            f"({c['stock_backend'] or '-':6}) {virtual:>8} {fast:>7} | {number(c['kept_stock'], '.1%'):>10} {number(c['kept_fast'], '.1%'):>10} "
            f"{number(c['spread'], '.1%'):>7}"
        )
    return "\n".join(lines)


def say(text: str) -> None:
    print(f"[{time.monotonic() - BEGAN:5.0f} s] {text}", flush=True)


BEGAN = time.monotonic()


class Run:
    """One run: engines, the result so far, and the file it goes to."""

    def __init__(self, args: argparse.Namespace, engines: list[EngineProcess], result: dict):
        self.args, self.engines, self.result = args, engines, result
        self.path = args.results / f"{args.name}.json"
        self.facts = {
            "model": args.shape,
            "layers": args.layers or SHAPES[args.shape]["num_hidden_layers"],
            "targets": args.targets,
            "rank": args.rank,
        }

    def record_engines(self) -> None:
        for engine in self.engines:
            note = {"alive": engine.alive, "error": engine.error, "start_s": engine.start_seconds}
            note["start_s"] = note["start_s"] and round(note["start_s"], 1)
            if engine.alive:
                try:
                    note |= engine.ask("state", 60)
                    for site in note["sites"]:
                        say(f"{engine.name}: {site['name']} {site['state']} {site['reason']}")
                    if not note["sites"] and ENGINES[engine.name][1]:
                        say(f"{engine.name}: THE OVERLAY IS NOT ACTIVE in this engine; its log:\n{engine.tail()}")
                except EngineError as error:
                    say(f"FAILED {error}")
            self.result["engines"].setdefault(engine.name, {}).update(note)
        save(self.result, self.path)

    def cell(self, facts: dict, rounds: int, warm: dict, ask: Callable[[EngineProcess], dict]) -> None:
        what = f"{facts['phase']} batch {facts['batch']} tokens {facts['tokens']} adapters {facts['adapters']}"
        if time.monotonic() - BEGAN > self.args.time_limit:
            say(f"skipped {what}: --time-limit {self.args.time_limit:.0f} s is over")
            return
        # not in the samples: adapters moving into their slots, kernels compiled for a new shape
        sample_in_turn(self.engines, 1, lambda engine: engine.ask("warm", 180, **warm))
        samples, tokens = sample_in_turn(self.engines, rounds, ask)
        cell = make_cell(self.facts | facts, samples, tokens)
        self.result["cells"].append(cell)
        save(self.result, self.path)
        say(table([cell]).splitlines()[1])

    def measure(self) -> None:
        args = self.args
        say(table([]))
        for adapters in args.adapters:
            for batch in args.batches:
                fields = {"batch": batch, "adapters": adapters, "input_len": args.input_len, "steps": args.steps}
                self.cell(
                    {"adapters": adapters, "phase": "decode", "batch": batch, "tokens": batch},
                    args.reps,
                    {"batch": batch, "adapters": adapters, "input_len": args.input_len},
                    lambda engine, fields=fields: engine.ask("decode", 180, **fields),
                )
        for tokens in args.prefill:
            self.cell(
                {"adapters": 1, "phase": "prefill", "batch": 1, "tokens": tokens},
                args.prefill_reps,
                {"batch": 1, "adapters": 1, "input_len": tokens},
                lambda engine, tokens=tokens: engine.ask("prefill", 120, tokens=tokens, adapters=1, times=5),
            )

    def profile(self) -> None:
        """Kernel tables of decode steps, one an engine and batch, printed and written beside the result."""
        from kernel_table import kernel_table

        text = []
        for batch in self.args.profile:
            for engine in (e for e in self.engines if e.alive):
                folder = self.args.out / "traces" / f"{self.args.name}-{engine.name}-b{batch}"
                folder.mkdir(parents=True, exist_ok=True)
                for old in folder.rglob("*.json.gz"):
                    old.unlink()
                fields = {"folder": str(folder), "batch": batch, "input_len": self.args.input_len}
                try:
                    files = engine.ask("profile", 120, adapters=self.args.adapters[0], **fields)["files"]
                    text.append(f"{engine.name}, batch {batch}\n" + "\n".join(map(kernel_table, files)))
                except (EngineError, OSError, ValueError, KeyError) as error:
                    text.append(f"{engine.name}, batch {batch}: FAILED {error}")
                print(text[-1], flush=True)
                self.path.with_suffix(".kernels.txt").write_text("\n\n".join(text) + "\n")


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    args = arguments(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a stopped run ends its engines too
    result = header(args, argv)
    folder = args.out / f"{args.shape}-{args.layers or 'all'}-{args.targets}-r{args.rank}"
    config = write_model(folder / "model", args.shape, args.layers)
    adapters = write_adapters(folder, config, args.targets, args.rank, max(args.adapters))
    say(f"model and {len(adapters)} adapters in {folder}; starting {', '.join(args.engines)}")
    engines: list[EngineProcess] = []
    try:
        start_engines(args, config, folder / "model", adapters, engines)
        run = Run(args, engines, result)
        run.record_engines()
        if any(engine.alive for engine in engines):
            run.measure()
        run.record_engines()  # a site can leave service while serving
        if args.profile:
            run.profile()
    finally:
        close_all(engines)
    print(f"\n{result['gpu']}, sglang {result['sglang']}, {args.shape}, {args.targets}, rank {args.rank}: ms, medians")
    print(table(result["cells"]))
    print(f"wrote {run.path}; engines' logs in {args.out}")
    return 0 if result["cells"] and all(e["alive"] for e in result["engines"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
