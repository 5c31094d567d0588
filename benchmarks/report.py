"""Make RESULTS.md, and the figures and the list of sites in README.md: `python benchmarks/report.py [--check]`.

With --check nothing is written; the exit status is 1 if a page is not what the results say.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
RESULTS, PAGE, README = HERE / "results", HERE / "RESULTS.md", HERE.parent / "README.md"


def load(folder: Path) -> dict[str, dict]:
    """File name without suffix -> result, in the order of the names."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}


def page(results: dict[str, dict], layers: dict[str, dict]) -> str:
    """RESULTS.md: every cell of every run of an engine, then of single layers."""
    text = ["# Results", "", "Made from `results/*.json` by `report.py`. Times are medians in ms, a decode row's time is one step."]
    text += ["*Kept* is the share of the speed without LoRA; *spread* the largest deviation of one sample from its median."]
    for name, result in results.items():
        text += ["", f"## {name}", "", conditions(result), "", f"`{result['command']}`"]
        if result.get("commit"):
            text += ["", f"Commit {result['commit']}."]
        for phase, title in (("decode", "Decode"), ("prefill", "Prefill, one request")):
            cells = [cell for cell in result["cells"] if cell["phase"] == phase]
            if cells:
                text += ["", f"{title}: {subject(cells[0])}", "", *cell_table(cells, phase)]
    for name, result in layers.items():
        text += ["", f"## Layers: {name}", "", conditions(result), "", f"`{result['command']}`"]
        text += ["", f"Commit {result['commit']}.", "", *layer_table(result["cells"])]
    return "\n".join(text) + "\n"


def layer_table(cells: list[dict]) -> list[str]:
    """Of expert layers alone under graph replay (moe_layers.py): us without adapters and what adapters add."""
    lines = [
        "| model | rank | adapters | rows | no LoRA, us | added, two streams | added, one stream | adapters read, MB | at least, us |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for cell in sorted(cells, key=lambda c: (c["adapters"], c["rows"])):
        added = cell["us_added"]
        lines.append(
            f"| {cell['model']} | {cell['rank']} | {cell['adapters']} | {cell['rows']} | {cell['us_base']:.1f} | "
            f"{added['two streams']:.1f} | {added['one stream']:.1f} | {cell['adapter_mb']:.1f} | {cell['us_to_read_adapters']:.1f} |"
        )
    return lines


def summary(results: dict[str, dict]) -> str:
    """The README's figures: decode speed kept, a table a run."""
    text = []
    for result in results.values():
        cells = [cell for cell in result["cells"] if cell["phase"] == "decode"]
        if cells:
            text += ["", f"{subject(cells[0])}; {conditions(result)}", "", *cell_table(cells, "decode")]
    if not text:
        return "No run has been recorded yet."
    return "\n".join([*text[1:], "", "Prefill and the single samples: [benchmarks/RESULTS.md](benchmarks/RESULTS.md)."])


def conditions(result: dict) -> str:
    driver = f", driver {result['driver']}" if result["driver"] else ""
    versions = f"sglang {result['sglang']}, torch {result['torch']}, triton {result['triton']}"
    return f"{result['gpu']}{driver}, {versions}, {result['date'][:10]}."


def subject(cell: dict) -> str:
    return f"{cell['model']}, {cell['layers']} layers, adapters on {cell['targets']}, rank {cell['rank']}"


def cell_table(cells: list[dict], phase: str) -> list[str]:
    size, key = ("batch", "batch") if phase == "decode" else ("prompt tokens", "tokens")
    virtual = any("ms_stock_virtual" in cell for cell in cells)
    more = " stock, virtual experts |" if virtual else ""
    lines = [
        f"| adapters | {size} | no LoRA | stock (backend) |{more} overlay | stock keeps | overlay keeps | spread |",
        "|---|---|---|---|" + "---|" * (4 + virtual),
    ]
    for cell in sorted(cells, key=lambda c: (c["adapters"], c[key])):
        stock = f"{milliseconds(cell['ms_stock'])} ({cell.get('stock_backend') or '-'})"
        more = f" {milliseconds(cell.get('ms_stock_virtual'))} |" if virtual else ""
        lines.append(
            f"| {cell['adapters']} | {cell[key]} | {milliseconds(cell['ms_base'])} | {stock} |{more} {milliseconds(cell['ms_fast'])} | "
            f"{share(cell['kept_stock'])} | {share(cell['kept_fast'])} | {share(cell['spread'])} |"
        )
    return lines


def milliseconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def site_table() -> str:
    """The README's list of sites, from the data that the overlay itself works with."""
    sys.path.insert(0, str(HERE.parent))
    try:
        from lora_fastpath.sites import SITES
    finally:
        sys.path.remove(str(HERE.parent))
    lines = ["| site | wraps | releases | results differ from stock beyond rounding |", "|---|---|---|---|"]
    for site in SITES:
        wraps = ", ".join(f"`{target}`" for target in site.targets)
        package = site.module.partition(".")[0]
        releases = f"{package} {site.releases}"
        lines.append(f"| `{site.name}` | {wraps} | {releases} | {site.differs or 'no'} |")
    return "\n".join(lines)


def between_markers(text: str, name: str, new: str) -> str:
    """`text` with `new` between the markers of `name`. Raises ValueError if it lacks them."""
    begin, end = f"<!-- {name}: made by benchmarks/report.py -->", f"<!-- end of {name} -->"
    before, found, rest = text.partition(begin)
    _, found_end, after = rest.partition(end)
    if not found or not found_end:
        raise ValueError(f"README.md has no lines {begin!r} and {end!r}")
    return f"{before}{begin}\n{new}\n{end}{after}"


def main(argv: list[str] | None = None) -> int:
    ap = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ap.add_argument("--check", action="store_true", help="write nothing, exit 1 if a page is out of date")
    args = ap.parse_args(argv)
    results, layers = load(RESULTS), load(RESULTS / "layers")
    readme = between_markers(README.read_text(), "figures", summary(results))
    wanted = {PAGE: page(results, layers), README: between_markers(readme, "sites", site_table())}
    stale = [path for path, text in wanted.items() if not path.exists() or path.read_text() != text]
    for path in stale:
        print(f"{path.name} {'is out of date: run python benchmarks/report.py' if args.check else 'written'}")
        if not args.check:
            path.write_text(wanted[path])
    return 1 if args.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
