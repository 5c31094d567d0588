"""Python imports this file at start when its folder is on PYTHONPATH: it runs the sitecustomize that it hides, then,
if LORA_FASTPATH asks for it, activates the overlay. Nothing it does may keep an interpreter from starting."""

import os
import sys


def _run_hidden(folder):
    """Run the next sitecustomize on the path (a distribution's, a tracer's) as if ours were not there."""
    from importlib.machinery import PathFinder

    spec = PathFinder.find_spec("sitecustomize", [p for p in sys.path if os.path.realpath(p or ".") != folder])
    if spec is None or spec.loader is None:
        return
    from importlib.util import module_from_spec

    module = module_from_spec(spec)
    ours = sys.modules.get("sitecustomize")
    sys.modules["sitecustomize"] = module
    try:
        spec.loader.exec_module(module)
    except Exception:
        if ours is not None:
            sys.modules["sitecustomize"] = ours
        raise


def _leave_path(folder):
    """Take our folder off sys.path: its `kernels`, `patches` and `tests` must not answer for packages of those names.

    lora_fastpath stays importable once it has been imported; `python -m lora_fastpath` needs the folder to find it.
    """
    if "lora_fastpath" in sys.modules or "lora_fastpath" not in sys.orig_argv[1:4]:
        sys.path[:] = [p for p in sys.path if os.path.realpath(p or ".") != folder]


def _main():
    folder = os.path.dirname(os.path.realpath(__file__))
    try:
        if any(os.environ.get(name, "0") != "0" for name in ("LORA_FASTPATH", "SGLANG_EXPERIMENTAL_LORA_OPTI")):
            from lora_fastpath.activation import activate

            activate()
    except Exception as error:
        print(f"lora-fastpath: not active, stock sglang runs: {type(error).__name__}: {error}", file=sys.stderr)
    _leave_path(folder)
    _run_hidden(folder)


_main()
