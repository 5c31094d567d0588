"""Hooks: sites are bound as their modules are imported, or at once where that has happened."""

from __future__ import annotations

import importlib
import sys
import types

import pytest

wrapt = pytest.importorskip("wrapt")

from lora_fastpath import hooks  # noqa: E402
from lora_fastpath import registry as registry_module  # noqa: E402
from lora_fastpath.registry import LoraFastpathError, Registry, Site, State  # noqa: E402
from lora_fastpath.settings import Settings  # noqa: E402


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package with modules `first` and `second`; its name is new every time, because wrapt remembers names."""
    name = f"hooked_{tmp_path.name}"
    folder = tmp_path / name
    folder.mkdir()
    (folder / "__init__.py").touch()
    for module in ("first", "second"):
        (folder / f"{module}.py").write_text(
            "class Layer:\n    def forward(self, x): return x\n    def other(self): pass\n"
        )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(registry_module, "package_version", lambda package: "1.0")
    patch = types.ModuleType("patch_of_hooks")
    patch.WRAPPERS = {"Layer.forward": lambda wrapped, instance, args, kwargs: wrapped(*args, **kwargs) + 100}
    monkeypatch.setitem(sys.modules, patch.__name__, patch)
    return name


@pytest.fixture
def registry(package):
    def site(name: str, module: str, **options) -> Site:
        options = {
            "targets": {"Layer.forward": ("self", "x")},
            "releases": "==1.0",
            "patch": "patch_of_hooks",
        } | options
        return Site(name, f"{package}.{module}", **options)

    registry = Registry()
    registry.add([site("base", "first"), site("two", "second", requires=("base",))])
    return registry


def states(registry: Registry) -> dict[str, State]:
    return {name: entry.state for name, entry in registry.entries.items()}


def choose(*sites: str, strict: bool = False) -> Settings:
    return Settings(True, frozenset(sites), 256, strict, ",".join(sites))


def test_binds_when_imported_and_imports_nothing_itself(package, registry):
    hooks.install(registry, choose("base", "two"))
    assert package not in sys.modules and set(states(registry).values()) == {State.PENDING}
    second = importlib.import_module(f"{package}.second")
    assert states(registry) == {"base": State.PENDING, "two": State.BOUND}
    first = importlib.import_module(f"{package}.first")
    assert registry.is_bound("base")
    assert first.Layer().forward(1) == second.Layer().forward(1) == 101


def test_module_that_is_imported_already(package, registry):
    first = importlib.import_module(f"{package}.first")
    hooks.install(registry, choose("base", "two"))
    assert registry.is_bound("base") and first.Layer().forward(1) == 101


def test_not_selected_is_declined_without_a_word(package, registry, capsys):
    hooks.install(registry, choose("base"))
    second = importlib.import_module(f"{package}.second")
    assert registry.entries["two"].state is State.DECLINED
    assert registry.entries["two"].reason == "not selected by LORA_FASTPATH_SITES=base"
    assert second.Layer().forward(1) == 1 and capsys.readouterr().err == ""


def test_selected_without_what_it_requires(package, registry, capsys):
    hooks.install(registry, choose("two"))
    assert importlib.import_module(f"{package}.second").Layer().forward(1) == 1
    assert "needs site base" in registry.entries["two"].reason
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and "site two" in lines[0] and "LORA_FASTPATH_SITES=two" in lines[0]


def test_not_selected_is_no_error_in_strict_mode(package, registry):
    hooks.install(registry, choose("base", strict=True))
    assert states(registry) == {"base": State.PENDING, "two": State.DECLINED}


@pytest.mark.parametrize("broken", ["raises", "no WRAPPERS", "wrong release"])
@pytest.mark.parametrize("strict", [False, True])
def test_broken_site_does_not_break_the_import(package, registry, monkeypatch, capsys, broken, strict):
    if broken == "raises":
        monkeypatch.setattr(registry_module.Registry, "_wrap", lambda *args: 1 / 0)
    elif broken == "no WRAPPERS":
        monkeypatch.delattr(sys.modules["patch_of_hooks"], "WRAPPERS")
    else:
        monkeypatch.setattr(registry_module, "package_version", lambda package: "2.0")
    hooks.install(registry, choose("base", "two", strict=strict))
    if strict:
        with pytest.raises(LoraFastpathError, match="site base"):
            importlib.import_module(f"{package}.first")
        assert f"{package}.first" not in sys.modules
        return
    assert importlib.import_module(f"{package}.first").Layer().forward(1) == 1
    assert registry.entries["base"].state is (State.DECLINED if broken == "wrong release" else State.FAILED)
    assert registry.entries["two"].state is State.DECLINED
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_two_sites_of_one_module_do_not_share_a_fate(package, registry):
    registry.add([Site("odd", f"{package}.first", {"Layer.gone": ("self",)}, "==1.0", "patch_of_hooks")])
    hooks.install(registry, choose("base", "two", "odd"))
    importlib.import_module(f"{package}.first")
    assert states(registry) == {"base": State.BOUND, "two": State.PENDING, "odd": State.DECLINED}


class TestRequirements:
    def install(self, registry, capfd, selection: str, *sites: str) -> list[str]:
        hooks.install(registry, Settings(True, frozenset(sites), 256, False, selection))
        return capfd.readouterr().err.splitlines()

    def test_taken_out_by_name_is_silent(self, registry, capfd):
        """The line of a declined site offers this selection to silence it."""
        assert self.install(registry, capfd, "all,-base", "two") == []
        assert states(registry)["two"] is State.DECLINED

    def test_forgotten_is_one_line(self, registry, capfd):
        (line,) = self.install(registry, capfd, "two", "two")
        assert "site two needs site base, which LORA_FASTPATH_SITES=two leaves out" in line
