"""Interpreter start with the overlay on PYTHONPATH: on, off and broken, in every kind of child, and what it leaves behind."""

from __future__ import annotations

import importlib.util
import json
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("wrapt")

# the tests' folders are no packages, so that they can't hide anybody's
_spec = importlib.util.spec_from_file_location("overlay_for_tests", Path(__file__).with_name("overlay.py"))
overlay_module = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(overlay_module)
Overlay, write = overlay_module.Overlay, overlay_module.write
FORWARD, OURS, STOCK, ROOT = (getattr(overlay_module, name) for name in ("FORWARD", "OURS", "STOCK", "ROOT"))

ON = {"LORA_FASTPATH": "1"}
LOOK = """
import json, sys
names = ("torch", "sglang", "wrapt", "lora_fastpath", "dataclasses", "inspect", "importlib.metadata", "packaging")
print(json.dumps({
    "modules": [name for name in names if name in sys.modules],
    "hooks": [getattr(finder, '__name__', type(finder).__name__) for finder in sys.meta_path],
    "path": sys.path,
}))
"""


@pytest.fixture
def overlay(tmp_path) -> Overlay:
    return Overlay(tmp_path)


def clean(done) -> str:
    assert done.returncode == 0 and done.stderr == "", done.stderr
    return done.stdout


def one_line(done) -> str:
    """Of a program that ran as stock."""
    assert done.returncode == 0 and done.stdout == STOCK, done
    lines = done.stderr.splitlines()
    assert len(lines) == 1 and lines[0].startswith("lora-fastpath: "), done.stderr
    return lines[0]


class TestSwitch:
    @pytest.mark.parametrize(
        "environ", [ON, {"SGLANG_EXPERIMENTAL_LORA_OPTI": "1"}, ON | {"LORA_FASTPATH_STRICT": "1"}]
    )
    def test_on(self, overlay, environ):
        assert clean(overlay.python("-c", FORWARD, **environ)) == OURS

    @pytest.mark.parametrize(
        "environ", [{}, {"LORA_FASTPATH": ""}, {"LORA_FASTPATH": "0"}, {"LORA_FASTPATH_SITES": "no"}]
    )
    def test_off(self, overlay, environ):
        assert clean(overlay.python("-c", FORWARD, **environ)) == STOCK

    def test_own_name_off_wins_over_the_alias(self, overlay):
        environ = {"LORA_FASTPATH": "0", "SGLANG_EXPERIMENTAL_LORA_OPTI": "1"}
        assert clean(overlay.python("-c", FORWARD, **environ)) == STOCK

    def test_alias_that_sglang_owns(self, overlay):
        write(
            overlay.packages / "sglang-0.5.13.dist-info" / "METADATA",
            "Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.13\n",
        )
        assert clean(overlay.python("-c", FORWARD, SGLANG_EXPERIMENTAL_LORA_OPTI="true")) == STOCK

    @pytest.mark.parametrize("flag", ["-I", "-S", "-E"])
    def test_flags_that_mean_stock(self, overlay, flag):
        code = (
            f"import sys; sys.path.insert(0, {str(overlay.packages)!r}); {FORWARD}; assert 'wrapt' not in sys.modules"
        )
        assert clean(overlay.python(flag, "-c", code, **ON)) == STOCK

    def test_real_overlay(self, overlay):
        path = str(ROOT)
        assert json.loads(clean(overlay.python("-c", LOOK, path=path)))["modules"] == []
        assert json.loads(clean(overlay.python("-c", LOOK, path=path, **ON)))["modules"] == ["lora_fastpath"]


