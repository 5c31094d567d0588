"""Python imports this file at start when its folder is on PYTHONPATH: it runs the sitecustomize that it hides, then,
if LORA_FASTPATH asks for it, activates the overlay. Nothing it does may keep an interpreter from starting."""

import os
import sys
from _frozen_importlib import module_from_spec  # importlib.util, where it is public, takes 7 ms to import
from _frozen_importlib_external import PathFinder


def _run_hidden(path):
    """Run the next sitecustomize on `path` (a distribution's, a tracer's), as if ours were not there.

    What it raises goes on to Python, which then reports it in its own words and starts all the same.
    """
    spec = PathFinder.find_spec("sitecustomize", path)
    if spec is None or spec.loader is None:
        return
    sys.modules["sitecustomize"] = module_from_spec(spec)
    spec.loader.exec_module(sys.modules["sitecustomize"])


def _is_ours(entry):
    return os.path.realpath(entry) == os.path.realpath(_folder)


def _activate():
    """Activate, then take our folder off sys.path: its `kernels`, `patches` and `tests` are no top-level packages.

    lora_fastpath stays importable where it has been imported; `python -m lora_fastpath` must still find it otherwise.
    """
    try:
        switch = os.environ.get("LORA_FASTPATH") or os.environ.get("SGLANG_EXPERIMENTAL_LORA_OPTI") or "0"
        if switch != "0":
            from lora_fastpath.activation import activate

            activate()
    except Exception as error:
        text = " ".join(f"{type(error).__name__}: {error}".split())
        sys.stderr.write(
            f"lora-fastpath: off, sglang runs as stock: {text} (put {_folder} right, or take it off PYTHONPATH)\n"
        )
    # While Python looks for a module to run, argv[0] is "-m" and the module's name stands before the arguments.
    runs_us = sys.argv[:1] == ["-m"] and sys.orig_argv[-len(sys.argv)].endswith("lora_fastpath")
    if "lora_fastpath" in sys.modules or not runs_us:
        sys.path[:] = [entry for entry in sys.path if not _is_ours(entry)]


_folder = os.path.dirname(os.path.abspath(__file__))
_at = next((place for place, entry in enumerate(sys.path) if _is_ours(entry)), -1)
try:
    # We hide what comes after us alone; before us may stand somebody who runs us because we are hidden by them.
    _run_hidden([entry for entry in sys.path[_at + 1 :] if not _is_ours(entry)])
finally:
    _activate()
