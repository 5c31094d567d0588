#!/usr/bin/env python3
"""Serve a list of engine runs one after the other and write what each one answered: engine_driver.py PLAN.json.

The plan is {"out": folder, "runs": [{"name", "model": folder, "scenario", "engine": {arguments}, "environment": {}}]}.
For each run: out/NAME.json (see `serve`) and out/NAME.log, everything that its processes printed. The environment is
set for the run's own processes; what must be in place from the interpreter's start (PYTHONPATH, the overlay's switch)
is the environment of this driver.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import sys
import time
import traceback

import scenarios

ENGINE = {
    "device": "cpu",
    "dtype": "float16",
    "skip_tokenizer_init": True,
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "max_total_tokens": 2048,
    "context_length": 256,
    "max_running_requests": 4,
    "chunked_prefill_size": 72,
    "mem_fraction_static": 0.3,
    "disable_cuda_graph": True,
    "disable_piecewise_cuda_graph": True,
    "disable_overlap_schedule": True,
    "log_level": "warning",
    "enable_lora": True,
    "max_lora_rank": 16,
    "max_loras_per_batch": 3,
}


@contextlib.contextmanager
def output_to(path: pathlib.Path):
    """Send this process's and its children's stdout and stderr to `path`."""
    sys.stdout.flush(), sys.stderr.flush()
    saved = os.dup(1), os.dup(2)
    with open(path, "wb") as log:
        os.dup2(log.fileno(), 1), os.dup2(log.fileno(), 2)
    try:
        yield
    finally:
        sys.stdout.flush(), sys.stderr.flush()
        os.dup2(saved[0], 1), os.dup2(saved[1], 2)
        os.close(saved[0]), os.close(saved[1])


@contextlib.contextmanager
def environment(values: dict[str, str | None]):
    before = {name: os.environ.get(name) for name in values}

    def put(wanted: dict[str, str | None]) -> None:
        for name, value in wanted.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

    put(values)
    try:
        yield
    finally:
        put(before)


def serve(run: dict, out: pathlib.Path) -> dict:
    """{"parts": {part: [answers]}, "reports": {"start" or part: overlay report after it}, "seconds"} of one engine."""
    import sglang

    started = time.monotonic()
    model = pathlib.Path(run["model"])
    scenario = scenarios.SCENARIOS[run["scenario"]]
    paths = {name: str(model / name) for name in scenario.adapters}
    arguments = ENGINE | {"lora_target_modules": list(scenario.modules)} | run["engine"]
    engine = sglang.Engine(model_path=str(model / "base"), lora_paths=paths, **arguments)
    result = {"parts": {}, "reports": {}, "seconds": {}}
    path = out / f"{run['name']}.report"

    def note(after: str, started: float) -> None:
        engine.collective_rpc("write_overlay_report", path=str(path))
        result["reports"][after] = json.loads(path.read_text())
        result["seconds"][after] = round(time.monotonic() - started, 1)

    try:
        note("start", started)
        for part in scenario.parts:
            started = time.monotonic()
            result["parts"][part.__name__] = part(engine, model)
            note(part.__name__, started)
    finally:
        engine.shutdown()
    return result


def main() -> None:
    plan = json.loads(pathlib.Path(sys.argv[1]).read_text())
    out = pathlib.Path(plan["out"])
    for run in plan["runs"]:
        with output_to(out / f"{run['name']}.log"), environment(run["environment"]):
            try:
                result = serve(run, out)
            except Exception:
                result = {"error": traceback.format_exc()}
        unfinished = out / f"{run['name']}.part"
        unfinished.write_text(json.dumps(result))
        unfinished.rename(out / f"{run['name']}.json")


if __name__ == "__main__":
    main()
