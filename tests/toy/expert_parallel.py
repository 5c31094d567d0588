"""One rank of a parallel toy of experts over gloo: each expert cut in shards, or whole experts on each rank.

    python tests/toy/expert_parallel.py RANK RANKS PORT {shards,experts}

With whole experts sglang's dispatcher turns the ids of the other ranks' experts into -1, and the adapter buffers hold
this rank's experts alone. Prints one JSON line.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
import toy_manager as toy
from toy_experts import ExpertsToy


def main() -> None:
    rank, ranks, port = (int(argument) for argument in sys.argv[1:4])
    expert_ranks = ranks if sys.argv[4] == "experts" else 1
    toy.start_sglang("cpu", rank, ranks, port, expert_ranks)
    model = ExpertsToy(torch.float16, "cpu", rank, ranks, expert_ranks)
    manager = toy.make_manager(model, "csgmv", 4, {"a": 8, "b": 16, "c": 3}, torch.float16)
    uids = ["a", None, "b", "a", "c"]
    x = torch.randn(len(uids), model.hidden, generator=torch.Generator().manual_seed(7)).half()
    with torch.inference_mode():
        manager.fetch_new_loras(set(uids))
        batch = toy.decode_batch(uids)  # lives as long as its forward, as in sglang
        manager.prepare_lora_batch(batch)
        got = model(x)
        right = toy.expected(model, manager, uids, [1] * len(uids), x)
        base = toy.expected(model, manager, [None] * len(uids), [1] * len(uids), x)
    error, moved = (((y.double() - right).norm() / right.norm()).item() for y in (got, base))
    buffers = {name: list(layers[0].shape) for name, layers in manager.memory_pool.A_buffer.items()}
    overlay = sys.modules.get("lora_fastpath.registry")
    states = {name: entry.state.value for name, entry in overlay.registry.entries.items()} if overlay else {}
    print(json.dumps({"error": error, "moved": moved, "buffers": buffers, "states": states}))


if __name__ == "__main__":
    main()
