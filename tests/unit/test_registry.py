"""The registry against synthetic modules: binds whole or not at all, and puts back to the byte."""

from __future__ import annotations

import sys
import types

import pytest

wrapt = pytest.importorskip("wrapt")

from lora_fastpath import registry as registry_module  # noqa: E402
from lora_fastpath.changed import changed_functions  # noqa: E402
from lora_fastpath.registry import LoraFastpathError, Registry, Site, State  # noqa: E402

SOURCE = """
class Parent:
    def forward(self, x):
        return f"stock {x}"

    def apply(self, base, x):
        return base + x

class Child(Parent):
    def apply(self, base, x):
        return base - x

class Odd:
    @staticmethod
    def static(x): pass
    @property
    def prop(self): pass

def free(x):
    return x
"""


@pytest.fixture
def target(tmp_path, monkeypatch):
    """A module `targetpkg.layers`, release 1.2.3.post1."""
    file = tmp_path / "layers.py"
    file.write_text(SOURCE)
    module = types.ModuleType("targetpkg.layers")
    module.__file__ = str(file)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(SOURCE, str(file), "exec", dont_inherit=True), module.__dict__)
    monkeypatch.setattr(registry_module, "package_version", lambda package: "1.2.3.post1")
    return module


@pytest.fixture
def patch(monkeypatch):
    """patch(name, wrappers): a patch module; patch() of nothing gives a wrapper that marks the result."""

    def make(name: str, wrappers: dict) -> str:
        module = types.ModuleType(name)
        module.WRAPPERS = wrappers
        monkeypatch.setitem(sys.modules, name, module)
        return name

    return make


def mark(wrapped, instance, args, kwargs):
    return f"ours({wrapped(*args, **kwargs)})"


FORWARD = ("self", "x")


def site(name: str, patch_name: str, targets: dict | None = None, **options) -> Site:
    options = {"releases": ">=1.2.3,<1.2.4"} | options
    return Site(name, "targetpkg.layers", targets or {"Parent.forward": FORWARD}, patch=patch_name, **options)


def registered(*sites: Site) -> Registry:
    registry = Registry()
    registry.add(sites)
    return registry


def snapshot(module) -> dict:
    return {name: dict(vars(cls)) for name, cls in vars(module).items() if isinstance(cls, type)} | {
        "free": module.free
    }


def same(module, before: dict) -> bool:
    after = snapshot(module)
    return all(
        list(after[name]) == list(before[name]) and all(after[name][k] is before[name][k] for k in before[name])
        for name in before
        if name != "free"
    ) and (after["free"] is before["free"])


