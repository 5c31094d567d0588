"""Activation: wait for sglang, then read the settings and hook its modules.

Called at interpreter start, by sitecustomize.py or by the wheel's .pth line, in every Python of the environment. Most
of them never import sglang, so nothing that costs time (wrapt and dataclasses: 20 ms each) is imported before it is.
"""

from __future__ import annotations

import os
import sys

from lora_fastpath import report

TYPE_CHECKING = False
if TYPE_CHECKING:  # importing these takes longer than all the rest
    from collections.abc import Callable
    from importlib.machinery import ModuleSpec

    from lora_fastpath.settings import Settings

PACKAGE = "sglang"
OVERLAY = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

_activated = False


def activate(path_complete: bool = True) -> None:
    """Turn the overlay on if the environment says so. Never raises; one line on stderr on trouble. Idempotent.

    path_complete: False while Python still adds folders to sys.path, so that what is missing may yet come.
    """
    global _activated
    if _activated:
        return
    _activated = True
    try:
        if PACKAGE in sys.modules:
            _start()
            return
        # What can be wrong is said now, not when a server starts; only LORA_FASTPATH=1 alone needs no reading.
        alone = os.environ.get("LORA_FASTPATH") == "1" and not any(n.startswith("LORA_FASTPATH_") for n in os.environ)
        if not alone and not _settings().enabled:
            return
        if path_complete and not _wrapt_wheels() and not _found("wrapt"):
            raise ModuleNotFoundError(_wrapt_missing())
        sys.meta_path.insert(0, Waiting(_start_or_report))
    except Exception as error:  # noqa: BLE001 - whatever it is, the program has to start
        _off(error)


class Waiting:
    """Calls `start` when sglang is about to be imported, and leaves unless that raised."""

    def __init__(self, start: Callable[[], None]) -> None:
        self._start = start

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name != PACKAGE:
            return None
        self._start()
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        # Asked anew, because the loop that called us has lost its place in the list that we have just changed.
        import importlib.util

        return importlib.util.find_spec(name)


def _start_or_report() -> None:
    try:
        _start()
    except Exception as error:  # noqa: BLE001 - importing sglang must not fail because of us
        _off(error)


def _off(error: Exception) -> None:
    text = f"{type(error).__name__}: {error}"
    report.line(f"off, sglang runs as stock: {text} (put it right, or unset LORA_FASTPATH)")
    if os.environ.get("LORA_FASTPATH_STRICT", "").strip() == "1":
        sys.meta_path.insert(0, Waiting(lambda: _refuse(text)))


def _refuse(text: str) -> None:
    from lora_fastpath.registry import LoraFastpathError

    raise LoraFastpathError(f"{text}; LORA_FASTPATH_STRICT=1 makes this an error")


def _settings() -> Settings:
    from lora_fastpath import settings
    from lora_fastpath.sites import SITES

    settings.use(settings.Settings.from_environ(os.environ, [site.name for site in SITES]))
    return settings.current()


def _start() -> None:
    chosen = _settings()
    if not chosen.enabled:
        return
    _import_wrapt()
    from lora_fastpath import hooks
    from lora_fastpath.registry import registry
    from lora_fastpath.sites import SITES

    registry.add(SITES)
    hooks.install(registry, chosen)


def _import_wrapt() -> None:
    """Import wrapt: installed, or from a wheel that lies beside the overlay (its Python part runs from the archive)."""
    try:
        import wrapt  # noqa: F401

        return
    except ModuleNotFoundError:
        pass
    for wheel in _wrapt_wheels():
        sys.path.insert(0, wheel)
        try:
            import wrapt  # noqa: F401

            return
        except ImportError:
            pass
        finally:
            sys.path.remove(wheel)
    raise ModuleNotFoundError(_wrapt_missing())


def _found(name: str) -> bool:
    try:
        return any(finder.find_spec(name, None) for finder in sys.meta_path)
    except ImportError:
        return False


def _wrapt_wheels() -> list[str]:
    names = [name for name in os.listdir(OVERLAY) if name.startswith("wrapt-") and name.endswith(".whl")]
    return [os.path.join(OVERLAY, name) for name in sorted(names, reverse=True)]


def _wrapt_missing() -> str:
    return f"wrapt is missing for {sys.executable}: pip install wrapt, or put its wheel (wrapt-*.whl) into {OVERLAY}"