class TestTrace:
    def test_off_leaves_none(self, overlay):
        absent = json.loads(clean(overlay.python("-c", LOOK, path=str(overlay.packages))))
        off = json.loads(clean(overlay.python("-c", LOOK)))
        assert off == absent and off["modules"] == []

    def test_on_imports_nothing_heavy_before_sglang(self, overlay):
        assert json.loads(clean(overlay.python("-c", LOOK, **ON)))["modules"] == ["lora_fastpath"]

    def test_on_leaves_no_finder_of_its_own_but_wrapts(self, overlay):
        code = "import sglang.layers, sys; print([type(f).__module__ for f in sys.meta_path if 'lora' in repr(f)])"
        assert clean(overlay.python("-c", code, **ON)) == "[]\n"

    def test_off_functions_are_sglangs_own(self, overlay):
        code = (
            "import sys, sglang.layers as m; assert 'lora_fastpath' not in sys.modules;"
            f"sys.path.append({str(overlay.folder)!r}); from lora_fastpath.changed import changed_functions as c; print(c(m))"
        )
        assert clean(overlay.python("-c", code)) == "[]\n"
        on = "import sglang.layers as m; from lora_fastpath.changed import changed_functions as c; print(c(m))"
        assert clean(overlay.python("-c", on, **ON)) == "['Layer.forward']\n"

    @pytest.mark.parametrize(("environ", "limit_ms"), [({}, 10), (ON, 60)])
    def test_start_is_cheap(self, overlay, environ, limit_ms):
        """1 ms and 30 ms are promised; the limits leave room for a machine that is slow or busy."""
        assert clean(overlay.python("-c", "pass", **environ)) == ""  # writes the bytecode
        spent = []
        for _ in range(5):
            lines = overlay.python("-X", "importtime", "-c", "pass", **environ).stderr.splitlines()
            spent.append(
                next(int(line.split("|")[1]) for line in lines if line.split("|")[2].strip() == "sitecustomize")
            )
        assert min(spent) / 1000 < limit_ms


class TestNames:
    """The overlay's folders must answer for nobody else's package, on or off."""

    CODE = "import importlib.util as u, kernels; print(kernels.__doc__, [n for n in ('kernels', 'patches', 'tests') if u.find_spec(n)])"

    @pytest.mark.parametrize("environ", [{}, ON])
    @pytest.mark.parametrize("real", [False, True])
    def test_kernels_is_hugging_faces(self, overlay, environ, real, tmp_path):
        elsewhere = tmp_path / "elsewhere"
        write(elsewhere / "kernels" / "__init__.py", "'of Hugging Face'")
        folder = ROOT if real else overlay.folder
        done = overlay.python("-c", self.CODE, path=f"{folder}:{elsewhere}", **environ)
        assert clean(done) == "of Hugging Face ['kernels']\n"

    @pytest.mark.parametrize("environ", [{}, ON])
    def test_own_packages_of_these_names_stay(self, overlay, environ, tmp_path):
        write(tmp_path / "elsewhere" / "patches" / "__init__.py", "")
        code = "import patches; print(patches.__file__)"
        done = overlay.python("-c", code, path=f"{overlay.folder}:{tmp_path / 'elsewhere'}", **environ)
        assert clean(done) == f"{tmp_path / 'elsewhere' / 'patches' / '__init__.py'}\n"

    def test_on_our_modules_stay_importable(self, overlay):
        code = "import lora_fastpath.kernels.double as d; print(d.__name__); import lora_fastpath.cli"
        assert clean(overlay.python("-c", code, **ON)) == "lora_fastpath.kernels.double\n"

    @pytest.mark.parametrize("entry", ["{}/", "{}/../overlay", "link", "{0}:{0}"])
    def test_folder_leaves_the_path_however_it_is_written(self, overlay, entry, tmp_path):
        (tmp_path / "link").symlink_to(overlay.folder)
        entry = str(tmp_path / "link") if entry == "link" else entry.format(overlay.folder)
        code = "import sys, importlib.util as u; print(u.find_spec('patches'))"
        for environ in ({}, ON):
            assert clean(overlay.python("-c", code, path=f"{entry}:{overlay.packages}", **environ)) == "None\n"
        assert clean(overlay.python("-c", FORWARD, path=f"{entry}:{overlay.packages}", **ON)) == OURS

    @pytest.mark.parametrize("environ", [{}, ON])
    @pytest.mark.parametrize("arguments", [["-m", "lora_fastpath"], ["-mlora_fastpath"], ["-Bm", "lora_fastpath"]])
    def test_command_line_is_found(self, overlay, environ, arguments):
        write(overlay.folder / "lora_fastpath" / "__main__.py", "import sys; print(sys.argv[1:])")
        assert clean(overlay.python(*arguments, "doctor", "-m", **environ)) == "['doctor', '-m']\n"

    def test_off_an_argument_of_our_name_is_not_the_command_line(self, overlay):
        code = "import sys; assert all('overlay' not in p for p in sys.path)"
        assert clean(overlay.python("-c", code, "-m", "lora_fastpath")) == ""


