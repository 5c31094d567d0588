"""What the `moe` site adds to an expert layer, under graph replay: for tuning kernels, where an engine takes minutes.

    python benchmarks/moe_layers.py --model 30b-fp8 --rows 1,16,64,256 --adapters 1,8

A chain of four expert layers (so that no weight stays in the L2 cache) with fixed random routing; no router, no
attention. Prints us a layer without adapters (sglang's own sequence), what adapters add, in two streams and in one, and
the least that reading them could add: the bytes of the (adapter, expert) pairs in use at the speed of a large copy. With
--name writes all that to --results/NAME.json.
"""

from __future__ import annotations

import argparse
import os
import sys
import types
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import engine_ab
from dense_layers import LAYERS, SLOTS, captured, integers, us_a_layer

from lora_fastpath import stock
from lora_fastpath.gate import Path as GatePath
from lora_fastpath.patches import moe
from lora_fastpath.streams import Lanes

MODELS = {  # hidden size, intermediate size, experts, experts a token, FP8 blocks
    "30b-fp8": (2048, 768, 128, 8, True),
    "30b-bf16": (2048, 768, 128, 8, False),
    "256x512-fp8": (2048, 512, 256, 8, True),  # Qwen3.5-35B-A3B's experts
    "235b-fp8": (4096, 1536, 128, 8, True),
    "mixtral-bf16": (4096, 14336, 8, 2, False),
}


def start_sglang() -> None:
    """What sglang's expert runner looks up: one process's groups and the server's arguments."""
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "toy"))
    import toy_manager

    toy_manager.start_sglang("cuda")