class TestBind:
    def test_wraps_and_restores_to_the_byte(self, target, patch):
        before = snapshot(target)
        targets = {"Parent.forward": FORWARD, "Child.forward": FORWARD, "free": ("x",)}
        one = site("one", patch("p1", dict.fromkeys(targets, mark)), targets)
        registry = registered(one)
        registry.bind(one, target)
        assert registry.is_bound("one") and registry.entries["one"].reason == ""
        assert target.Parent().forward(1) == "ours(stock 1)" and target.free(2) == "ours(2)"
        # the inherited function is wrapped plain, not inside the parent's wrapper
        assert target.Child().forward(1) == "ours(stock 1)"
        assert changed_functions(target) == ["Child.forward", "Parent.forward", "free"]
        registry.restore()
        registry.restore()
        assert same(target, before) and "forward" not in vars(target.Child)
        assert changed_functions(target) == [] and not registry.is_bound("one")

    @pytest.mark.parametrize("first", ["parent", "child"])
    def test_parent_and_child_of_two_sites(self, target, patch, first):
        before = snapshot(target)
        parent = site("parent", patch("p1", {"Parent.forward": mark}))
        child = site("child", patch("p2", {"Child.forward": mark}), {"Child.forward": FORWARD})
        registry = registered(parent, child)
        for one in (parent, child) if first == "parent" else (child, parent):
            registry.bind(one, target)
        assert target.Child().forward(1) == target.Parent().forward(1) == "ours(stock 1)"
        registry.decline("parent", "test")
        assert target.Child().forward(1) == "ours(stock 1)" and target.Parent().forward(1) == "stock 1"
        registry.decline("child", "test")
        assert same(target, before)

    @pytest.mark.parametrize(
        ("path", "parameters", "reason"),
        [
            ("Gone.forward", FORWARD, "targetpkg.layers has no Gone.forward"),
            ("Parent.gone", FORWARD, "targetpkg.layers has no Parent.gone"),
            ("Parent.apply", ("self", "x"), "takes (self, base, x), expected (self, x)"),
            ("Odd.static", ("x",), "staticmethod"),
            ("Odd.prop", ("self",), "property"),
        ],
    )
    def test_target_that_does_not_fit_declines_the_whole_site(self, target, patch, capsys, path, parameters, reason):
        before = snapshot(target)
        targets = {"Parent.forward": FORWARD, path: parameters}
        one = site("one", patch("p1", dict.fromkeys(targets, mark)), targets)
        registry = registered(one)
        registry.bind(one, target)
        entry = registry.entries["one"]
        assert entry.state is State.DECLINED and reason in entry.reason and same(target, before)
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1 and reason in lines[0] and lines[0].startswith("lora-fastpath: site one declined: ")
        registry.bind(one, target)
        assert same(target, before) and capsys.readouterr().err == ""

    def test_failure_half_way_rolls_back(self, target, patch, monkeypatch):
        class Stubborn(type):
            def __setattr__(cls, name, value):
                raise RuntimeError("no")

        target.Stubborn = Stubborn("Stubborn", (), {"forward": target.Parent.forward})
        before = snapshot(target)
        targets = {"Parent.forward": FORWARD, "Child.forward": FORWARD, "Stubborn.forward": FORWARD}
        one = site("one", patch("p1", dict.fromkeys(targets, mark)), targets)
        registry = registered(one)
        registry.bind(one, target)
        assert registry.entries["one"].state is State.FAILED and "RuntimeError: no" in registry.entries["one"].reason
        assert same(target, before)

    def test_patch_that_cannot_be_imported(self, target):
        one = site("one", "no.such.patch")
        registry = registered(one)
        registry.bind(one, target)
        assert registry.entries["one"].state is State.FAILED and "no.such.patch" not in sys.modules

    def test_patch_with_other_targets(self, target, patch):
        one = site("one", patch("p1", {"Parent.apply": mark}))
        registry = registered(one)
        registry.bind(one, target)
        assert registry.entries["one"].state is State.DECLINED and "Parent.apply" in registry.entries["one"].reason

    def test_bound_method_kept_from_before_serves_stock_after(self, target, patch):
        one = site("one", patch("p1", {"Parent.forward": mark}))
        registry = registered(one)
        registry.bind(one, target)
        kept = target.Parent().forward
        assert kept(1) == "ours(stock 1)"
        registry.restore()
        assert kept(1) == "stock 1"


class TestReleases:
    @pytest.mark.parametrize(
        ("release", "fits"),
        [
            ("1.2.3", True),
            ("1.2.3.post1", True),
            ("1.2.3.post2.dev3", True),
            ("1.2.3+cu128", True),
            ("1.2.3rc1", False),
            ("1.2.4", False),
            ("1.2.4rc1", False),
            ("1.2.4.dev1+gabc", False),
            ("1.2.2", False),
            ("", False),
            ("main-2026", False),
        ],
    )
    def test_range(self, target, monkeypatch, release, fits, patch):
        monkeypatch.setattr(registry_module, "package_version", lambda package: release)
        one = site("one", patch("p1", {"Parent.forward": mark}))
        registry = registered(one)
        registry.bind(one, target)
        assert registry.is_bound("one") is fits
        assert fits or (release or "is not installed") in registry.entries["one"].reason

    def test_patch_is_not_imported_for_an_unknown_release(self, target, monkeypatch, tmp_path):
        (tmp_path / "patch_of_old.py").write_text("WRAPPERS = {}")
        monkeypatch.syspath_prepend(tmp_path)
        one = site("one", "patch_of_old", releases="<1")
        registered(one).bind(one, target)
        assert "patch_of_old" not in sys.modules

    def test_unknown_release_of_what_all_require_is_one_line(self, target, patch, capsys):
        base = site("base", "no.patch", releases="<1")
        users = [site(name, patch(name, {"Parent.forward": mark}), requires=("base",)) for name in ("one", "two")]
        registry = registered(base, *users)
        for one in (*users, base):
            registry.bind(one, target)
        assert {entry.state for entry in registry.entries.values()} == {State.DECLINED}
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1 and "site base declined (with it one, two)" in lines[0]

    def test_package_version(self, monkeypatch):
        import pytest as package

        assert registry_module.package_version("no_such_package") == ""
        assert registry_module.package_version("packaging")
        named = types.ModuleType("pytest.version")
        named.__version__ = "77"
        assert registry_module.package_version("pytest") == package.__version__
        monkeypatch.setitem(sys.modules, "pytest.version", named)
        assert registry_module.package_version("pytest") == "77"