class TestHidden:
    """The sitecustomize that ours hides runs as if ours were not there."""

    @pytest.fixture
    def hide(self, overlay):
        return lambda text: write(overlay.packages / "sitecustomize.py", text)

    @pytest.mark.parametrize(("environ", "result"), [({}, STOCK), (ON, OURS)])
    def test_runs_under_its_own_name(self, overlay, hide, environ, result):
        hide("import sys; print(__name__, __file__, sys.modules[__name__].__dict__ is globals())")
        done = overlay.python("-c", f"import sitecustomize; print(sitecustomize.__file__); {FORWARD}", **environ)
        file = overlay.packages / "sitecustomize.py"
        assert clean(done) == f"sitecustomize {file} True\n{file}\n{result}"

    @pytest.mark.parametrize("environ", [{}, ON])
    def test_what_it_does_to_the_path_stays(self, overlay, hide, environ):
        hide("import sys; sys.path.append('/added'); sys.path.remove(__file__.rpartition('/')[0])")
        code = f"import sys; print('/added' in sys.path, {str(overlay.packages)!r} in sys.path)"
        assert clean(overlay.python("-c", code, cwd=overlay.folder.parent, **environ)) == "True False\n"

    def test_package(self, overlay):
        write(overlay.packages / "sitecustomize" / "__init__.py", "from . import part")
        write(overlay.packages / "sitecustomize" / "part.py", "print('part')")
        assert clean(overlay.python("-c", "pass")) == "part\n"

    @pytest.mark.parametrize(
        "text", ["1 / 0", "import no_such_module", "this is no Python", "raise ImportError('x', name='sitecustomize')"]
    )
    @pytest.mark.parametrize(("environ", "result"), [({}, STOCK), (ON, OURS)])
    def test_its_failure_is_reported_as_without_us(self, overlay, hide, text, environ, result):
        hide(text)
        stock = overlay.python("-c", FORWARD, path=str(overlay.packages))
        done = overlay.python("-c", FORWARD, **environ)
        assert (done.returncode, done.stderr) == (stock.returncode, stock.stderr)
        assert done.stdout == result

    def test_its_exit_ends_the_interpreter(self, overlay, hide):
        hide("raise SystemExit(3)")
        stock = overlay.python("-c", FORWARD, path=str(overlay.packages))
        done = overlay.python("-c", FORWARD, **ON)
        assert done.returncode == stock.returncode != 0 and done.stdout == stock.stdout == ""

    def test_somebody_before_us_who_runs_what_they_hide(self, overlay, tmp_path):
        """Ours is run by them, and must not find them again."""
        write(
            tmp_path / "first" / "sitecustomize.py",
            "import sys, os; from importlib.machinery import PathFinder; from importlib.util import module_from_spec\n"
            "here = os.path.dirname(__file__)\n"
            "spec = PathFinder.find_spec('sitecustomize', [p for p in sys.path if p != here])\n"
            "spec.loader.exec_module(module_from_spec(spec)); print('first')",
        )
        done = overlay.python("-c", FORWARD, path=f"{tmp_path / 'first'}:{overlay.path()}", **ON)
        assert clean(done) == f"first\n{OURS}"


CHILDREN = {
    "subprocess": "import subprocess, sys; subprocess.run([sys.executable, '-c', FORWARD], check=True)",
    "fork": "run('fork')",
    "fork after import": "import sglang.layers; run('fork')",
    "spawn": "run('spawn')",
    "forkserver": "run('forkserver')",
    "os.fork": "import os; pid = os.fork(); exec(FORWARD) if pid == 0 else os.waitpid(pid, 0)",
}


@pytest.mark.parametrize("child", CHILDREN)
def test_children(overlay, tmp_path, child):
    script = tmp_path / "script.py"
    write(
        script,
        "import multiprocessing, sys\n"
        f"FORWARD = {FORWARD!r}\n"
        "def target(): exec(FORWARD); sys.stdout.flush()\n"
        "def run(kind):\n"
        "    p = multiprocessing.get_context(kind).Process(target=target); p.start(); p.join(); assert p.exitcode == 0\n"
        f"if __name__ == '__main__':\n    {CHILDREN[child]}\n",
    )
    assert clean(overlay.python(str(script), **ON)) == OURS
    assert clean(overlay.python(str(script))) == STOCK


