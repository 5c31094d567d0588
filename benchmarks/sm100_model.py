"""A model of what adapters cost an expert layer on FlashInfer's TRT-LLM-gen path: bytes and launches, stage by stage.

    python benchmarks/sm100_model.py            prints the page
    python benchmarks/sm100_model.py --write    writes docs/sm100_model.md

It is no measurement. Nothing of this project has run on such a GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

PAGE = Path(__file__).resolve().parent.parent / "docs" / "sm100_model.md"

BANDWIDTH = 8.0e12
"""Bytes a second of one Blackwell GPU of a GB200, as its datasheet has it."""
LAUNCH = 2.0e-6
"""Seconds that a kernel takes at least, under a graph with programmatic dependent launch. Assumed."""

LAYERS = {  # hidden size, intermediate size, experts, experts a token, bits of a weight
    "Kimi-K2.5, NVFP4": (7168, 2048, 384, 8, 4),
    "Qwen3.5-35B-A3B, FP8 blocks": (2048, 512, 256, 8, 8),
}
BATCHES = ((1, 1), (16, 1), (64, 1), (256, 1), (16, 8), (64, 8), (256, 8))
"""Tokens of a decode step, adapters in it."""
RANK = 16


@dataclasses.dataclass(frozen=True)
class Stage:
    name: str
    bytes: float
    side: bool = False  # on the second stream, beside the stage before it
    lora: bool = False  # not there without adapters

    @property
    def seconds(self) -> float:
        return max(self.bytes / BANDWIDTH, LAUNCH)


def met(experts: int, top_k: int, tokens: float) -> float:
    """Experts that a batch meets, on average over routing at random."""
    return experts * (1 - (1 - top_k / experts) ** tokens)


def stages(layer: str, tokens: int, adapters: int) -> list[Stage]:
    """A layer of all experts on one GPU. adapters 0: without any."""
    hidden, half, experts, top_k, bits = LAYERS[layer]
    pairs, active = tokens * top_k, met(experts, top_k, tokens)
    fp4 = bits == 4
    value = bits / 8 * (1 + (1 / 16 * 2 if fp4 else 4 / 128))  # codes with their scales: e4m3 of 16 values, float32 of 128
    weight = bits / 8 + (1 / 16 if fp4 else 4 / 128 / 128)
    matrices = adapters * met(experts, top_k, tokens / adapters) if adapters else 0
    gate_up_a_b = matrices * 2 * 2 * RANK * (hidden + half)
    down_a_b = matrices * 2 * RANK * (hidden + half)
    gate_up_out = 2 if fp4 and adapters else value  # NVFP4 with adapters: gate and up leave the GEMM as BF16
    unfused = adapters or not fp4  # FlashInfer fuses NVFP4's activation into its gate_up GEMM
    found = [Stage("route", pairs * 24.0)]
    if adapters:
        found.append(Stage("pairs into blocks", pairs * 12.0, lora=True))
    if fp4 and adapters:
        found.append(Stage("gather rows", (tokens + pairs) * hidden * value, lora=True))
    rows_in = pairs * hidden * value
    rows_out = pairs * (2 * half * gate_up_out if unfused else half * value)
    found.append(Stage("gate_up GEMM", active * 2 * half * hidden * weight + rows_in + rows_out))
    if adapters:
        found.append(Stage("gate_up delta", gate_up_a_b + pairs * 2 * (hidden + 2 * half), side=True, lora=True))
    if unfused:
        delta = pairs * 2 * (2 * half + half) if adapters else 0  # read it, write the activated row
        found.append(Stage("activation", pairs * (2 * half * gate_up_out + half * value) + delta, lora=fp4))
    found.append(Stage("down GEMM", active * half * hidden * weight + pairs * (half * value + 2 * hidden)))
    if adapters:
        found.append(Stage("down delta", down_a_b + pairs * 2 * (half + hidden), side=True, lora=True))
    found.append(Stage("sum", pairs * 2 * hidden * (2 if adapters else 1) + tokens * 2 * hidden))
    return found


def seconds(given: list[Stage]) -> float:
    """Streams share the memory: a stage and the one beside it take the time of all their bytes, and one launch."""
    total = 0.0
    for stage, beside in zip(given, [*given[1:], None]):
        if stage.side:
            continue
        both = stage.bytes + (beside.bytes if beside is not None and beside.side else 0.0)
        total += max(both / BANDWIDTH, LAUNCH)
    return total


def page() -> str:
    lines = [
        "# What adapters should cost on Blackwell: a model, not a measurement",
        "",
        "Made by `python benchmarks/sm100_model.py --write`. **Nothing here was measured; no such GPU was at hand.** Each stage of an",
        f"expert layer takes the time of its bytes at {BANDWIDTH / 1e12:g} TB/s (the datasheet of one GPU of a GB200), at least {LAUNCH * 1e6:g} us",
        "(assumed); a stage of the second stream shares the memory with the one beside it. All experts are on one GPU, tokens are",
        f"routed at random, and each adapter has rank {RANK} and an equal part of the batch. The share kept is that of expert layers",
        "alone; a whole model keeps more, as its attention costs the same. For other implementations on this kind of GPU, 79 to 93%",
        "of the speed without adapters have been published, for whole models.",
    ]
    for layer in LAYERS:
        lines += ["", f"## {layer}", ""]
        lines += ["| adapters | batch | MB without | MB with | kernels without | kernels with | us without | us with | kept |"]
        lines += ["|---|---|---|---|---|---|---|---|---|"]
        for tokens, adapters in BATCHES:
            base, ours = stages(layer, tokens, 0), stages(layer, tokens, adapters)
            megabytes = [sum(stage.bytes for stage in some) / 1e6 for some in (base, ours)]
            us = [seconds(some) * 1e6 for some in (base, ours)]
            lines.append(
                f"| {adapters} | {tokens} | {megabytes[0]:.1f} | {megabytes[1]:.1f} | {len(base)} | {len(ours)} | {us[0]:.1f} | "
                f"{us[1]:.1f} | {us[0] / us[1]:.0%} |"
            )
        lines += ["", "One adapter, 64 tokens, stage by stage:", "", "| stage | MB | us alone | stream |", "|---|---|---|---|"]
        for stage in stages(layer, 64, 1):
            stream = "second" if stage.side else "first, adapters only" if stage.lora else "first"
            lines.append(f"| {stage.name} | {stage.bytes / 1e6:.2f} | {stage.seconds * 1e6:.1f} | {stream} |")
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write docs/sm100_model.md")
    if parser.parse_args(arguments).write:
        PAGE.parent.mkdir(exist_ok=True)
        PAGE.write_text(page())
    else:
        print(page(), end="")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
