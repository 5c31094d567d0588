"""The overlay at work on this machine: the same requests to an unmodified sglang without and with it.

On any machine: a tiny model with real weights, served on the CPU, requests with two adapters and without one in a batch;
the overlay's sites, the tokens, the largest difference of a log-probability. With a CUDA GPU also speeds (engine_ab.py)
at the layer sizes of Qwen3-8B.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ENGINE_TESTS = HERE.parent / "tests" / "engine"
sys.path.insert(0, str(ENGINE_TESTS))

import harness  # noqa: E402
import stub_libcuda  # noqa: E402
import tiny_models  # noqa: E402

RUN = harness.Run("demo", "dense", "mixed", {"lora_backend": "csgmv"})
SPEED = "--shape qwen3-8b-bf16 --layers 8 --targets all-linear --batches 1,16 --adapters 1 --prefill 128 --reps 3 --name demo"


def main() -> int:
    for tool in ("gcc", "nm"):
        if not shutil.which(tool):
            print(f"demo: needs {tool} (for an empty libcuda): install gcc and binutils")
            return 1
    with tempfile.TemporaryDirectory(prefix="lora-fastpath-demo-") as folder:
        root = Path(folder)
        print("Two engines on the CPU, one after the other, about a minute each: sglang as it is, sglang with the overlay.")
        print("Without a GPU both engines' Triton kernels run under Triton's interpreter.", flush=True)
        tiny_models.write(root / "models")
        (root / "stub").mkdir()
        stub_libcuda.write(root / "stub")
        results = {}
        for overlay in ("absent", "on"):
            group = harness.Group(overlay, [RUN], root / "models", root / "stub", root / overlay)
            group.serve()
            results[overlay] = group.result(RUN.name)
        good = compare(results["absent"], results["on"])
    if subprocess.run(["nvidia-smi", "-L"], check=False, capture_output=True).returncode if shutil.which("nvidia-smi") else True:
        print("\nNo NVIDIA GPU here, so no speeds: benchmarks/RESULTS.md has what was measured.")
        return 0 if good else 1
    print("\nSpeeds on this GPU, four engines side by side, two to four minutes:", flush=True)
    with tempfile.TemporaryDirectory(prefix="lora-fastpath-speed-") as folder:
        command = [sys.executable, str(HERE / "engine_ab.py"), *SPEED.split(), "--results", folder, "--out", f"{folder}/out"]
        measured = subprocess.run(command, check=False).returncode == 0
    return 0 if good and measured else 1


def compare(stock: harness.Result, fast: harness.Result) -> bool:
    """Print sites and answers; True when every site is bound, all tokens are equal and base requests are exact."""
    print(f"\n{'site':12} {'state':10} reason")
    sites = fast.reports["mixed"]["sites"]
    for name, (state, reason) in sites.items():
        print(f"{name:12} {state.lower():10} {reason}")
    for line in fast.overlay_lines:
        print(line)
    print(f"\n{'adapter':10} {'tokens without the overlay':28} {'with it':28} largest logprob difference")
    good = bool(sites) and all(state == "BOUND" for state, _ in sites.values())
    for a, b in zip(stock.parts["mixed"], fast.parts["mixed"], strict=True):
        equal = a["tokens"] == b["tokens"]
        before, after = ([*x["input_logprobs"], *x["logprobs"]] for x in (a, b))
        difference = max(abs(p - q) for p, q in zip(before, after, strict=True))
        print(f"{a['adapter'] or 'none':10} {a['tokens']!s:28} {b['tokens']!s:28} {difference:.1e} {'' if equal else 'DIFFERENT'}")
        good &= equal and (a["adapter"] is not None or difference == 0)
    launches = sum(fast.reports["mixed"]["launches"].values())
    print(f"\nThe overlay's kernels were launched {launches} times. {'All as it should be.' if good and launches else 'NOT as it should be.'}")
    return good and launches > 0


if __name__ == "__main__":
    sys.exit(main())
