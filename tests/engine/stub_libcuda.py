#!/usr/bin/env python3
"""Write DIR/libcuda.so.1, whose driver calls all answer CUDA_ERROR_NO_DEVICE, so that sglang's kernels can be imported
on a machine without an NVIDIA driver: stub_libcuda.py DIR, then DIR on LD_LIBRARY_PATH."""

from __future__ import annotations

import importlib.util
import pathlib
import re
import subprocess
import sys

NO_DEVICE = 100  # CUresult: CUDA_ERROR_NO_DEVICE


def write(folder: pathlib.Path) -> pathlib.Path:
    """Compile the stub into `folder` and return it. Needs gcc and nm."""
    folder.mkdir(parents=True, exist_ok=True)
    symbols: set[str] = set()
    for package in ("sgl_kernel", "deep_gemm"):
        spec = importlib.util.find_spec(package)
        for library in pathlib.Path(spec.submodule_search_locations[0]).rglob("*.so") if spec else ():
            names = subprocess.run(["nm", "-D", "--undefined-only", library], capture_output=True, text=True).stdout
            symbols.update(re.findall(r"\bU (cu[A-Z]\w+)", names))
    source = folder / "stub.c"
    source.write_text("".join(f"int {name}(void) {{ return {NO_DEVICE}; }}\n" for name in sorted(symbols)))
    library = folder / "libcuda.so.1"
    command = ["gcc", "-shared", "-fPIC", "-o", library, source, "-Wl,-soname,libcuda.so.1"]
    subprocess.run(command, check=True)
    return library


if __name__ == "__main__":
    print(write(pathlib.Path(sys.argv[1])))
