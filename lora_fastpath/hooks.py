"""One wrapt post-import hook a target module: sites are bound when sglang imports their modules."""

from __future__ import annotations

import functools
from types import ModuleType

from lora_fastpath import report
from lora_fastpath.registry import LoraFastpathError, Registry, Site, State
from lora_fastpath.settings import Settings


def install(registry: Registry, settings: Settings) -> None:
    """Hook the modules of the selected sites; a module that is imported already is bound at once.

    Raises ImportError without wrapt, LoraFastpathError in strict mode.
    """
    import wrapt

    registry.strict = settings.strict
    for name in registry.entries:
        if name not in settings.sites:
            registry.deselect(name, settings.selection)
    helpless: dict[str, list[str]] = {}
    for name, entry in registry.entries.items():
        for needed in entry.site.requires:
            if entry.state is State.PENDING and needed not in settings.sites:
                registry.deselect(name, f"{settings.selection}, since it needs site {needed}")
                helpless.setdefault(needed, []).append(name)
    for needed, names in helpless.items():
        if f"-{needed}" not in settings.selection.replace(" ", "").split(","):  # else the user knows
            text = f"site {', '.join(names)} needs site {needed}, which LORA_FASTPATH_SITES={settings.selection} leaves out"
            if registry.strict:
                raise LoraFastpathError(f"{text}; LORA_FASTPATH_STRICT=1 makes this an error")
            report.line(f"{text}; stock sglang serves it (add {needed} to LORA_FASTPATH_SITES)")
    waiting: dict[str, list[Site]] = {}
    for entry in registry.entries.values():
        if entry.state is State.PENDING:
            waiting.setdefault(entry.site.module, []).append(entry.site)
    for module, sites in waiting.items():
        wrapt.register_post_import_hook(functools.partial(_imported, registry, sites), module)


def _imported(registry: Registry, sites: list[Site], module: ModuleType) -> None:
    for site in sites:
        registry.bind(site, module)
