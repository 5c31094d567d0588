"""A copy of the overlay's machinery with one site of its own, against a stand-in for sglang. For tests that start Pythons."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SWITCHES = ("LORA_FASTPATH", "SGLANG_", "PYTHON")

SITES = """
from lora_fastpath.registry import Site

SITES = (
    Site("one", "sglang.layers", {"Layer.forward": ("self", "x")}, ">=0.5.12,<0.5.13", "lora_fastpath.patches.one"),
)
"""
PATCH = """
from lora_fastpath.kernels.double import double

WRAPPERS = {"Layer.forward": lambda wrapped, layer, args, kwargs: "ours " + double(wrapped(*args, **kwargs))}
"""
LAYERS = """
class Layer:
    def forward(self, x):
        return x
"""
FORWARD = "from sglang.layers import Layer; print(Layer().forward('x'))"
OURS, STOCK = "ours xx\n", "x\n"


class Overlay:
    """`folder` is the overlay, `packages` a folder for the path with sglang and whatever a test puts there."""

    def __init__(self, root: Path) -> None:
        self.folder, self.packages = root / "overlay", root / "packages"
        self.folder.mkdir()
        shutil.copy(ROOT / "sitecustomize.py", self.folder)
        shutil.copytree(
            ROOT / "lora_fastpath", self.folder / "lora_fastpath", ignore=shutil.ignore_patterns("__pycache__")
        )
        write(self.folder / "lora_fastpath" / "sites.py", SITES)
        write(self.folder / "patches" / "one.py", PATCH)
        write(self.folder / "kernels" / "double.py", "def double(text): return 2 * text")
        write(self.folder / "tests" / "test_nothing.py", "")
        write(self.packages / "sglang" / "__init__.py", "")
        write(self.packages / "sglang" / "version.py", "__version__ = '0.5.12.post1'")
        write(self.packages / "sglang" / "layers.py", LAYERS)

    def path(self, *more: Path) -> str:
        return os.pathsep.join(map(str, [self.folder, self.packages, *more]))

    def python(
        self, *arguments: str, path: str | None = None, cwd: Path | None = None, **environ: str
    ) -> subprocess.CompletedProcess:
        """Run this Python with the overlay on the path (or `path`) and no switch but those in `environ`."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(SWITCHES)}
        env = kept | {"PYTHONPATH": self.path() if path is None else path} | environ
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=cwd or self.packages,
            env=env,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
