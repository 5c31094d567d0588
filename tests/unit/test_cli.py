"""The command line, started as a user does, against a stand-in for sglang with the classes that the sites wrap."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from lora_fastpath.sites import SITES

ROOT = Path(__file__).resolve().parents[2]
NAMES = [site.name for site in SITES]
SWITCHES = ("LORA_FASTPATH", "SGLANG_EXPERIMENTAL_LORA_OPTI", "SGLANG_TWO_STREAM_MAX_TOKENS", "TRITON_INTERPRET")


def write_package(root: Path, module: str, source: str) -> None:
    folder = root.joinpath(*module.split(".")[:-1])
    folder.mkdir(parents=True, exist_ok=True)
    for parent in [folder, *folder.parents]:
        if parent == root:
            break
        (parent / "__init__.py").touch()
    (folder / f"{module.rpartition('.')[2]}.py").write_text(source)


@pytest.fixture
def sglang(tmp_path) -> Path:
    """A folder with packages `sglang` and `flashinfer` that have all targets and print when imported."""
    methods: dict[str, dict[str, list[str]]] = {}
    for site in SITES:
        for target, parameters in site.targets.items():
            owner, _, name = target.rpartition(".")
            methods.setdefault(site.module, {}).setdefault(owner, []).append(
                f"    def {name}({', '.join(parameters)}): return 'stock'"
            )
    root = tmp_path / "packages"
    for module, classes in methods.items():
        bodies = {owner: "\n".join(lines) for owner, lines in classes.items()}
        functions = textwrap.dedent(bodies.pop("", ""))  # of the module itself
        body = "\n".join([functions, *(f"class {owner}:\n{lines}" for owner, lines in bodies.items())])
        write_package(root, module, f"print('noise of {module}')\n{body}\n")
    for package, version in (("sglang", "0.5.12.post1"), ("flashinfer_python", "0.6.11.post1")):
        metadata = root / f"{package}-{version}.dist-info" / "METADATA"
        metadata.parent.mkdir()
        metadata.write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    return root


def start(*arguments: str, path: list[Path], cwd: Path, **switches: str) -> subprocess.CompletedProcess:
    """`python -m lora_fastpath ARGUMENTS` from `cwd`, with these folders and the checkout on PYTHONPATH, no GPU, these switches."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(SWITCHES)}
    env |= {
        "PYTHONPATH": os.pathsep.join(map(str, [*path, ROOT])),
        "CUDA_VISIBLE_DEVICES": "",
        "COLUMNS": "200",
        **switches,
    }
    command = [sys.executable, "-m", "lora_fastpath", *arguments]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=200, check=False)


class TestDoctor:
    @pytest.fixture
    def doctor(self, sglang, tmp_path):
        """doctor(**switches) -> (exit status, report). The interpreter stands in for a GPU unless TRITON_INTERPRET is given."""

        def call(cwd: Path = tmp_path, **switches: str) -> tuple[int, dict]:
            done = start("doctor", "--json", path=[sglang], cwd=cwd, **{"TRITON_INTERPRET": "1", **switches})
            return done.returncode, json.loads(done.stdout)  # fails on anything beside JSON

        pytest.importorskip("torch")
        return call

    def test_all_bound(self, doctor):
        status, report = doctor(LORA_FASTPATH="1")
        assert list(report) == ["version", "enabled", "sglang", "torch", "gpu", "sites"]
        assert (report["enabled"], report["sglang"], report["gpu"]) == (True, "0.5.12.post1", None)
        assert [(site["name"], site["state"], site["reason"]) for site in report["sites"]] == [
            (n, "bound", "") for n in NAMES
        ]
        assert all(list(site) == ["name", "target", "state", "reason"] for site in report["sites"])
        assert "QKVParallelLinearWithLoRA.forward" in report["sites"][NAMES.index("qkv")]["target"]
        assert status == 0

    def test_switched_off_it_shows_what_would_be(self, doctor):
        status, report = doctor()
        assert status == 1 and report["enabled"] is False
        assert {site["state"] for site in report["sites"]} == {"bound"}

    def test_switched_on_but_not_on_the_path(self, doctor):
        """From the checkout's folder `-m lora_fastpath` is found, but a server would not find the overlay."""
        status, report = doctor(LORA_FASTPATH="1", cwd=ROOT, PYTHONPATH="")
        assert status == 1 and report["enabled"] is False

    def test_hidden_by_another_sitecustomize(self, doctor, sglang):
        """A server started from here would run stock, whatever an interpreter with the overlay in front would do."""
        (sglang / "sitecustomize.py").touch()
        status, report = doctor(LORA_FASTPATH="1")
        assert status == 1 and report["enabled"] is False
        assert {site["state"] for site in report["sites"]} == {"bound"}

    def test_alias(self, doctor):
        assert doctor(SGLANG_EXPERIMENTAL_LORA_OPTI="1")[0] == 0

    def test_without_cuda(self, doctor):
        status, report = doctor(LORA_FASTPATH="1", TRITON_INTERPRET="0")
        assert status == 1
        assert all(site["state"] == "declined" and "no CUDA" in site["reason"] for site in report["sites"])

    def test_a_site_taken_out_is_no_fault(self, doctor):
        status, report = doctor(LORA_FASTPATH="1", LORA_FASTPATH_SITES="all,-row")
        row = report["sites"][NAMES.index("row")]
        assert status == 0 and row["state"] == "declined" and "not selected" in row["reason"]

    def test_a_changed_signature(self, doctor, sglang):
        layers = sglang / "sglang/srt/lora/layers.py"
        layers.write_text(
            layers.read_text().replace("self, input_, skip_all_reduce", "self, input_, other, skip_all_reduce")
        )
        status, report = doctor(LORA_FASTPATH="1", LORA_FASTPATH_STRICT="1")
        states = {site["name"]: site["state"] for site in report["sites"]}
        assert status == 1
        assert states == {name: "declined" if name == "row" else "bound" for name in NAMES}
        assert report["sites"][NAMES.index("row")]["reason"]

    def test_another_release(self, doctor, sglang):
        metadata = sglang / "sglang-0.5.12.post1.dist-info" / "METADATA"
        metadata.write_text(metadata.read_text().replace("0.5.12.post1", "0.5.99"))
        status, report = doctor(LORA_FASTPATH="1")
        assert status == 1 and report["sglang"] == "0.5.99"
        of_sglang = [site for site in report["sites"] if site["target"].startswith("sglang")]
        assert all(site["state"] == "declined" and "0.5.99" in site["reason"] for site in of_sglang)

    def test_sglang_that_does_not_import(self, doctor, sglang):
        (sglang / "sglang/srt/lora/layers.py").write_text("raise ImportError('libcuda.so.1: cannot open')\n")
        status, report = doctor(LORA_FASTPATH="1")
        assert status == 1 and "libcuda.so.1: cannot open" in report["sites"][NAMES.index("qkv")]["reason"]

    def test_sglang_that_kills_the_interpreter(self, doctor, sglang):
        (sglang / "sglang/srt/lora/layers.py").write_text(
            "import os, sys; print('dying', file=sys.stderr, flush=True); os._exit(9)\n"
        )
        status, report = doctor(LORA_FASTPATH="1")
        assert status == 1 and all("dying" in site["reason"] for site in report["sites"])

    def test_a_bad_setting(self, doctor):
        status, report = doctor(LORA_FASTPATH="1", LORA_FASTPATH_MAX_TOKENS="many")
        assert status == 1 and report["enabled"] is False
        assert all(
            "LORA_FASTPATH_MAX_TOKENS" in site["reason"] and "many" in site["reason"] for site in report["sites"]
        )

    def test_no_wrapt(self, doctor, sglang):
        (sglang / "wrapt.py").write_text("raise ModuleNotFoundError(\"No module named 'wrapt'\", name='wrapt')\n")
        status, report = doctor(LORA_FASTPATH="1")
        assert status == 1 and all("wrapt" in site["reason"] for site in report["sites"])


