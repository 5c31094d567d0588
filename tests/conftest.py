"""Makes lora_fastpath importable for all tests without leaving the checkout's folders (kernels, tests) on sys.path."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

if "lora_fastpath" not in sys.modules:
    sys.path.insert(0, str(ROOT))
    import lora_fastpath  # noqa: F401

    sys.path.remove(str(ROOT))
