"""One rank of a tensor-parallel toy over gloo, overlay on: every dense site against float64, all-reduces counted.

LORA_FASTPATH=1 PYTHONPATH=<checkout> python tests/toy/tensor_parallel.py MODEL RANK RANKS PORT

Two batches: adapters from the start, then one that is loaded while serving.
"""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
import toy_manager as toy
from toy_latent import LatentToy

MODELS = {"qwen": toy.Toy, "latent": LatentToy}


def main() -> None:
    made = MODELS[sys.argv[1]]
    rank, ranks, port = (int(argument) for argument in sys.argv[2:5])
    fault = sys.argv[5] if len(sys.argv) > 5 else ""
    toy.start_sglang("cpu", rank, ranks, port)
    from sglang.srt.lora import layers

    faulty = bool(fault) and rank == ranks - 1
    ours = not (faulty and fault == "absent")
    if ours:
        from lora_fastpath import stock
        from lora_fastpath.patches import dense

        stock.ranks_that_bound = functools.partial(stock.ranks_that_bound, patience=15)
        if faulty and fault == "start":
            dense.self_check = lambda projection: "made to fail" if projection.site == "row" else ""

    model = made(torch.float16, "cpu", rank, ranks)
    manager = toy.make_manager(model, "csgmv", 4, {"a": 8, "b": 16, "c": 3}, torch.float16)
    reduce, reductions = layers.tensor_model_parallel_all_reduce, []

    def counted(tensor: torch.Tensor) -> torch.Tensor:
        reductions.append(tuple(tensor.shape))
        return reduce(tensor)

    layers.tensor_model_parallel_all_reduce = counted
    if faulty and fault == "serving":
        dense.shrink = None
    generator, errors, moves = torch.Generator().manual_seed(7), [], []
    for uids in (["a", None, "b", "a", "c"], ["late", "a", None]):
        if "late" in uids:
            toy.load(manager, model, "late", 12, seed=9)
        x = torch.randn(len(uids), model.hidden, generator=generator).half()
        error, moved = toy.compared(model, manager, uids, x)
        errors.append(error)
        moves.append(moved)
    states = {}
    if ours:
        from lora_fastpath.registry import registry

        states = {name: entry.state.value for name, entry in registry.entries.items()}
    print(json.dumps({"error": max(errors), "moved": min(moves), "reductions": reductions, "states": states}))


if __name__ == "__main__":
    main()
