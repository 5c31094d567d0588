"""What the overlay has to say, one line at a time."""

from __future__ import annotations

import sys


def line(text: str) -> None:
    """Write one line to stderr, whatever whitespace `text` has. Never raises: saying it must not break the program."""
    try:
        sys.stderr.write(f"lora-fastpath: {' '.join(text.split())}\n")
        sys.stderr.flush()
    except Exception:  # noqa: BLE001 - stderr closed, None or full
        pass
