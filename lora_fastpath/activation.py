"""Activation: settings, then hooks. Called at interpreter start, by sitecustomize.py or by the wheel's .pth line."""

from __future__ import annotations

import glob
import importlib
import os
import sys

from lora_fastpath import report

_activated = False


def activate() -> None:
    """Turn the overlay on if the environment says so. Never raises; one line on stderr on trouble. Idempotent."""
    global _activated
    if _activated:
        return
    _activated = True
    try:
        _activate()
    except Exception as error:  # noqa: BLE001 - whatever it is, the program has to start
        text = (
            str(error)
            if type(error).__name__ in ("SettingsError", "LoraFastpathError", "WraptMissing")
            else (f"{type(error).__name__}: {error}; reinstall the overlay or unset LORA_FASTPATH")
        )
        if os.environ.get("LORA_FASTPATH_STRICT", "").strip() == "1":
            sys.meta_path.insert(0, Refusal(text))
        report.line(f"off, sglang runs as stock: {text}")


class WraptMissing(ImportError):
    """wrapt is neither installed nor beside the overlay."""


class Refusal:
    """Strict mode without an overlay: importing sglang is an error; programs that don't are none of our business."""

    def __init__(self, text: str) -> None:
        self._text = text

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name == "sglang":
            from lora_fastpath.registry import LoraFastpathError

            raise LoraFastpathError(f"{self._text}; LORA_FASTPATH_STRICT=1 makes this an error")


def _activate() -> None:
    from lora_fastpath import settings
    from lora_fastpath.registry import registry
    from lora_fastpath.sites import SITES

    chosen = settings.Settings.from_environ(os.environ, [site.name for site in SITES])
    settings.use(chosen)
    if not chosen.enabled:
        return
    _import_wrapt()
    from lora_fastpath import hooks

    registry.add(SITES)
    hooks.install(registry, chosen)


def _import_wrapt() -> None:
    """Import wrapt: installed, or from a wheel that lies beside the overlay (its Python part runs from the archive)."""
    try:
        importlib.import_module("wrapt")
        return
    except ModuleNotFoundError:
        pass
    overlay = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    for wheel in sorted(glob.glob(os.path.join(glob.escape(overlay), "wrapt-*.whl")), reverse=True):
        sys.path.append(wheel)
        try:
            importlib.import_module("wrapt")
            return
        except ImportError:
            pass
        finally:
            sys.path.remove(wheel)
    raise WraptMissing(
        f"wrapt is missing for {sys.executable}: pip install wrapt, or put its wheel (wrapt-*.whl) into {overlay}"
    )
