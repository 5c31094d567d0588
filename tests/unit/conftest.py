"""Makes this folder's stand-in importable without leaving the folder on sys.path."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = str(Path(__file__).resolve().parent)
sys.path.insert(0, HERE)
try:
    import sm100_reference  # noqa: F401
except ImportError:  # no torch: its tests are not collected either
    pass
sys.path.remove(HERE)
