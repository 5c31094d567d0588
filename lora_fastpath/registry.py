"""The registry: each site's originals, state and reason. It wraps a site whole or not at all and can put all back."""

from __future__ import annotations

import dataclasses
import enum
import importlib
import sys
import threading
from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import Any

from lora_fastpath import report


class LoraFastpathError(RuntimeError):
    """A selected site is out of service: in strict mode, or where stock has nothing to take its place."""


class Unfit(Exception):
    """A target that is not what the site was written for; the text says what was expected and what was found."""


@dataclasses.dataclass(frozen=True)
class Site:
    """One thing to wrap, as data."""

    name: str
    module: str
    """Import path of the module that holds the targets."""
    targets: Mapping[str, tuple[str, ...]]
    """Attribute path in the module, as "Class.method", -> the parameter names it must have."""
    releases: str
    """PEP 440 specifier of the target package's releases that the site knows."""
    patch: str
    """Module whose WRAPPERS maps each target to wrapper(wrapped, instance, args, kwargs)."""
    requires: tuple[str, ...] = ()
    """Sites that this one can't do without."""
    differs: str = ""
    """Where and why results differ from stock, or ""."""


class State(enum.Enum):
    PENDING = "pending"
    """The target module is not imported yet."""
    BOUND = "bound"
    DECLINED = "declined"
    """It does not fit, or is not wanted."""
    FAILED = "failed"
    """An exception or a wrong result of ours."""


@dataclasses.dataclass
class Original:
    owner: Any
    attribute: str
    function: Any
    owned: bool
    """False when the class only inherits the attribute: putting back then means deleting."""
    wrapper: Any = None

    def put_back(self) -> bool:
        """False when somebody has replaced our wrapper since: theirs stays, and ours below it only passes calls on."""
        if vars(self.owner).get(self.attribute) is not self.wrapper:
            return False
        if self.owned:
            setattr(self.owner, self.attribute, self.function)
        else:
            delattr(self.owner, self.attribute)
        return True


@dataclasses.dataclass
class Entry:
    site: Site
    state: State = State.PENDING
    reason: str = ""
    originals: dict[str, Original] = dataclasses.field(default_factory=dict)

    def in_service(self) -> bool:
        return self.state is State.BOUND

    def close(self, state: State, reason: str) -> None:
        """Put the originals back and note why."""
        self.state = state
        covered = [path for path, original in self.originals.items() if not original.put_back()]
        if covered:
            reason += f" (somebody wrapped {', '.join(covered)} after us; that stays, and calls stock through ours)"
        self.originals.clear()
        self.reason = reason


