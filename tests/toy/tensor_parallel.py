"""One rank of a tensor-parallel toy over gloo, overlay on: every dense site against float64, all-reduces counted.

LORA_FASTPATH=1 PYTHONPATH=<checkout> python tests/toy/tensor_parallel.py RANK RANKS PORT
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
import toy_manager as toy


def main() -> None:
    rank, ranks, port = (int(argument) for argument in sys.argv[1:])
    toy.start_sglang("cpu", rank, ranks, port)
    from sglang.srt.lora import layers

    model = toy.Toy(torch.float16, "cpu", rank, ranks)
    manager = toy.make_manager(model, "csgmv", 4, {"a": 8, "b": 16, "c": 3}, torch.float16)
    reduce, reductions = layers.tensor_model_parallel_all_reduce, []

    def counted(tensor: torch.Tensor) -> torch.Tensor:
        reductions.append(tuple(tensor.shape))
        return reduce(tensor)

    layers.tensor_model_parallel_all_reduce = counted
    uids = ["a", None, "b", "a", "c"]
    x = torch.randn(len(uids), toy.Toy.hidden, generator=torch.Generator().manual_seed(7)).half()
    with torch.inference_mode():
        manager.fetch_new_loras(set(uids))
        manager.prepare_lora_batch(toy.decode_batch(uids))
        got = model(x)
        right = toy.expected(model, manager, uids, [1] * len(uids), x)
        base = toy.expected(model, manager, [None] * len(uids), [1] * len(uids), x)
    error, moved = (((y.double() - right).norm() / right.norm()).item() for y in (got, base))
    state = type(manager.lora_backend).__name__, manager.lora_fastpath.prepares_stock
    print(json.dumps({"error": error, "moved": moved, "reductions": reductions, "stock_prepared": state[1]}))


if __name__ == "__main__":
    main()
