"""A library that drives FlashInfer's Blackwell expert GEMMs in stages: FlashInfer's own sources and flags, our launcher.

It stands beside FlashInfer's own, which stays as it is: FlashInfer finds its prebuilt library by the name of its description.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from pathlib import Path
from typing import Any

from lora_fastpath.kernels import launch
from lora_fastpath.registry import Unfit, package_version

SOURCE = Path(launch.__file__).resolve().parent / "csrc" / "sm100.cu"

LAUNCHER = "trtllm_fused_moe_kernel_launcher.cu"
"""FlashInfer's, in whose place ours stands."""


def describe(stock: Any) -> Any:
    """Our library as a flashinfer.jit.JitSpec, from FlashInfer's of its own (stays as it is). Builds and writes nothing.

    The name has a key of our source, FlashInfer's release and the flags, so that no other build is taken for this one.
    Raises Unfit if FlashInfer's has no launcher that could be replaced.
    """
    sources = [source for source in stock.sources if source.name != LAUNCHER]
    if len(sources) != len(stock.sources) - 1:
        names = ", ".join(source.name for source in stock.sources)
        raise Unfit(f"FlashInfer's SM100 module has the sources {names}, expected {LAUNCHER} among them")
    facts = (SOURCE.read_bytes(), package_version("flashinfer"), sources, stock.extra_cuda_cflags, stock.extra_cflags)
    key = hashlib.sha256(repr(facts).encode()).hexdigest()[:16]
    return dataclasses.replace(stock, name=f"lora_fastpath_sm100_{key}", sources=[*sources, SOURCE])


def build(spec: Any) -> Path:
    """The library's path, compiled if it is not yet (minutes). Other processes wait for the one that compiles.

    Raises Unfit with the compiler's first error.
    """
    from flashinfer.jit.core import MissingJITCacheError

    try:
        spec.build(verbose=False)  # under FlashInfer's lock of this name
    except MissingJITCacheError:
        raise Unfit(
            "FLASHINFER_DISABLE_JIT forbids to compile, and the library is not prebuilt; unset it once"
        ) from None
    except (RuntimeError, OSError) as error:
        raise Unfit(f"compiling {spec.name} in {spec.build_dir} failed: {first_error(str(error))}") from error
    return spec.jit_library_path


def load(path: Path) -> Any:
    """The library's functions (see kernels/csrc/sm100.cu), able to fetch FlashInfer's GEMM kernels."""
    import tvm_ffi
    from flashinfer.jit.cubin_loader import setup_cubin_loader

    library = tvm_ffi.load_module(str(path))
    setup_cubin_loader(str(path))
    return library


def first_error(output: str) -> str:
    """The first line of a build's output that tells of an error, else the last."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if re.search(r"\berror\b\s*:|: error|undefined reference|not found", line, re.I)]
    return (errors or lines[-1:] or ["no output"])[0][:300]
