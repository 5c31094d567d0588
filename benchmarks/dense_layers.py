"""What the dense sites add to a decoder layer, under graph replay: for tuning kernels, where an engine takes minutes.

    python benchmarks/dense_layers.py --model 8b --rows 16,256 --adapters 1,8

A chain of four layers (so that no weight stays in the L2 cache): norm, qkv, o, norm, gate_up, activation, down, with
sglang's own kernels between the projections and no attention; BF16 at Qwen3-8B's shapes, FP8 128x128 blocks at
Qwen3-30B-A3B's (attention projections alone). Prints us a layer without adapters and what each launch setting adds.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import types
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from lora_fastpath.kernels import tiles as tiling
from lora_fastpath.patches import dense
from lora_fastpath.streams import Lanes

LAYERS, SLOTS, RANK = 4, 8, 16
MODELS = {  # hidden size, FP8, projections: K, widths
    "8b": (4096, False, {"qkv": (4096, (4096, 1024, 1024)), "o": (4096, (4096,)), "gate_up": (4096, (12288, 12288)), "down": (12288, (4096,))}),
    "30b": (2048, True, {"qkv": (2048, (4096, 512, 512)), "o": (4096, (2048,))}),
}  # fmt: skip


class Layer:
    """One projection: base weight and adapters."""

    def __init__(self, k: int, widths: tuple[int, ...], fp8: bool, lanes: Lanes) -> None:
        n = sum(widths)
        self.k, self.fp8, self.two_streams = k, fp8, True
        if fp8:
            self.weight = torch.randn(n, k, device="cuda").to(torch.float8_e4m3fn).t()
            self.scales = torch.rand(k // 128, n // 128, device="cuda").t().contiguous().t()
        else:
            self.weight = torch.randn(n, k, device="cuda", dtype=torch.bfloat16) * k**-0.5
        a = torch.randn(SLOTS, len(widths) * RANK, k, device="cuda", dtype=torch.bfloat16) * k**-0.5
        b = torch.randn(SLOTS, n, RANK, device="cuda", dtype=torch.bfloat16) * RANK**-0.5
        ends = tuple(int(end) for end in np.cumsum(widths))
        self.projection = dense.Projection("qkv", types.SimpleNamespace(lanes=lanes), a, b, ends, pdl=True)

    def base(self, x: torch.Tensor) -> torch.Tensor:
        if not self.fp8:
            return torch.nn.functional.linear(x, self.weight)
        from sgl_kernel import fp8_blockwise_scaled_mm
        from sglang.srt.layers.quantization.fp8_kernel import sglang_per_token_group_quant_fp8

        codes, scales = sglang_per_token_group_quant_fp8(x, 128, column_major_scales=True)
        return fp8_blockwise_scaled_mm(codes, self.weight, scales, self.scales, torch.bfloat16)

    def __call__(self, x: torch.Tensor, launch: dense.Launch | None, tables: dict, lanes: Lanes) -> torch.Tensor:
        if launch is None:
            return self.base(x)
        lane = lanes.current()
        if not self.two_streams:
            y = self.base(x)
            dense.add_delta(self.projection, launch, tables, lane, x, y)
            return y
        lane.fork(dense.scratch_for(self.projection, launch, len(x)))
        y = self.base(x)
        dense.add_delta(self.projection, launch, tables, lane, x, y)
        lane.scratch = ()
        return y


def run_chain(layers: list[dict], x: torch.Tensor, launch: dense.Launch | None, tables: dict, lanes: Lanes) -> None:
    from sgl_kernel import fused_add_rmsnorm
    from sglang.jit_kernel.activation import silu_and_mul

    x, residual, weight = x.clone(), x.clone(), torch.ones_like(x[0])
    for layer in layers:
        fused_add_rmsnorm(x, residual, weight, 1e-6)
        attention = layer["qkv"](x, launch, tables, lanes)[:, : layer["o"].k].contiguous()
        x = layer["o"](attention, launch, tables, lanes)
        fused_add_rmsnorm(x, residual, weight, 1e-6)
        if "gate_up" in layer:
            gate_up = layer["gate_up"](x, launch, tables, lanes)
            activated = gate_up.new_empty(len(x), gate_up.shape[1] // 2)
            silu_and_mul(gate_up, activated)
            x = layer["down"](activated, launch, tables, lanes)


def captured(run) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            run()
    for _ in range(5):
        graph.replay()
    return graph


def us_a_layer(graphs: dict[str, torch.cuda.CUDAGraph], rounds: int = 11, replays: int = 10) -> dict[str, float]:
    """Median us a layer of each graph, measured in turn."""
    samples: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(rounds):
        for name, graph in graphs.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(replays):
                graph.replay()
            end.record()
            torch.cuda.synchronize()
            samples[name].append(start.elapsed_time(end) / replays / LAYERS * 1e3)
    return {name: statistics.median(values) for name, values in samples.items()}


def integers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ap.add_argument("--model", choices=MODELS, default="8b")
    ap.add_argument("--rows", type=integers, default=[1, 16, 64, 256])
    ap.add_argument("--adapters", type=integers, default=[1, 8])
    ap.add_argument(
        "--try", dest="tries", action="append", default=[], metavar="FIELD=VALUE,...",
        help="a launch setting to try beside the one in use, e.g. expand_rows=64,expand_columns=128 (repeatable)",
    )  # fmt: skip
    ap.add_argument("--one-stream", action="store_true", help="the shrink after the base GEMM, not beside it")
    args = ap.parse_args()
    hidden, fp8, shapes = MODELS[args.model]
    lanes = Lanes(torch.device("cuda"))
    layers = [{name: Layer(k, widths, fp8, lanes) for name, (k, widths) in shapes.items()} for _ in range(LAYERS)]
    for projection in (projection for layer in layers for projection in layer.values()):
        projection.two_streams = not args.one_stream
    for rows in args.rows:
        x = torch.randn(rows, hidden, device="cuda", dtype=torch.bfloat16)
        launches = {"in use": dense.launch_for(rows)}
        for text in args.tries:
            fields = {name: int(value) for name, value in (part.split("=") for part in text.split(","))}
            launches[text] = dataclasses.replace(launches["in use"], **fields)
        for adapters in args.adapters:
            row_slots = (np.arange(rows) % adapters).astype(np.int32)
            graphs = {"base": captured(lambda x=x: run_chain(layers, x, None, {}, lanes))}
            kept = []  # the graphs hold addresses, not tensors
            for name, launch in launches.items():
                tables = {}
                for size in launch.tile_rows:
                    table = np.empty((tiling.max_tiles(rows, SLOTS, size), tiling.HEADER + size), np.int32)
                    tiling.build_tiles(row_slots, np.full(SLOTS, RANK), np.ones(SLOTS, np.float32), size, table)
                    tables[size] = torch.from_numpy(table).cuda()
                kept.append(tables)
                graphs[name] = captured(
                    lambda launch=launch, tables=tables, x=x: run_chain(layers, x, launch, tables, lanes)
                )
            times = us_a_layer(graphs)
            base = times.pop("base")
            print(f"{args.model} rows {rows} adapters {adapters}: base {base:.1f} us a layer", flush=True)
            for name, time in times.items():
                print(f"    +{time - base:5.1f}  {base / time:.1%}  {name}", flush=True)


if __name__ == "__main__":
    main()
