"""Engines alive side by side, each in a process of its own (engine_worker.py), asked one at a time."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
WORKER = Path(__file__).resolve().with_name("engine_worker.py")
OVERLAY_SWITCHES = ("LORA_FASTPATH", "SGLANG_EXPERIMENTAL_LORA_OPTI", "SGLANG_TWO_STREAM_MAX_TOKENS")


class EngineError(RuntimeError):
    """An engine died, hung or refused a request; the text says which engine and why."""


def environment(sites: str, extra: dict[str, str] | None = None) -> dict[str, str]:
    """This process's environment for an engine with these sites of the overlay, or "", one that has never heard of it.

    Settings that the caller has made reach the overlay's engines only; "all" leaves LORA_FASTPATH_SITES to the caller.
    """
    env = dict(os.environ)
    env.setdefault("SGLANG_ENABLE_JIT_DEEPGEMM", "0")  # its warm-up costs minutes a start
    env.update({"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"})
    env.update(extra or {})
    paths = [p for p in env.get("PYTHONPATH", "").split(os.pathsep) if p and Path(p).resolve() != REPOSITORY]
    if sites:
        paths.insert(0, str(REPOSITORY))
        env["LORA_FASTPATH"] = "1"
        if sites != "all":
            env["LORA_FASTPATH_SITES"] = sites
    else:
        for name in [name for name in env if name.startswith(OVERLAY_SWITCHES)]:
            del env[name]
    env["PYTHONPATH"] = os.pathsep.join(paths)
    return env


def free_ports(count: int) -> list[int]:
    """Distinct free TCP ports: engines that start together and choose for themselves can choose the same one."""
    sockets = [socket.socket() for _ in range(count)]
    for s in sockets:
        s.bind(("127.0.0.1", 0))
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


class EngineProcess:
    """One engine. `ask` sends a request and returns its answer, or raises EngineError and, if fatal, ends the engine."""

    def __init__(self, name: str, settings: dict, env: dict[str, str], log: Path):
        self.name, self.log = name, log
        self.alive, self.error = True, ""
        self.started = time.monotonic()
        self.start_seconds: float | None = None
        self._buffer = b""
        with open(log, "wb") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, str(WORKER)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env=env,
                cwd=log.parent,
                start_new_session=True,  # a group of its own, so that `close` can end sglang's children too
            )
        self._send(settings)

    def wait_until_up(self, timeout: float) -> None:
        self._receive(timeout, "its start")
        self.start_seconds = time.monotonic() - self.started

    def ask(self, op: str, timeout: float, **fields) -> dict:
        if not self.alive:
            raise EngineError(f"{self.name}: not running ({self.error})")
        self._send({"op": op, **fields})
        return self._receive(timeout, op)

    def tail(self, lines: int = 25) -> str:
        """Last lines of what the engine's processes have written."""
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return "\n".join(f"    | {line}" for line in text.splitlines()[-lines:])

    def request_exit(self) -> None:
        if self.alive:
            self.alive = False
            try:
                self._send({"op": "exit"})
            except EngineError:
                pass  # gone already

    def close(self, patience: float = 0.0) -> None:
        """End the engine and everything that it has started, after up to `patience` seconds for it to leave by itself."""
        self.alive = False
        try:
            self.process.wait(patience)
        except subprocess.TimeoutExpired:
            pass
        try:
            os.killpg(self.process.pid, signal.SIGKILL)  # children outlive an engine that was shot
        except ProcessLookupError:
            pass
        self.process.wait()

    def _send(self, fields: dict) -> None:
        try:
            self.process.stdin.write((json.dumps(fields) + "\n").encode())
            self.process.stdin.flush()
        except OSError as error:
            self._fail(f"its process is gone ({error})")

    def _receive(self, timeout: float, what: str) -> dict:
        deadline = time.monotonic() + timeout
        fd = self.process.stdout.fileno()
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([fd], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                self._fail(f"no answer to {what} within {timeout:.0f} s")
            chunk = os.read(fd, 1 << 16)
            if not chunk:
                self._fail(f"its process ended during {what}")
            self._buffer += chunk
        line, self._buffer = self._buffer.split(b"\n", 1)
        answer = json.loads(line)
        if not answer.pop("ok"):
            if self.start_seconds is None:
                self._fail(answer["error"])
            raise EngineError(f"{self.name}: {what}: {answer['error']}")
        return answer

    def _fail(self, reason: str) -> None:
        self.error = reason
        self.close()
        raise EngineError(f"{self.name}: {reason}; the end of {self.log}:\n{self.tail()}")


def close_all(engines: list[EngineProcess], patience: float = 10.0) -> None:
    """End all engines together: asked first, then killed."""
    for engine in engines:
        engine.request_exit()
    deadline = time.monotonic() + patience
    for engine in engines:
        engine.close(max(0.0, deadline - time.monotonic()))
