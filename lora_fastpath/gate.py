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
    *, rows: int, active: bool, decode: bool, capturing: bool, nolora_graph: bool, max_tokens: int
) -> tuple[Path, str]:
    """Path for a batch of `rows` rows and why.

    active: some request of the batch has an adapter (host knowledge; a graph is captured with none and replayed with
    any, so it says nothing while `capturing`). decode: one or a few rows a request, the shape that graphs serve.
    """
    if nolora_graph:
        return Path.BASE, "this graph replays only without adapters"
    if not capturing and not active:
        return Path.BASE, "no request has an adapter"
    if not decode:
        return Path.ONE_STREAM, "prefill fills the GPU by itself"
    if rows > max_tokens:
        return Path.ONE_STREAM, f"{rows} rows are over the two-stream limit of {max_tokens}"
    return Path.TWO_STREAMS, f"{rows} rows leave SMs free beside the base layer"
