"""Every kernel compiles for the GPUs that it is made for: the interpreter accepts what the compiler does not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_kernels_compile_and_fit(capability, tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(tmp_path)}
    script = Path(__file__).with_name("compile_kernels.py")
    run = subprocess.run(
        [sys.executable, "-W", "ignore", str(script), str(capability)],
        env=environment, capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]
    found = json.loads(run.stdout.splitlines()[-1])
    assert len(found) > 20
    for name, facts in found.items():
        assert facts["shared"] <= 99 * 1024, f"{name} does not fit a GPU of compute capability 8.6 or 8.9"
        if capability >= 90 and name.startswith(("moe activate", "moe sum", "sm100")):
            assert facts["loads_before_wait"] == 0, f"{name} reads before what it reads is written"