class TestDecline:
    @pytest.fixture
    def chain(self, target, patch):
        """base <- one <- two"""
        sites = (
            site("base", patch("p0", {"free": mark}), {"free": ("x",)}),
            site("one", patch("p1", {"Parent.forward": mark}), requires=("base",)),
            site("two", patch("p2", {"Child.apply": mark}), {"Child.apply": ("self", "base", "x")}, requires=("one",)),
        )
        registry = registered(*sites)
        for each in sites:
            registry.bind(each, target)
        assert all(registry.is_bound(name) for name in ("base", "one", "two"))
        return registry

    def test_dependents_go_with_it_and_the_rest_stays(self, chain, target, capsys):
        chain.decline("one", "broken\non two lines", failed=True)
        states = {name: entry.state for name, entry in chain.entries.items()}
        assert states == {"base": State.BOUND, "one": State.FAILED, "two": State.DECLINED}
        assert "broken" in chain.entries["two"].reason
        assert target.Parent().forward(1) == "stock 1" and target.free(1) == "ours(1)"
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1
        assert "site one failed (with it two): broken on two lines" in lines[0] and "all,-one" in lines[0]
        chain.decline("one", "again")
        chain.decline("two", "again")
        assert capsys.readouterr().err == "" and "again" not in chain.entries["two"].reason

    def test_all_the_way(self, chain, target, capsys):
        chain.decline("base", "no CUDA")
        assert changed_functions(target) == []
        assert "(with it one, two)" in capsys.readouterr().err

    def test_declined_before_its_module_is_imported(self, target, patch):
        one = site("one", patch("p1", {"Parent.forward": mark}))
        registry = registered(one)
        registry.decline("one", "early")
        registry.bind(one, target)
        assert changed_functions(target) == []

    def test_strict_raises_after_restoring(self, chain, target, capsys):
        chain.strict = True
        with pytest.raises(LoraFastpathError, match="site base declined .with it one, two.: no CUDA"):
            chain.decline("base", "no CUDA")
        assert changed_functions(target) == [] and capsys.readouterr().err == ""

    def test_strict_raises_out_of_bind(self, target, patch):
        one = site("one", patch("p1", {"Parent.forward": mark}), releases="<1")
        registry = registered(one)
        registry.strict = True
        with pytest.raises(LoraFastpathError):
            registry.bind(one, target)

    def test_somebody_wrapped_after_us(self, chain, target):
        ours = vars(target.Parent)["forward"]
        theirs = wrapt.FunctionWrapper(ours, lambda wrapped, instance, args, kwargs: f"theirs({wrapped(*args)})")
        target.Parent.forward = theirs
        assert target.Parent().forward(1) == "theirs(ours(stock 1))"
        chain.restore()
        assert vars(target.Parent)["forward"] is theirs and target.Parent().forward(1) == "theirs(stock 1)"
        reason = chain.entries["one"].reason
        assert "Parent.forward" in reason and "wrapped" in reason

    def test_somebody_wrapped_before_us(self, target, patch):
        theirs = wrapt.FunctionWrapper(
            vars(target.Parent)["forward"], lambda wrapped, instance, args, kwargs: f"theirs({wrapped(*args)})"
        )
        target.Parent.forward = theirs
        one = site("one", patch("p1", {"Parent.forward": mark}))
        registry = registered(one)
        registry.bind(one, target)
        assert target.Parent().forward(1) == "ours(theirs(stock 1))"
        registry.restore()
        assert vars(target.Parent)["forward"] is theirs


def test_changed_functions_sees_an_edited_body_and_ignores_generated_code(target):
    import dataclasses

    target.Data = dataclasses.make_dataclass("Data", ["x"])
    target.Data.__module__ = target.__name__
    assert changed_functions(target) == []

    def forward(self, x):
        return x

    target.Parent.forward = types.FunctionType(forward.__code__.replace(co_filename=target.__file__), {}, "forward")
    assert changed_functions(target) == ["Parent.forward"]
