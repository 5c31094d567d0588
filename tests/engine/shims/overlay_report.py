"""What the overlay did in a scheduler process, written to a file when the test driver asks for it.

The driver calls `engine.collective_rpc("write_overlay_report", path=...)`, which runs the method below in the
scheduler. It only looks at modules that are there already, so with the overlay absent or off it imports nothing.
"""

from __future__ import annotations

import collections
import enum
import functools
import inspect
import json
import pathlib
import sys
import types

from import_hooks import after_import

launches: collections.Counter[str] = collections.Counter()

SHAPES = {
    "shrink": lambda given: (given["slices"], len(given["x"])),
    "expand": lambda given: (len(given["ends"]), len(given["y"])),
    "moe_delta": lambda given: (2 if given["weights"] is None else 1, given["routing"].pairs),
    "moe_activate": lambda given: (2, given["routing"].pairs),
    "heads_product": lambda given: (1, len(given["x"])),
}
"""Launcher, and module under lora_fastpath.kernels: the slices and rows of a launch from its arguments by name. A row
of the expert kernels is a pair of a token and an expert."""


LOOKED_AT = ("sglang.srt.lora.", "sglang.srt.models.deepseek")
"""What the names of modules begin with in which sglang's own code is looked for and ours must be found."""


def install() -> None:
    """Count the kernels' launches and give sglang's scheduler the reporting method."""
    for name in SHAPES:
        count(name)

    @after_import("sglang.srt.managers.scheduler")
    def add_method(module):
        module.Scheduler.write_overlay_report = lambda self, path: pathlib.Path(path).write_text(json.dumps(report()))


def count(name: str) -> None:
    """Count the calls of a launcher, by slices and rows."""

    @after_import(f"lora_fastpath.kernels.{name}")
    def wrap(module):
        launch = getattr(module, name)
        signature = inspect.signature(launch)

        @functools.wraps(launch)
        def counted(*args, **kwargs):
            given = signature.bind(*args, **kwargs).arguments
            slices, rows = SHAPES[name](given)
            launches[f"{name} slices={slices} rows={rows}"] += 1
            return launch(*args, **kwargs)

        setattr(module, name, counted)


def report() -> dict:
    """{"modules", "sites": {name: [state, reason]}, "launches": {kernel and shape: n}, "foreign"}

    Sites whose target module this engine never imported (another LoRA backend's) are left out.
    """
    overlay = sys.modules.get("lora_fastpath.registry")
    entries = overlay.registry.entries if overlay else {}
    return {
        "modules": [name for name in ("lora_fastpath", "wrapt") if name in sys.modules],
        "sites": {n: [e.state.name, e.reason] for n, e in entries.items() if e.site.module in sys.modules},
        "launches": dict(launches),
        "foreign": foreign(),
    }


def foreign() -> list[str]:
    """The methods of classes in LOOKED_AT whose code comes from another file than their class does, and its functions
    that are no functions.

    Left out is what Python itself makes, the methods of enums and dataclasses, and what torch.no_grad() does.
    """
    found = []
    for module in [module for name, module in sys.modules.items() if name.startswith(LOOKED_AT)]:
        for name, cls in vars(module).items():
            if type(cls).__name__ == "FunctionWrapper" and cls.__module__ == module.__name__:
                found.append(name)
            if not isinstance(cls, type) or cls.__module__ != module.__name__ or issubclass(cls, enum.Enum):
                continue
            for name, value in vars(cls).items():
                method = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
                file = getattr(getattr(method, "__code__", None), "co_filename", "")
                theirs = file in (module.__file__, "<string>") or file.endswith("torch/utils/_contextlib.py")
                stock = theirs and type(method) is types.FunctionType
                if callable(value) and not isinstance(value, type) and name != "__repr__" and not stock:
                    found.append(f"{cls.__name__}.{name}")
    return found
