"""Describe and compile the SM100 library where there is no GPU; prints one JSON line. Run by test_library.py and `make sm100`.

python tests/sm100/compile_library.py      our unit alone, seconds
python tests/sm100/compile_library.py all  every unit, linked, loaded and asked for its GEMMs: 10 minutes on 2 cores
python tests/sm100/compile_library.py hopper LIBRARY  for compute capability 9.0, with reference_gemm.cu for FlashInfer's GEMMs

tests/gpu/test_sm100_launcher.py runs the last one's.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import nvidia

ROOT = Path(__file__).resolve().parents[2]
CUDA = Path(nvidia.__path__[0]) / "cu13"
"""pip's compiler and libraries."""
LAYERS = {  # hidden size, intermediate size, experts, experts a token
    "Qwen3-30B-A3B": (2048, 768, 128, 8),
    "Qwen3.5-35B-A3B": (2048, 512, 256, 8),
    "DeepSeek-V3": (7168, 2048, 256, 8),
    "Kimi-K2.5": (7168, 2048, 384, 8),
    "no such": (192, 192, 8, 2),
}


def environment(scratch: Path) -> dict[str, str]:
    """What FlashInfer needs to compile for a GPU that is not here, with pip's CUDA."""
    libraries = scratch / "lib"
    libraries.mkdir(parents=True)
    (libraries / "libcudart.so").symlink_to(CUDA / "lib" / "libcudart.so.13")
    if not shutil.which("nvidia-smi"):
        script = ROOT / "tests" / "engine" / "stub_libcuda.py"
        subprocess.run([sys.executable, str(script), str(libraries)], check=True, stdout=subprocess.DEVNULL)
        (libraries / "libcuda.so").symlink_to(libraries / "libcuda.so.1")
    return {
        "FLASHINFER_CUDA_ARCH_LIST": "10.0a",
        "FLASHINFER_WORKSPACE_BASE": str(scratch),
        "CUDA_HOME": str(CUDA),
        "CPATH": str(CUDA / "include"),
        "LIBRARY_PATH": str(libraries),
        "LD_LIBRARY_PATH": f"{libraries}:{CUDA / 'lib'}",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",  # ninja is beside Python
    }


