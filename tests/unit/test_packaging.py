"""The wheel: what it ships, and that its .pth line and a checkout on PYTHONPATH switch the same overlay on, once."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("wrapt")
if tuple(int(n) for n in importlib.metadata.version("setuptools").split(".")[:2]) < (70, 1):
    pytest.importorskip("wheel.bdist_wheel", reason="building a wheel needs setuptools 70.1 or newer, or wheel")

_spec = importlib.util.spec_from_file_location("overlay_for_packaging", Path(__file__).with_name("overlay.py"))
overlay_module = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(overlay_module)
FORWARD, OURS, STOCK, ROOT = (getattr(overlay_module, name) for name in ("FORWARD", "OURS", "STOCK", "ROOT"))

ON = {"LORA_FASTPATH": "1"}
SOURCES = ("setup.cfg", "setup.py", "lora_fastpath.pth", "README.md", "lora_fastpath", "patches", "kernels")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from a copy, as pip leaves build folders beside the sources."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        elif (ROOT / name).exists():
            shutil.copy(ROOT / name, source)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", out, source]
    subprocess.run(command, check=True, timeout=120)
    (file,) = out.glob("*.whl")
    return file


@pytest.fixture(scope="module")
def site_packages(wheel, tmp_path_factory) -> Path:
    """Of a fresh virtual environment with the wheel and with wrapt and packaging as they are here."""
    root = tmp_path_factory.mktemp("venv")
    venv.create(root, symlinks=True, with_pip=True)
    folder = next(root.glob("lib/python*/site-packages"))
    pip = [root / "bin" / "python", "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    subprocess.run([*pip, "--no-deps", "--no-index", wheel], check=True, timeout=120)
    for package in ("wrapt", "packaging"):
        (folder / package).symlink_to(Path(importlib.util.find_spec(package).origin).parent)
    return folder


@pytest.fixture
def overlay(tmp_path):
    return overlay_module.Overlay(tmp_path)


def python(site_packages: Path, *arguments: str, path: str = "", **environ: str) -> str:
    executable = site_packages.parents[2] / "bin" / "python"
    kept = {k: v for k, v in os.environ.items() if not k.startswith(overlay_module.SWITCHES)}
    environ = kept | ({"PYTHONPATH": path} if path else {}) | environ
    done = subprocess.run(
        [executable, *arguments],
        env=environ,
        cwd=site_packages.parent,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0 and done.stderr == "", done.stderr
    return done.stdout


def test_ships_what_it_should_and_no_more(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    ours = {name for name in names if ".dist-info/" not in name}
    expected = {"lora_fastpath.pth"} | {f"lora_fastpath/{file.name}" for file in (ROOT / "lora_fastpath").glob("*.py")}
    for folder in ("patches", "kernels"):
        expected |= {f"lora_fastpath/{folder}/{file.name}" for file in (ROOT / folder).glob("*.py")}
    assert {name for name in ours if not name.startswith("lora_fastpath/kernels/csrc/")} == expected
    assert "lora_fastpath/patches/dense.py" in ours and "lora_fastpath/kernels/shrink.py" in ours


def test_metadata(wheel):
    archive = zipfile.ZipFile(wheel)
    dist_info = next(name.split("/")[0] for name in archive.namelist() if ".dist-info/" in name)
    metadata = archive.read(f"{dist_info}/METADATA").decode()
    assert "Name: lora-fastpath\n" in metadata and "Requires-Dist: wrapt" in metadata
    python = next(line for line in metadata.splitlines() if line.startswith("Requires-Python: "))
    assert set(python.removeprefix("Requires-Python: ").split(",")) == {">=3.10", "<3.14"}
    assert "lora-fastpath = lora_fastpath.cli:main" in archive.read(f"{dist_info}/entry_points.txt").decode()


def test_pth_is_one_line_that_installs_no_sitecustomize(wheel):
    text = zipfile.ZipFile(wheel).read("lora_fastpath.pth").decode()
    assert text.count("\n") == 1 and text.startswith("import ") and "sitecustomize" not in text


def test_names(site_packages):
    code = (
        "import importlib.util as u, json;"
        "names = ['lora_fastpath', 'lora_fastpath.patches', 'lora_fastpath.kernels', 'lora_fastpath.kernels.shrink',"
        " 'kernels', 'patches', 'tests', 'sitecustomize'];"
        "print(json.dumps([name for name in names if u.find_spec(name)]))"
    )
    ours = ["lora_fastpath", "lora_fastpath.patches", "lora_fastpath.kernels", "lora_fastpath.kernels.shrink"]
    assert json.loads(python(site_packages, "-c", code)) == ours
    assert json.loads(python(site_packages, "-c", code, **ON)) == ours


def test_path_of_the_package_is_its_own(site_packages):
    """A package called `patches` in site-packages must not be taken for ours."""
    code = "import lora_fastpath; print(list(lora_fastpath.__path__))"
    (site_packages / "patches").mkdir(exist_ok=True)
    assert python(site_packages, "-c", code).strip() == repr([str(site_packages / "lora_fastpath")])
    (site_packages / "patches").rmdir()


def test_console_script(site_packages):
    script = site_packages.parents[2] / "bin" / "lora-fastpath"
    done = subprocess.run([script, "--version"], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == importlib.import_module("lora_fastpath").__version__


class TestPth:
    LOADED = (
        "import sys; print([name for name in ('lora_fastpath', 'wrapt', 'sglang', 'torch') if name in sys.modules])"
    )

    @pytest.mark.parametrize("environ", [{}, {"LORA_FASTPATH": "0"}, {"LORA_FASTPATH": ""}])
    def test_off_imports_nothing(self, site_packages, environ):
        assert python(site_packages, "-c", self.LOADED, **environ) == "[]\n"

    @pytest.mark.parametrize("environ", [ON, {"SGLANG_EXPERIMENTAL_LORA_OPTI": "1"}])
    def test_on_waits_for_sglang(self, site_packages, environ):
        assert python(site_packages, "-c", self.LOADED, **environ) == "['lora_fastpath']\n"

    @pytest.mark.parametrize("flag", ["-I", "-E", "-S"])
    def test_flags_that_mean_stock(self, site_packages, flag):
        assert python(site_packages, flag, "-c", self.LOADED, **ON) == "[]\n"

    @pytest.fixture
    def installed(self, site_packages, overlay):
        """The installed overlay with the stand-in's site."""
        stand_in = {"sites.py": overlay.folder / "lora_fastpath" / "sites.py"}
        stand_in["patches/one.py"] = overlay.folder / "patches" / "one.py"
        stand_in["kernels/double.py"] = overlay.folder / "kernels" / "double.py"
        kept = (site_packages / "lora_fastpath" / "sites.py").read_text()
        for name, file in stand_in.items():
            shutil.copy(file, site_packages / "lora_fastpath" / name)
        yield site_packages
        (site_packages / "lora_fastpath" / "sites.py").write_text(kept)

    def test_on(self, installed, overlay):
        assert python(installed, "-c", FORWARD, path=str(overlay.packages), **ON) == OURS
        assert python(installed, "-c", FORWARD, path=str(overlay.packages)) == STOCK

    def test_together_with_a_checkout_it_is_one_overlay(self, installed, overlay):
        code = f"{FORWARD}; import lora_fastpath; print(lora_fastpath.__file__)"
        expected = f"{OURS}{overlay.folder / 'lora_fastpath' / '__init__.py'}\n"
        assert python(installed, "-c", code, path=overlay.path(), **ON) == expected
        assert python(installed, "-c", FORWARD, path=overlay.path()) == STOCK

    def test_broken_package_is_one_line(self, installed, overlay):
        (overlay.packages / "lora_fastpath.py").write_text("this is no Python")
        with pytest.raises(AssertionError) as error:
            python(installed, "-c", FORWARD, path=str(overlay.packages), **ON)
        lines = [line for line in str(error.value).splitlines() if line.startswith("lora-fastpath: ")]
        assert len(lines) == 1 and "SyntaxError" in lines[0] and "Traceback" not in str(error.value)
