"""Makes lora_fastpath, and what tests share, importable without leaving the checkout's folders on sys.path."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

if "lora_fastpath" not in sys.modules:
    sys.path.insert(0, str(ROOT))
    import lora_fastpath  # noqa: F401

    sys.path.remove(str(ROOT))

if importlib.util.find_spec("torch") and importlib.util.find_spec("triton"):
    sys.path.insert(0, str(ROOT / "tests" / "sm100"))
    import sm100_layers  # noqa: F401

    sys.path.remove(str(ROOT / "tests" / "sm100"))
