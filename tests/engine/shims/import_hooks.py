"""Run a function on a module right after it is imported, or change its source before. Our own few lines, because the
tests must also run with wrapt missing."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

Hook = Callable[[ModuleType], None]
Edit = Callable[[str], str]


class _Finder:
    """Stands in front of the path's own finder, and so behind the overlay's: its hooks run before the overlay looks."""

    def __init__(self) -> None:
        self.hooks: dict[str, list[Hook]] = {}
        self.edits: dict[str, list[Edit]] = {}

    def find_spec(self, name: str, path=None, target=None) -> ModuleSpec | None:
        if name not in self.hooks and name not in self.edits:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return None
        loader, execute = spec.loader, spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            if name in self.edits:
                source = functools.reduce(lambda text, edit: edit(text), self.edits[name], loader.get_source(name))
                exec(compile(source, spec.origin, "exec"), module.__dict__)
            else:
                execute(module)
            for hook in self.hooks.get(name, ()):
                hook(module)

        # On this one loader: the path's finder makes a new one for every spec.
        loader.exec_module = exec_module
        return spec


_finder = _Finder()


def _look() -> None:
    if _finder not in sys.meta_path:
        sys.meta_path.insert(sys.meta_path.index(PathFinder), _finder)


def edit_source(name: str, edit: Edit) -> None:
    """Compile module `name` from what `edit` makes of its source."""
    _finder.edits.setdefault(name, []).append(edit)
    _look()


def after_import(name: str) -> Callable[[Hook], Hook]:
    """Decorator: call the function with module `name` once that is imported."""

    def register(hook: Hook) -> Hook:
        if name in sys.modules:
            hook(sys.modules[name])
        else:
            _finder.hooks.setdefault(name, []).append(hook)
            _look()
        return hook

    return register