def missing(functions: object, fp4: bool, hidden: int, intermediate: int, experts: int, top_k: int) -> str:
    """What FlashInfer lacks for such a layer, or "". Asked with weights of no content."""
    import torch

    from lora_fastpath.kernels.sm100 import BaseExperts

    def tensor(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    e, h, i, fp8 = experts, hidden, intermediate, torch.float8_e4m3fn
    try:
        if fp4:
            weights = (tensor(torch.uint8, e, 2 * i, h // 2), tensor(fp8, e, 2 * i, h // 16))
            weights += (tensor(torch.uint8, e, h, i // 2), tensor(fp8, e, h, i // 16))
            alphas = [tensor(torch.float32, size) for size in (e, e, 1)]
        else:
            weights = (tensor(fp8, e, 2 * i, h), tensor(torch.float32, e, 2 * i // 128, h // 128))
            weights += (tensor(fp8, e, h, i), tensor(torch.float32, e, h // 128, i // 128))
            alphas = []
        BaseExperts(functions, torch.bfloat16, *weights, e, 0, *alphas).require_kernels(top_k)
    except ValueError as error:
        return str(error)
    return ""


def hopper(library: str) -> None:
    sys.path.insert(0, str(ROOT))
    from flashinfer.jit import fused_moe

    from lora_fastpath import sm100_library

    ours = sm100_library.describe(fused_moe.gen_trtllm_gen_fused_moe_sm100_module())
    replaced = ("trtllm_batched_gemm_runner.cu", "trtllm_fused_moe_runner.cu")  # the latter only drives the former
    sources = [source for source in ours.sources if source.name not in replaced]
    sources.append(Path(__file__).with_name("reference_gemm.cu"))
    flags = [flag.replace("100a", "90a") for flag in ours.extra_cuda_cflags]
    spec = dataclasses.replace(ours, name=f"{ours.name}_hopper", sources=sources, extra_cuda_cflags=flags)
    shutil.copy(sm100_library.build(spec), library)
    print(json.dumps({"library": library}))


def ask(library: Path) -> dict[str, str] | str:
    """What FlashInfer lacks for each layer. FlashInfer 0.6.12 ends the process that asks without a GPU."""
    done = subprocess.run([sys.executable, "-W", "ignore", __file__, "ask", str(library)], capture_output=True, text=True)
    lines = done.stdout.splitlines() or ["no output"]
    return json.loads(lines[-1]) if done.returncode == 0 else f"not to be asked here: {lines[-1]}"


def answer(library: str) -> None:
    sys.path.insert(0, str(ROOT))
    from lora_fastpath import sm100_library

    functions = sm100_library.load(Path(library))
    kinds = {"FP8": False, "NVFP4": True}
    found = {f"{kind} {name}": missing(functions, kinds[kind], *layer) for name, layer in LAYERS.items() for kind in kinds}
    print(json.dumps(found))


def main(every_unit: bool) -> None:
    sys.path.insert(0, str(ROOT))
    from flashinfer.jit import fused_moe
    from flashinfer.jit.core import jit_spec_registry

    from lora_fastpath import sm100_library
    from lora_fastpath.registry import package_version

    stock = fused_moe.gen_trtllm_gen_fused_moe_sm100_module()
    before = copy.deepcopy(stock)
    ours = sm100_library.describe(stock)
    facts = {
        "flashinfer": package_version("flashinfer"),
        "stock_unchanged": stock == before,
        "name": ours.name,
        "again": sm100_library.describe(stock).name,
        "other_flags": sm100_library.describe(dataclasses.replace(stock, extra_cuda_cflags=["-O1"])).name,
        "registered": ours.name in jit_spec_registry.get_all_specs(),
        "described_only": not ours.build_dir.exists(),
        "gone": sorted({source.name for source in stock.sources} - {source.name for source in ours.sources}),
        "new": [str(source) for source in ours.sources if source not in stock.sources],
        "fields_changed": [
            field.name for field in dataclasses.fields(stock) if getattr(stock, field.name) != getattr(ours, field.name)
        ],
        "architectures": [flag for flag in ours.extra_cuda_cflags if "arch" in flag],
    }
    if every_unit:
        library = sm100_library.build(ours)
        functions = sm100_library.load(library)
        facts["sizes"] = [int(size) for size in functions.lora_fastpath_sizes(64, 8, 128, 16)]
        facts["missing_gemms"] = ask(library)
    else:
        library = Path(os.environ["FLASHINFER_WORKSPACE_BASE"]) / "ours.o"
        commands = dataclasses.replace(ours, sources=ours.sources[-1:]).get_compile_commands()
        command = commands[0]["command"].rpartition(" -o ")[0]
        subprocess.run(f"{command} -o {library}", shell=True, check=True, stdout=sys.stderr)
    listed = subprocess.run(["nm", "--defined-only", str(library)], check=True, capture_output=True, text=True).stdout
    facts["symbols"] = sorted(
        line.split()[-1]
        for line in listed.splitlines()
        if " T " in line and ("lora_fastpath_" in line or "FlashInferSet" in line)
    )
    print(json.dumps(facts))


if __name__ == "__main__":
    arguments = sys.argv[1:]
    if arguments[:1] == ["here"]:
        if arguments[1:2] == ["hopper"]:
            hopper(arguments[2])
        else:
            main("all" in arguments)
    elif arguments[:1] == ["ask"]:
        answer(arguments[1])
    else:  # FlashInfer reads its settings when it is imported
        with tempfile.TemporaryDirectory() as scratch:
            command = [sys.executable, "-W", "ignore", __file__, "here", *arguments]
            sys.exit(subprocess.run(command, env=os.environ | environment(Path(scratch))).returncode)
