"""The sites against sglang's CUDA import paths, on a machine that only pretends to have a Hopper card."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import harness


def test_all_sites_bind(stub):
    environment = harness.base_environment(stub) | {"PYTHONPATH": str(harness.ROOT), "LORA_FASTPATH": "1"}
    del environment["TRITON_INTERPRET"]
    script = [sys.executable, os.fspath(harness.HERE / "pretend_hopper.py")]
    done = subprocess.run(script, env=environment, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr[-3000:]
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen["failed"] == {}
    assert seen["sites"] and {state for state, _ in seen["sites"].values()} == {"BOUND"}, seen["sites"]
