"""Run a plan of engine runs (engine_driver.py) in a process of its own, with a limit of time, and read the results."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SHIMS = HERE / "shims"
RUN_SECONDS = 300
"""Longest that one engine may take, from its start to its end. Measured: 25 to 60 s on two cores."""


@dataclasses.dataclass(frozen=True)
class Run:
    name: str
    model: str  # a folder of tiny_models.write
    scenario: str
    engine: dict = dataclasses.field(default_factory=dict)
    environment: dict = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Result:
    run: Run
    parts: dict[str, list[dict]]
    reports: dict[str, dict]
    seconds: dict[str, float]
    log: str

    def launches(self, part: str) -> set[tuple[str, int, int]]:
        """(kernel, slices, rows) of our kernels' launches in a part; "start": in the self-check."""
        names = list(self.reports)
        before = self.reports[names[names.index(part) - 1]]["launches"] if part != "start" else {}
        grown = [key for key, n in self.reports[part]["launches"].items() if n > before.get(key, 0)]
        found = [re.fullmatch(r"(\w+) slices=(\d+) rows=(\d+)", key).groups() for key in grown]
        return {(kernel, int(slices), int(rows)) for kernel, slices, rows in found}

    @property
    def overlay_lines(self) -> list[str]:
        """What the overlay said, each different line once: sglang has several processes and each may say it."""
        return list(dict.fromkeys(line for line in self.log.splitlines() if line.startswith("lora-fastpath: ")))


class EngineFailed(AssertionError):
    pass


class Group:
    """Runs that share one driver process: they have the interpreter's path and the overlay's switch in common."""

    def __init__(
        self,
        overlay: str,
        runs: list[Run],
        models: pathlib.Path,
        stub: pathlib.Path,
        out: pathlib.Path,
        say: Callable[[str], None] = print,
    ) -> None:
        """overlay: "absent" (not on the path), "off" (there, but not switched on) or "on". `say` hears of progress."""
        self.runs, self.models, self.out, self.say = {run.name: run for run in runs}, models, out, say
        self.environment = base_environment(stub)
        path = [SHIMS] if overlay == "absent" else [ROOT, SHIMS]
        self.environment["PYTHONPATH"] = os.pathsep.join(map(str, path))
        if overlay == "on":
            self.environment["LORA_FASTPATH"] = "1"
            self.environment["LORA_FASTPATH_MAX_TOKENS"] = "16"

    def serve(self) -> None:
        """Do all runs. sglang kills the whole process when an engine fails: then go on with the rest in a new one."""
        self.out.mkdir(parents=True, exist_ok=True)
        while left := [run for name, run in self.runs.items() if name not in self.done()]:
            plan = self.out / "plan.json"
            runs = [dataclasses.asdict(run) | {"model": str(self.models / run.model)} for run in left]
            plan.write_text(json.dumps({"out": str(self.out), "runs": runs}))
            driver = subprocess.Popen(
                [sys.executable, HERE / "engine_driver.py", plan], env=self.environment, start_new_session=True
            )
            why = self.wait(driver)
            failed = next((run.name for run in left if run.name not in self.done()), None)
            if failed:
                self.file(failed, "json").write_text(json.dumps({"error": why}))

    def wait(self, driver: subprocess.Popen) -> str:
        """Wait while runs get done in time; no process of the driver's session outlives this."""
        done, since = self.done(), time.monotonic()
        try:
            while driver.poll() is None:
                time.sleep(0.2)
                for name in self.done() - done:
                    self.say(f"engine {self.out.name}/{name}: {time.monotonic() - since:.0f} s")
                    done, since = done | {name}, time.monotonic()
                if time.monotonic() - since > RUN_SECONDS:
                    return f"the engine took more than {RUN_SECONDS} s"
            return f"the driver ended with status {driver.returncode} while this engine ran"
        finally:
            try:
                os.killpg(driver.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            driver.wait()

    def done(self) -> set[str]:
        return {name for name in self.runs if self.file(name, "json").exists()}

    def file(self, name: str, kind: str) -> pathlib.Path:
        return self.out / f"{name}.{kind}"

    def result(self, name: str) -> Result:
        """Raises EngineFailed, with the end of the engine's log, if that run came to no end."""
        data = json.loads(self.file(name, "json").read_text())
        log = self.file(name, "log").read_text(errors="replace") if self.file(name, "log").exists() else ""
        if "error" in data:
            raise EngineFailed(f"{self.out.name}/{name}: {data['error']}\n{log[-6000:]}")
        return Result(self.runs[name], data["parts"], data["reports"], data["seconds"], log)


def base_environment(stub: pathlib.Path) -> dict[str, str]:
    """The tests' own environment without anything that would switch the overlay or shift the results."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("LORA_FASTPATH", "SGLANG_", "PYTHON"))}
    return kept | {
        "LD_LIBRARY_PATH": os.pathsep.join([str(stub), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]),
        "TRITON_INTERPRET": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
