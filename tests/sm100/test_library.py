"""The SM100 library without a GPU: what it is described as, that our unit compiles, and how building it fails."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lora_fastpath import sm100_library

pytest.importorskip("flashinfer")
HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
NVCC = importlib.util.find_spec("nvidia") and any(
    (Path(folder) / "cu13" / "bin" / "nvcc").exists()
    for folder in importlib.util.find_spec("nvidia").submodule_search_locations
)

BUILD = """
import dataclasses, json, os, sys, time
sys.path.insert(0, {root!r})
from pathlib import Path
from flashinfer.jit.core import JitSpec
from lora_fastpath import sm100_library
from lora_fastpath.registry import Unfit
spec = JitSpec("lora_fastpath_test", [Path({source!r})], ["-std=c++17"], [], ["-nodefaultlibs"], [])
while time.time() < {start}:
    pass
try:
    print(json.dumps(dict(path=str(sm100_library.build(spec)))))
except Unfit as error:
    print(json.dumps(dict(unfit=str(error))))
"""


@pytest.mark.skipif(not NVCC, reason="pip's nvidia-cuda-nvcc is not installed")
def test_our_unit_compiles_for_blackwell():
    run = subprocess.run(
        [sys.executable, str(HERE / "compile_library.py")], capture_output=True, text=True, timeout=600
    )
    assert run.returncode == 0, run.stderr[-3000:]
    facts = json.loads(run.stdout.splitlines()[-1])
    assert facts["symbols"] == [
        "FlashInferSetCubinCallback",
        "FlashInferSetCurrentCubin",
        *(f"__tvm_ffi_lora_fastpath_{name}" for name in ("gemm", "kernels", "route", "sizes")),
    ]
    assert facts["stock_unchanged"] and not facts["registered"] and facts["described_only"]
    assert facts["fields_changed"] == ["name", "sources"]
    assert facts["gone"] == [sm100_library.LAUNCHER]
    assert facts["new"] == [str(ROOT / "kernels" / "csrc" / "sm100.cu")]
    assert facts["architectures"] == ["-gencode=arch=compute_100a,code=sm_100a"]
    assert facts["name"] == facts["again"] != facts["other_flags"]


def builds(tmp_path: Path, text: str, count: int, **environ: str) -> tuple[list[dict], list[str]]:
    """What `count` processes get that build at once a library of one source, and the compiler's calls."""
    source, log, compiler = tmp_path / "unit.cpp", tmp_path / "calls", tmp_path / "c++"
    source.write_text(text)
    log.touch()
    compiler.write_text(
        f'#!/bin/sh\necho "$@" >> {log}\nsleep 1\nfor a in "$@"; do case $a in -lcudart|-lcuda) ;; *) set -- "$@" "$a";; esac; shift; done\nexec c++ "$@"\n'
    )
    compiler.chmod(0o755)
    script = BUILD.format(root=str(ROOT), source=str(source), start=time.time() + 8 * (count > 1))
    environment = {**os.environ, "FLASHINFER_WORKSPACE_BASE": str(tmp_path), "CXX": str(compiler), **environ}
    environment["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment |= {"CUDA_HOME": str(tmp_path), "FLASHINFER_CUDA_ARCH_LIST": "10.0a"}
    running = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", script], env=environment, stdout=subprocess.PIPE, text=True
        )
        for _ in range(count)
    ]
    answers = [json.loads(process.communicate(timeout=300)[0].splitlines()[-1]) for process in running]
    return answers, log.read_text().splitlines()


def test_processes_that_build_at_once_compile_once(tmp_path):
    answers, calls = builds(tmp_path, "int answer() { return 42; }\n", 2)
    assert answers[0] == answers[1] and Path(answers[0]["path"]).exists()
    assert len(calls) == 2  # one compiles, one links
    answers, calls = builds(tmp_path, "int answer() { return 42; }\n", 1)
    assert Path(answers[0]["path"]).exists()


def test_the_compilers_first_error_is_quoted(tmp_path):
    answers, _ = builds(tmp_path, "int answer() { return forty_two; }\nint other() { return also_missing; }\n", 1)
    assert "forty_two" in answers[0]["unfit"] and "also_missing" not in answers[0]["unfit"]
    assert answers[0]["unfit"].startswith(f"compiling lora_fastpath_test in {tmp_path}")
    answers, _ = builds(tmp_path, "int answer() { return 42; }\n", 1)  # mended, it builds
    assert Path(answers[0]["path"]).exists()


def test_flashinfers_ban_of_compiling_is_kept(tmp_path):
    answers, calls = builds(tmp_path, "int answer() { return 42; }\n", 1, FLASHINFER_DISABLE_JIT="1")
    assert "FLASHINFER_DISABLE_JIT" in answers[0]["unfit"] and not calls


@pytest.mark.parametrize(
    ("output", "found"),
    [
        (
            '[1/2] nvcc x\nx.cu(3): warning: w\nx.cu(4): error: expected a ";"\ny.cu(1): error: z',
            'x.cu(4): error: expected a ";"',
        ),
        (
            "Ninja build failed. Ninja output:\n/bin/sh: 1: nvcc: not found\nninja: stopped",
            "/bin/sh: 1: nvcc: not found",
        ),
        ("a.o: undefined reference to `f'", "a.o: undefined reference to `f'"),
        ("[Errno 2] No such file or directory: 'ninja'", "[Errno 2] No such file or directory: 'ninja'"),
        ("", "no output"),
    ],
)
def test_first_error(output, found):
    assert sm100_library.first_error(output) == found
