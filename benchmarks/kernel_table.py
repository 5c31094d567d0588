"""Kernels of one decode step out of a torch profiler trace: `python kernel_table.py TRACE.json.gz...`."""

from __future__ import annotations

import collections
import gzip
import json
import re
import sys

EDGE_STEPS = 3  # steps left out at either end: prefill, and steps that started under the profiler's own start


def kernel_table(path: str, rows: int = 40) -> str:
    """Microseconds and launches a step by kernel name, largest first; a step is what lies between two argmax kernels.

    Raises ValueError if the trace holds fewer than eight of them.
    """
    with gzip.open(path) as trace:
        events = json.load(trace)["traceEvents"]
    kernels = sorted((e for e in events if e.get("cat") == "kernel"), key=lambda e: e["ts"])
    ends = [i for i, e in enumerate(kernels) if "argmax" in e["name"].lower()]
    if len(ends) < 2 * EDGE_STEPS + 2:
        raise ValueError(f"{path}: {len(kernels)} kernels, {len(ends)} of them argmax: no decode steps to be seen")
    first, last = ends[EDGE_STEPS], ends[-1 - EDGE_STEPS]
    steps = len(ends) - 1 - 2 * EDGE_STEPS
    inside = kernels[first + 1 : last + 1]
    span = (inside[-1]["ts"] + inside[-1]["dur"] - inside[0]["ts"]) / steps
    sums: dict[str, list[float]] = collections.defaultdict(lambda: [0, 0.0])
    for event in inside:
        name = re.sub(r"^void |<.*|\(.*", "", event["name"])[:70]
        sums[name][0] += 1
        sums[name][1] += event["dur"]
    busy = sum(us for _, us in sums.values()) / steps
    lines = [f"  steps {steps}, a step {span:.0f} us, kernels' sum {busy:.0f} us, launches {len(inside) / steps:.0f}"]
    for name, (count, us) in sorted(sums.items(), key=lambda item: -item[1][1])[:rows]:
        lines.append(f"  {us / steps:8.1f} us  x{count / steps:6.1f}  {us / count:7.2f} us each  {name}")
    return "\n".join(lines)


if __name__ == "__main__":
    for trace_path in sys.argv[1:]:
        print(trace_path)
        print(kernel_table(trace_path))