class TestBroken:
    """One line that says what is wrong and what to do, and the program runs as stock."""

    def hidden_wrapt(self, overlay, tmp_path) -> str:
        """A path on which `import wrapt` answers as if it were not installed."""
        write(
            tmp_path / "first" / "sitecustomize.py",
            "import sys\n"
            "class No:\n"
            "    def find_spec(self, name, path=None, target=None):\n"
            "        if name == 'wrapt' and not any(p.endswith('.whl') for p in sys.path):\n"
            "            raise ModuleNotFoundError(\"No module named 'wrapt'\", name='wrapt')\n"
            "sys.meta_path.insert(0, No())\n",
        )
        return overlay.path(tmp_path / "first")

    def test_wrapt_missing(self, overlay, tmp_path):
        line = one_line(overlay.python("-c", FORWARD, path=self.hidden_wrapt(overlay, tmp_path), **ON))
        assert "wrapt" in line and "pip install wrapt" in line and f"wrapt-*.whl) into {overlay.folder}" in line

    def test_wrapt_from_a_wheel_beside_the_overlay(self, overlay, tmp_path):
        import wrapt

        folder = Path(wrapt.__file__).parent
        with zipfile.ZipFile(overlay.folder / "wrapt-9.9-py3-none-any.whl", "w") as wheel:
            for file in folder.rglob("*.py"):
                wheel.write(file, f"wrapt/{file.relative_to(folder)}")
        code = f"{FORWARD}; import wrapt, sys; print('.whl/' in wrapt.__file__, any('.whl' in p for p in sys.path))"
        done = overlay.python("-c", code, path=self.hidden_wrapt(overlay, tmp_path), **ON)
        assert clean(done) == f"{OURS}True False\n"

    @pytest.mark.parametrize(
        ("name", "value", "allowed"),
        [
            ("LORA_FASTPATH", "yes", "allowed are 1 (on) and 0 (off)"),
            ("LORA_FASTPATH_SITES", "all,-moe", "all, one"),
            ("LORA_FASTPATH_MAX_TOKENS", "0", "1 to 65536"),
            ("LORA_FASTPATH_TOKENS", "1", "LORA_FASTPATH_MAX_TOKENS"),
        ],
    )
    def test_setting(self, overlay, name, value, allowed):
        line = one_line(overlay.python("-c", FORWARD, **(ON | {name: value})))
        assert f"{name}={value}" in line and allowed in line

    @pytest.mark.parametrize("file", ["__init__", "activation", "report", "settings", "registry", "sites", "hooks"])
    @pytest.mark.parametrize("text", ["this is no Python", "raise ValueError('two\\nlines')"])
    def test_file_of_ours(self, overlay, file, text):
        write(overlay.folder / "lora_fastpath" / f"{file}.py", text)
        line = one_line(overlay.python("-c", FORWARD, **ON))
        assert ("SyntaxError" in line or "two lines" in line) and "stock" in line

    def test_missing_package(self, overlay):
        (overlay.folder / "lora_fastpath").rename(overlay.folder / "gone")
        assert "No module named 'lora_fastpath'" in one_line(overlay.python("-c", FORWARD, **ON))
        assert clean(overlay.python("-c", FORWARD)) == STOCK

    def test_patch(self, overlay):
        write(overlay.folder / "patches" / "one.py", "import no_such_module")
        assert "site one failed" in one_line(overlay.python("-c", FORWARD, **ON))

    @pytest.mark.parametrize("setting", [{"LORA_FASTPATH_SITES": "moe"}, {}])
    def test_strict_makes_it_an_error_of_sglang_alone(self, overlay, setting):
        write(overlay.packages / "sglang" / "version.py", "__version__ = '0.4'")
        environ = ON | setting | {"LORA_FASTPATH_STRICT": "1"}
        done = overlay.python("-c", FORWARD, **environ)
        assert done.returncode == 1 and "LoraFastpathError" in done.stderr and done.stdout == ""
        assert overlay.python("-c", "pass", **environ).returncode == 0

    def test_strict_again_on_a_second_import(self, overlay):
        code = "for _ in range(2):\n    try: import sglang\n    except RuntimeError as e: print(type(e).__name__)"
        done = overlay.python("-c", code, LORA_FASTPATH_SITES="moe", LORA_FASTPATH_STRICT="1", **ON)
        assert done.stdout == "LoraFastpathError\n" * 2


def test_sglang_imported_by_the_hidden_sitecustomize(overlay):
    write(overlay.packages / "sitecustomize.py", "import sglang.layers")
    assert clean(overlay.python("-c", FORWARD, **ON)) == OURS


def test_activating_twice_is_once(overlay):
    code = f"from lora_fastpath.activation import activate; activate(); {FORWARD}; activate(); {FORWARD}"
    assert clean(overlay.python("-c", code, **ON)) == OURS * 2