class TestDoctorForPeople:
    @pytest.mark.parametrize("with_rich", [True, False])
    def test_table(self, sglang, tmp_path, with_rich):
        pytest.importorskip("torch")
        if with_rich:
            pytest.importorskip("rich")
        else:
            (sglang / "rich.py").write_text("raise ImportError\n")
        done = start("doctor", path=[sglang], cwd=tmp_path, LORA_FASTPATH="1", TRITON_INTERPRET="1")
        assert done.returncode == 0, done.stderr
        assert "switch: on (LORA_FASTPATH=1)" in done.stdout and "sglang 0.5.12.post1" in done.stdout
        assert all(name in done.stdout for name in NAMES) and done.stdout.count("bound") == len(NAMES)
        assert "Where results differ from stock (adapters)" in done.stdout
        assert ("lora-fastpath[cli]" in done.stdout) is not with_rich
        assert "noise" not in done.stdout

    def test_not_on_the_path(self, sglang):
        pytest.importorskip("torch")
        done = start("doctor", path=[], cwd=ROOT, LORA_FASTPATH="1", PYTHONPATH=str(sglang))
        assert done.returncode == 1
        assert f"{ROOT} is not on PYTHONPATH" in done.stdout and "runs stock" in done.stdout


class TestRun:
    SHOW = "import json, os, sys; print(json.dumps([os.environ['LORA_FASTPATH'], os.environ['PYTHONPATH'], 'lora_fastpath' in sys.modules]))"

    def test_overlay_is_on_in_the_command(self, tmp_path):
        done = start(
            "run", "--", sys.executable, "-c", self.SHOW, path=[Path("/else")], cwd=tmp_path, LORA_FASTPATH="0"
        )
        switch, path, active = json.loads(done.stdout)
        assert (switch, path.split(os.pathsep), active) == ("1", [str(ROOT), "/else"], True)

    @pytest.mark.parametrize("status", [0, 7])
    def test_exit_status_passes_through(self, tmp_path, status):
        code = f"import sys; sys.exit({status})"
        assert start("run", "--", sys.executable, "-c", code, path=[], cwd=tmp_path).returncode == status

    def test_arguments_are_the_commands_own(self, tmp_path):
        code = "import sys; print(sys.argv[1:])"
        done = start("run", "--", sys.executable, "-c", code, "--help", "--", "-x", path=[], cwd=tmp_path)
        assert done.stdout.strip() == "['--help', '--', '-x']"

    def test_command_not_found(self, tmp_path):
        done = start("run", "--", "no-such-command", path=[], cwd=tmp_path)
        assert done.returncode == 127 and "cannot start 'no-such-command'" in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1

    def test_no_command(self, tmp_path):
        done = start("run", path=[], cwd=tmp_path)
        assert done.returncode == 2 and "which command?" in done.stderr


def test_installed_overlay_needs_no_pythonpath(tmp_path, monkeypatch):
    """In a wheel `patches` lies inside the package and no sitecustomize stands beside it."""
    import lora_fastpath
    from lora_fastpath import cli

    package = tmp_path / "site-packages" / "lora_fastpath"
    (package / "patches").mkdir(parents=True)
    monkeypatch.setattr(lora_fastpath, "__file__", str(package / "__init__.py"))
    assert cli.overlay_environment({"PYTHONPATH": "/x"}) == {"PYTHONPATH": "/x", "LORA_FASTPATH": "1"}
    assert cli.overlay_environment({}) == {"LORA_FASTPATH": "1"}