class Registry:
    def __init__(self) -> None:
        self.entries: dict[str, Entry] = {}
        self.strict = False
        self._lock = threading.RLock()

    def add(self, sites: Iterable[Site]) -> None:
        self.entries.update({site.name: Entry(site) for site in sites})

    def is_bound(self, name: str) -> bool:
        return name in self.entries and self.entries[name].in_service()

    def bind(self, site: Site, module: ModuleType) -> None:
        """Wrap all of the site's targets in `module`, or decline it. Raises in strict mode only."""
        entry = self.entries[site.name]
        if entry.state is not State.PENDING:
            return
        try:
            # What a site requires comes first: a release that nobody knows then makes one line, not one a site.
            for needed in (*(self.entries[name].site for name in site.requires), site):
                if reason := unknown_release(needed):
                    return self.decline(needed.name, reason)
            self._find(site, module)
            # Outside the lock: another thread may hold that module's import lock and wait for ours.
            wrappers = importlib.import_module(site.patch).WRAPPERS
            if set(wrappers) != set(site.targets):
                raise Unfit(f"{site.patch}.WRAPPERS has {sorted(wrappers)}, expected {sorted(site.targets)}")
            self._wrap(entry, module, wrappers)
        except LoraFastpathError:
            raise
        except Unfit as error:
            self.decline(site.name, str(error))
        except Exception as error:  # noqa: BLE001 - an import of sglang must not die of us
            self.decline(site.name, f"{type(error).__name__}: {error}", failed=True)

    def _wrap(self, entry: Entry, module: ModuleType, wrappers: Mapping[str, Any]) -> None:
        import wrapt

        with self._lock:
            if entry.state is not State.PENDING:
                return
            for path, original in self._find(entry.site, module).items():
                # A bound method that somebody keeps, or a wrapper put around ours, outlives the site: hence `enabled`.
                original.wrapper = wrapt.FunctionWrapper(original.function, wrappers[path], enabled=entry.in_service)
                setattr(original.owner, original.attribute, original.wrapper)
                entry.originals[path] = original
            entry.state = State.BOUND

    def _find(self, site: Site, module: ModuleType) -> dict[str, Original]:
        """The site's originals in `module`; Unfit for the first that is not as expected."""
        return {path: self._original(module, path, parameters) for path, parameters in site.targets.items()}

    def _original(self, module: ModuleType, path: str, parameters: tuple[str, ...]) -> Original:
        import inspect

        owner: Any = module
        *parents, attribute = path.split(".")
        for name in parents:
            owner = getattr(owner, name, None)
        holders = [cls for cls in getattr(owner, "__mro__", (owner,)) if attribute in getattr(cls, "__dict__", ())]
        if not holders:
            raise Unfit(f"{module.__name__} has no {path}")
        function = self._unwrapped(vars(holders[0])[attribute])
        if not callable(function) or isinstance(function, (staticmethod, classmethod, type)):
            raise Unfit(f"{module.__name__}.{path} is a {type(function).__name__}, expected a function")
        found = tuple(inspect.signature(function).parameters)
        if found != parameters:
            raise Unfit(f"{module.__name__}.{path} takes ({', '.join(found)}), expected ({', '.join(parameters)})")
        return Original(owner, attribute, function, owned=holders[0] is owner)

    def _unwrapped(self, function: Any) -> Any:
        """A class inherits the plain function, also when the parent's is wrapped by another site of ours."""
        for entry in self.entries.values():
            for original in entry.originals.values():
                if original.wrapper is function:
                    return original.function
        return function

    def decline(self, name: str, reason: str, failed: bool = False) -> None:
        """Take a site and those that require it out of service for good.

        One line for all of them; in strict mode LoraFastpathError with the same text.
        """
        with self._lock:
            entry = self.entries[name]
            if entry.state in (State.DECLINED, State.FAILED):
                return
            entry.close(State.FAILED if failed else State.DECLINED, reason)
            also = [other for other in self._dependents(name) if other.state in (State.PENDING, State.BOUND)]
            for other in also:
                other.close(State.DECLINED, f"needs site {name}: {reason}")
        names = ", ".join(other.site.name for other in also)
        text = f"site {name} {entry.state.value}{f' (with it {names})' if also else ''}: {entry.reason}"
        if self.strict:
            raise LoraFastpathError(f"{text}; LORA_FASTPATH_STRICT=1 makes this an error")
        report.line(f"{text}; stock sglang serves it (LORA_FASTPATH_SITES=all,-{name} silences this)")

    def degrade(self, name: str, reason: str) -> None:
        """The site's wrappers stay and pass to stock's kernels: one line, the first time. LoraFastpathError in strict mode."""
        with self._lock:
            entry = self.entries[name]
            if entry.reason:
                return
            entry.reason = reason
        text = f"site {name} uses stock's kernels from now on: {reason}"
        if self.strict:
            raise LoraFastpathError(f"{text}; LORA_FASTPATH_STRICT=1 makes this an error")
        report.line(text)

    def _dependents(self, name: str) -> list[Entry]:
        direct = [entry for entry in self.entries.values() if name in entry.site.requires]
        return direct + [entry for near in direct for entry in self._dependents(near.site.name)]

    def deselect(self, name: str, selection: str) -> None:
        """The user does not want this site: no line. Sites that require it can't be served: one line."""
        self.entries[name].close(State.DECLINED, f"not selected by LORA_FASTPATH_SITES={selection}")

    def restore(self) -> None:
        """Put every original back, for good. CUDA graphs captured meanwhile keep our kernels: call it before or after serving."""
        with self._lock:
            for entry in self.entries.values():
                if entry.state in (State.PENDING, State.BOUND):
                    entry.close(State.DECLINED, "restored to stock")


def unknown_release(site: Site) -> str:
    """Why the site does not know the installed release of its target package, or ""."""
    from packaging.specifiers import SpecifierSet
    from packaging.version import InvalidVersion, Version

    package = site.module.partition(".")[0]
    release = package_version(package)
    if not release:
        return f"{package} is not installed, the site knows {site.releases}"
    try:
        version = Version(release)
    except InvalidVersion:
        return f"{package} has the version {release!r}, which is no PEP 440 version; expected {site.releases}"
    if SpecifierSet(site.releases).contains(version, prereleases=True):
        return ""
    return f"{package} is {release}, the site knows {site.releases}"


DISTRIBUTIONS = {"flashinfer": "flashinfer-python"}
"""Packages that are installed under another name. They take seconds to import, and are not imported for their version."""


def package_version(package: str) -> str:
    """The version that the package itself names (metadata may be older than the source), else its metadata's, else ""."""
    import importlib.metadata

    if package in sys.modules or package not in DISTRIBUTIONS:
        try:
            return str(importlib.import_module(f"{package}.version").__version__)
        except (ImportError, AttributeError):
            pass
    try:
        return importlib.metadata.version(DISTRIBUTIONS.get(package, package))
    except importlib.metadata.PackageNotFoundError:
        return ""


registry = Registry()
"""The process's one registry."""
