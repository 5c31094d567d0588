"""The gate: which path a batch takes. One function, asked once a batch, that answers the path and the reason."""

from __future__ import annotations

import enum


class Path(enum.Enum):
    BASE = "base"
    """Nothing of LoRA runs."""
    ONE_STREAM = "one stream"
    """Our kernels, in line with the base layer."""
    TWO_STREAMS = "two streams"
    """Our kernels, the shrink beside the base layer."""


def choose(
    *, rows: int, active: bool, replayable: bool, capturing: bool, nolora_graph: bool, max_tokens: int
) -> tuple[Path, str]:
    """Path for a batch of `rows` rows and why.

    active: some request of the batch has an adapter. That is host knowledge: a graph is captured with none and replayed
    with any. replayable: the batch has the shape that graphs serve; sglang can capture such a one again while serving,
    unannounced, so nothing may be left out of it. Decode and speculative verify batches alone are captured.
    """
    if nolora_graph:
        return Path.BASE, "this graph replays only without adapters"
    if capturing and rows <= max_tokens:
        return Path.TWO_STREAMS, f"a graph of {rows} rows leaves SMs free beside the base layer"
    if capturing:
        return Path.ONE_STREAM, f"{rows} rows are over the two-stream limit of {max_tokens}"
    if active or replayable:
        # Launched one by one, the host is what a small batch waits for: 99 us a layer with two streams, 51 with one
        # (H200 machine, 16 and 128 rows). A prefill of thousands of rows fills the GPU by itself.
        return Path.ONE_STREAM, "no graph: forking costs the host more than it hides"
    return Path.BASE, "no request has an adapter"
