"""The command line: `python -m lora_fastpath doctor [--json]` and `python -m lora_fastpath run -- COMMAND...`.

doctor does what a server would: it starts an interpreter with the overlay on, imports sglang's modules there and reads
what became of each site. So nothing that sglang prints, and no import that dies, can reach doctor's own output.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Mapping
from pathlib import Path

import lora_fastpath
from lora_fastpath.settings import SWITCH_ALIAS, Settings, SettingsError
from lora_fastpath.sites import SITES

LINE_START = "lora-fastpath: "
PACKAGES = ("sglang", "torch", "triton", "flashinfer-python", "wrapt")
PROBE = """
import json, sys
if "lora_fastpath" not in sys.modules:
    shown = getattr(sys.modules.get("sitecustomize"), "__file__", None)
    if shown is not None:
        why = f"{shown} stands before the overlay's sitecustomize and does not run it; put the overlay first on PYTHONPATH"
        json.dump({"gpu": None, "sites": {}, "hidden": why}, open(sys.argv[1], "w"))
        sys.exit()
    sys.path.insert(0, sys.argv[2])
from lora_fastpath.cli import write_probe
write_probe(sys.argv[1])
"""
"""Runs in the interpreter that `probe` starts. argv: the file to write, the folder that holds lora_fastpath."""

PROBE_SECONDS = 300
"""Longest that importing sglang may take; 15 to 60 s were seen, on a cold disk more."""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="lora-fastpath", description="An overlay that makes LoRA in sglang fast.")
    parser.add_argument("--version", action="version", version=lora_fastpath.__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    doctor_parser = commands.add_parser("doctor", help="what is installed and what becomes of each site here")
    doctor_parser.add_argument("--json", action="store_true", help="print JSON alone")
    run_parser = commands.add_parser("run", help="start any command with the overlay on: run -- COMMAND...")
    run_parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="-- COMMAND...")
    args = parser.parse_args(argv)
    if args.command == "doctor":
        return doctor(args.json)
    arguments = args.arguments[1:] if args.arguments[:1] == ["--"] else args.arguments
    if not arguments:
        run_parser.error("which command? For example: run -- python -m sglang.launch_server --model-path ...")
    return run(arguments)


def overlay_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` with the overlay on for every Python started from it. An installed overlay needs no PYTHONPATH."""
    env = dict(environ)
    env["LORA_FASTPATH"] = "1"
    folder = checkout()
    if folder:
        others = [p for p in python_path(env) if Path(p).resolve() != folder]
        env["PYTHONPATH"] = os.pathsep.join([str(folder), *others])
    return env


def checkout() -> Path | None:
    """The folder that has to be on PYTHONPATH, None for an installed overlay."""
    folder = Path(lora_fastpath.__file__).resolve().parent.parent
    return folder if (folder / "sitecustomize.py").is_file() and (folder / "patches").is_dir() else None


def python_path(environ: Mapping[str, str]) -> list[str]:
    return [p for p in environ.get("PYTHONPATH", "").split(os.pathsep) if p]


def unreachable() -> str:
    """Why an interpreter started from this environment does not find the overlay, or ""."""
    folder = checkout()
    if folder is None or any(Path(p).resolve() == folder for p in python_path(os.environ)):
        return ""
    return f"{folder} is not on PYTHONPATH; put it there, or start the server with `python -m lora_fastpath run --`"


def run(arguments: list[str]) -> int:
    """Replace this process by the command. Returns (127 or 126, as shells do) only if it can't be started."""
    sys.stdout.flush()
    try:
        os.execvpe(arguments[0], arguments, overlay_environment(os.environ))
    except OSError as error:
        print(f"lora-fastpath: run: cannot start {arguments[0]!r}: {error.strerror}", file=sys.stderr)
        return 127 if isinstance(error, FileNotFoundError) else 126


def doctor(as_json: bool) -> int:
    """Print the report; 0 when the calling environment turns the overlay on and every selected site is bound."""
    try:
        settings, trouble = Settings.from_environ(os.environ, [site.name for site in SITES]), unreachable()
    except SettingsError as error:
        settings, trouble = None, str(error)
    enabled = bool(settings and settings.enabled and not trouble)
    # As a server started from here would find it; where that is off, as one with the overlay on would.
    found = probe(dict(os.environ)) if enabled else probe(overlay_environment(os.environ))
    if enabled and found["hidden"]:
        enabled, trouble = False, found["hidden"]
        found = probe(overlay_environment(os.environ))
    report = {
        "version": lora_fastpath.__version__,
        "enabled": enabled,
        "sglang": installed("sglang"),
        "torch": installed("torch"),
        "gpu": found["gpu"],
        "sites": [],
    }
    for site in SITES:
        state, reason = found["sites"].get(site.name, ("pending", found["error"]))
        target = f"{site.module}: {', '.join(site.targets)}"
        report["sites"].append({"name": site.name, "target": target, "state": state, "reason": reason})
    if as_json:
        print(json.dumps(report, indent=2))
    else:
        print_report(report, settings, trouble or found["error"])
    bound = settings and all(s["state"] == "bound" for s in report["sites"] if s["name"] in settings.sites)
    return 0 if enabled and bound else 1


def installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def probe(environ: dict[str, str]) -> dict:
    """What an interpreter started with `environ` says: {"gpu": name or None, "sites": {name: [state, reason]}, ...}.

    "error" is why sites are missing there, or ""; "hidden" is set when something else ran in place of our sitecustomize.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "probe.json")
        # strict would end the probe at the first declined site, and doctor is to show all of them
        env = environ | {"LORA_FASTPATH_STRICT": "0"}
        command = [sys.executable, "-c", PROBE, str(path), str(Path(lora_fastpath.__file__).resolve().parent.parent)]
        try:
            done = subprocess.run(
                command,
                env=env,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=PROBE_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return {
                "gpu": None,
                "sites": {},
                "hidden": "",
                "error": f"importing sglang took more than {PROBE_SECONDS} s",
            }
        lines = done.stderr.strip().splitlines() or [f"it ended with status {done.returncode}"]
        if not path.exists():
            why = f"an interpreter with the overlay on failed: {lines[-1]}"
            return {"gpu": None, "sites": {}, "hidden": "", "error": why}
        found = json.loads(path.read_text()) | {"error": ""}
        if not found["sites"]:
            said = [line for line in lines if line.startswith(LINE_START)]
            found["error"] = said[0].removeprefix(LINE_START) if said else "the overlay was not activated"
        return found


def write_probe(path: str) -> None:
    """Runs in the interpreter that `probe` starts, where the overlay has been activated as in a server."""
    import importlib

    from lora_fastpath.registry import State, registry

    errors: dict[str, str] = {}
    for module in dict.fromkeys(site.module for site in SITES):
        try:
            importlib.import_module(module)
        except BaseException as error:  # noqa: BLE001 - sglang's imports may raise anything; the site's line shows it
            text = " ".join(f"{type(error).__name__}: {error}".split())
            errors[module] = f"import {module} failed: {textwrap.shorten(text, 200)}"
    gpu, unsupported = device()
    sites = {}
    for name, entry in registry.entries.items():  # empty when the overlay was not activated
        state, reason = entry.state, entry.reason
        if state is State.PENDING:
            reason = errors.get(entry.site.module, reason)
        if state is State.BOUND and unsupported:
            state, reason = State.DECLINED, unsupported
        sites[name] = (state.value, reason)
    Path(path).write_text(json.dumps({"gpu": gpu, "sites": sites, "hidden": ""}))


def device() -> tuple[str | None, str]:
    """The GPU's name, None without one; and why the kernels can't run here, or ""."""
    try:
        import torch

        cuda = torch.cuda.is_available()
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if cuda else []
        from lora_fastpath.selfcheck import supported_device

        why = supported_device(torch.device("cuda" if cuda else "cpu"))
    except Exception as error:  # noqa: BLE001 - a broken torch or driver is a finding, not a crash
        return None, f"no usable CUDA: {type(error).__name__}: {error}"
    gpu = names[0] if names else None
    return (f"{len(names)} x {gpu}" if len(names) > 1 else gpu), why


def print_report(report: dict, settings: Settings | None, error: str) -> None:
    switch = "LORA_FASTPATH" if os.environ.get("LORA_FASTPATH") else SWITCH_ALIAS
    print(f"lora-fastpath {report['version']}")
    print("  " + ", ".join(f"{package} {installed(package) or 'not installed'}" for package in PACKAGES))
    print(f"  GPU: {report['gpu'] or 'none'}")
    value = f"{switch}={os.environ[switch]}" if os.environ.get(switch) else "LORA_FASTPATH is not set"
    print(f"  switch: {'on' if report['enabled'] else 'off'} ({value})")
    if settings:
        print(f"  two streams up to {settings.max_tokens} rows, strict {'on' if settings.strict else 'off'}")
    if error:
        print(f"  {error}")
    if not report["enabled"]:
        print("  A server started from here runs stock. With the overlay on the sites would be:")
    print()
    rows = []
    for site, found in zip(SITES, report["sites"]):
        classes = dict.fromkeys(target.partition(".")[0] for target in site.targets)
        reason = "see above" if error and found["reason"] == error else found["reason"]
        rows.append([site.name, found["state"], reason, ", ".join(classes)])
    print_table(["site", "state", "reason", "wraps"], rows)
    for site in SITES:
        if site.differs:
            print(f"\nWhere results differ from stock ({site.name}): {site.differs}.")


def print_table(head: list[str], rows: list[list[str]]) -> None:
    """As a table with rich (the `cli` extra), else as plain columns."""
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
        for row in [head, *rows]:
            print("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())
        print("\n(for a real table: pip install 'lora-fastpath[cli]')")
        return
    table = Table(*head)
    for row in rows:
        table.add_row(*row)
    Console(markup=False).print(table)