class Layer:
    """One expert layer: base weights as sglang holds them, and adapters."""

    def __init__(self, model: str, rank: int, lanes: Lanes) -> None:
        from sglang.srt.layers.moe.moe_runner.base import MoeRunnerConfig
        from sglang.srt.layers.moe.moe_runner.runner import MoeRunner
        from sglang.srt.layers.moe.moe_runner.triton import TritonMoeQuantInfo
        from sglang.srt.layers.moe.utils import MoeRunnerBackend

        hidden, wide, experts, self.top_k, fp8 = MODELS[model]
        self.count = experts

        def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
            return torch.randn(shape, device="cuda", dtype=torch.bfloat16) * scale

        w13, w2 = random(experts, 2 * wide, hidden, scale=hidden**-0.5), random(experts, hidden, wide, scale=wide**-0.5)
        quant = {"w13_weight": w13, "w2_weight": w2}
        if fp8:
            quant = {name: (w * 16).to(torch.float8_e4m3fn) for name, w in quant.items()}
            for name in ("w13", "w2"):
                blocks = [-(-n // 128) for n in quant[f"{name}_weight"].shape[1:]]
                quant[f"{name}_scale"] = torch.full((experts, *blocks), 1 / 16, device="cuda")
            quant |= {"use_fp8_w8a8": True, "block_shape": [128, 128]}
        config = MoeRunnerConfig(
            num_experts=experts, num_local_experts=experts, hidden_size=hidden, intermediate_size_per_partition=wide,
            top_k=self.top_k, params_dtype=torch.bfloat16, activation="silu", is_gated=True, inplace=True,
        )  # fmt: skip
        runner = MoeRunner(MoeRunnerBackend.TRITON, config, lora_enabled=True)
        self.sglang = types.SimpleNamespace(_lora_runner=runner, _quant_info=TritonMoeQuantInfo(**quant))
        b = rank**-0.5
        self.experts = moe.Experts(
            "moe",
            types.SimpleNamespace(lanes=lanes),
            random(SLOTS, experts, 2 * rank, hidden, scale=hidden**-0.5),
            random(SLOTS, experts, 2 * wide, rank, scale=b),
            random(SLOTS, experts, rank, wide, scale=wide**-0.5),
            random(SLOTS, experts, hidden, rank, scale=b),
            stock.runner_without_lora(self.sglang),
            fast_math=True,
            pdl=True,
            quantizes=fp8 and moe._quantizes_as_sglang(w13.device, w13.dtype, True),
        )

    def __call__(self, x: torch.Tensor, topk_output: object, batch: types.SimpleNamespace | None) -> torch.Tensor:
        from sglang.srt.layers.moe.token_dispatcher.standard import StandardDispatchOutput

        dispatched = StandardDispatchOutput(x, None, topk_output)
        if batch is None:
            return self.experts.base_runner.run(dispatched, self.sglang._quant_info).hidden_states
        return moe.run(self.experts, self.sglang, dispatched, batch)


def routing(rows: int, experts: int, top_k: int) -> object:
    from sglang.srt.layers.moe.topk import StandardTopKOutput

    logits = torch.randn(rows, experts, device="cuda")
    weights, ids = logits.softmax(-1).topk(top_k)
    return StandardTopKOutput((weights / weights.sum(-1, keepdim=True)).float(), ids.int(), logits)


def bytes_per_us() -> float:
    """Read plus written by a large copy on this GPU."""
    source = torch.empty(1 << 31, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    copies = captured(lambda: target.copy_(source))
    return 2 * source.numel() / (us_a_layer({"copy": copies})["copy"] * LAYERS)


def adapter_bytes(layers: list[Layer], routes: list, slots: torch.Tensor) -> float:
    """A layer's adapter weights that these rows need, each pair of an adapter and an expert once; mean of the layers."""
    total = 0
    for layer, topk_output in zip(layers, routes):
        pairs = (slots[:, None].long() * layer.count + topk_output.topk_ids).unique().numel()
        experts = layer.experts
        buffers = (experts.gate_up_a, experts.gate_up_b, experts.down_a, experts.down_b)
        total += pairs * sum(buffer[0, 0].numel() * buffer.element_size() for buffer in buffers)
    return total / len(layers)


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ap.add_argument("--model", choices=MODELS, default="30b-fp8")
    ap.add_argument("--rows", type=integers, default=[1, 16, 64, 256])
    ap.add_argument("--adapters", type=integers, default=[1, 8])
    ap.add_argument("--rank", type=int, default=16)
    ap.add_argument("--name", help="of the result; default: none is written")
    ap.add_argument("--results", type=Path, default=Path(__file__).resolve().parent / "results" / "layers")
    ap.add_argument("--commit", default=os.environ.get("AB_COMMIT"), help="git commit, where there is no .git")
    ap.set_defaults(device="cuda")
    args = ap.parse_args()
    result = engine_ab.header(args, sys.argv[1:], "moe_layers.py")
    start_sglang()
    speed = bytes_per_us()
    torch.manual_seed(0)
    lanes = Lanes(torch.device("cuda"))
    layers = [Layer(args.model, args.rank, lanes) for _ in range(LAYERS)]
    ranks = torch.full((SLOTS,), args.rank, dtype=torch.int32, device="cuda")
    with torch.inference_mode():
        for rows in args.rows:
            routes = [routing(rows, layer.count, layer.top_k) for layer in layers]
            x = torch.randn(rows, MODELS[args.model][0], device="cuda", dtype=torch.bfloat16)

            def run(batch: types.SimpleNamespace | None, x: torch.Tensor = x, routes: list = routes) -> None:
                for layer, topk_output in zip(layers, routes):
                    x = layer(x, topk_output, batch)

            for adapters in args.adapters:
                slots = torch.arange(rows, dtype=torch.int32, device="cuda") % adapters
                graphs, kept = {"base": captured(lambda: run(None))}, []
                for path in (GatePath.TWO_STREAMS, GatePath.ONE_STREAM):
                    batch = types.SimpleNamespace(path=path, rows=rows, row_slots=slots, slot_ranks=ranks)
                    kept.append(batch)  # the graphs hold addresses, not tensors
                    graphs[path.value] = captured(lambda batch=batch: run(batch))
                times = us_a_layer(graphs)
                base, read = times.pop("base"), adapter_bytes(layers, routes, slots)
                cell = {"model": args.model, "rank": args.rank, "rows": rows, "adapters": adapters}
                cell |= {"us_base": base, "us_added": {name: time - base for name, time in times.items()}}
                cell |= {"adapter_mb": read / 1e6, "us_to_read_adapters": read / speed}
                result["cells"].append(cell)
                print(
                    f"{args.model} rank {args.rank} rows {rows} adapters {adapters}: base {base:.1f} us a layer, "
                    f"{read / 1e6:.1f} MB of adapters in {read / speed:.1f} us at best",
                    flush=True,
                )
                for name, time in times.items():
                    print(f"    +{time - base:5.1f}  {base / time:.1%}  {name}", flush=True)
                if args.name:
                    engine_ab.save(result, args.results / f"{args.name}.json")


if __name__ == "__main__":
    main()
