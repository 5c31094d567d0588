"""Thousands of decode steps under CUDA graphs while adapters, lengths and batch sizes change (see tests/toy/decode_steps.py)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "backend,model", [("csgmv", "dense"), ("triton", "dense"), ("csgmv", "experts"), ("triton", "shared-outer")]
)
def test_replay_equals_eager_and_float64(backend, model):
    paths = [str(ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    run = subprocess.run(
        [sys.executable, str(ROOT / "tests/toy/decode_steps.py"), backend, "--steps", "2000", "--model", model],
        env=os.environ | {"LORA_FASTPATH": "1", "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    facts = json.loads(run.stdout.splitlines()[-1])
    assert facts["graphs"] == 6 and facts["unequal"] == 0 and facts["base_unequal"] == 0
    assert facts["moved"] > 0.2, "the adapters do not matter, so the test shows nothing"
    # bfloat16 through two layers of four projections each; a wrong adapter gives errors near `moved`
    assert facts["error"] < 0.08 and facts["prefill_error"] < 0.04
    sites = ("adapters", "qkv", "row", "merged") if model == "dense" else ("adapters", "moe", "fix-stale-experts")
    assert {facts["sites"][site] for site in sites} == {"bound"}
    assert not facts["stock_prepared"]
