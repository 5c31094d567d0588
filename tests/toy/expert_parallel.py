"""One rank of a parallel toy of experts over gloo: groups of ranks with experts of their own, each expert cut in shards.

    python tests/toy/expert_parallel.py RANK RANKS PORT GROUPS

With GROUPS above 1 sglang's dispatcher turns the ids of the other groups' experts into -1, and the adapter buffers hold
this group's experts alone. Three batches: adapters from the start, others that take their slots while serving, and one
whose tokens all go to the first half of the experts. Prints one JSON line.
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
    groups = int(sys.argv[4])
    toy.start_sglang("cpu", rank, ranks, port, groups)
    model = ExpertsToy(torch.float16, "cpu", rank, ranks, groups)
    manager = toy.make_manager(model, "csgmv", 4, {"a": 8, "b": 16, "c": 3, "d": 5, "e": 12}, torch.float16)
    generator, errors, moves = torch.Generator().manual_seed(7), [], []
    for uids, only in ((["a", None, "b", "a", "c"], 6), (["e", "d", None, "a", "d"], 6), (["b", "e", None], 3)):
        model.only = only
        x = torch.randn(len(uids), model.hidden, generator=generator).half()
        error, moved = toy.compared(model, manager, uids, x)
        errors.append(error)
        moves.append(moved)
    buffers = {name: list(layers[0].shape) for name, layers in manager.memory_pool.A_buffer.items()}
    overlay = sys.modules.get("lora_fastpath.registry")
    states = {name: entry.state.value for name, entry in overlay.registry.entries.items()} if overlay else {}
    print(json.dumps({"error": max(errors), "moved": min(moves), "buffers": buffers, "states": states}))


if __name__ == "__main__":
    main()
