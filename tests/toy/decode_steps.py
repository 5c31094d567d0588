"""Decode steps of a real LoRAManager with the overlay on: graphs captured with no adapter, replayed with any.

    LORA_FASTPATH=1 PYTHONPATH=<checkout> python tests/toy/decode_steps.py csgmv --steps 2000
    LORA_FASTPATH=1 PYTHONPATH=<checkout> python tests/toy/decode_steps.py csgmv --steps 2000 --model experts

Every step draws a batch size and adapters (with unknown ones and none), which move in and out of their slots; now and
then one is unloaded and another loaded. The replay is compared with the same batch run eagerly, now and then with
float64 and, the rows without an adapter, with the same batch without any. On the CPU there are no graphs: eager steps
alone.
Prints one JSON line.
"""

from __future__ import annotations

import argparse
import functools
import json
import random
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
import toy_manager as toy
from toy_experts import ExpertsToy

BATCHES = (1, 2, 4, 8, 16, 24)
SLOTS = 4
RELOAD_EVERY = 5
MODELS = {"dense": toy.Toy, "experts": ExpertsToy, "shared-outer": functools.partial(ExpertsToy, shared=True)}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("backend", choices=("csgmv", "triton"))
    arguments.add_argument("--steps", type=int, default=2000)
    arguments.add_argument("--check-every", type=int, default=25, help="steps between comparisons with float64")
    arguments.add_argument("--model", choices=MODELS, default="dense")
    arguments.add_argument("--virtual-experts", action="store_true", help="sglang's lora_use_virtual_experts")
    args = arguments.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float16
    torch.set_default_device(device)
    toy.start_sglang(
        device,
        lora_use_virtual_experts=args.virtual_experts,
        experts_shared_outer_loras=args.model == "shared-outer",
    )
    torch.manual_seed(0)
    model = MODELS[args.model](dtype, device)
    torch.set_default_device("cpu")
    ranks = {"a": 8, "b": 16, "c": 3, "d": 16, "e": 1, "f": 12}
    manager = toy.make_manager(model, args.backend, SLOTS, ranks, dtype)
    rng = random.Random(0)
    x = {m: torch.zeros(m, model.hidden, dtype=dtype, device=device) for m in BATCHES}
    graphs, outputs = {}, {}
    with torch.inference_mode():
        if device == "cuda":
            graphs, outputs = capture(model, manager, x)
        unequal, base_unequal, worst, moved = 0, 0, 0.0, 0.0
        names = list(ranks)
        for step in range(args.steps):
            if step % RELOAD_EVERY == RELOAD_EVERY - 1:
                names[-1] = reload(manager, model, names[-1], f"loaded{step}", rng.randint(1, max(ranks.values())))
            live = rng.randint(1, BATCHES[-1])
            padded = next(m for m in BATCHES if m >= live)
            active = rng.sample(names, rng.randint(0, SLOTS - 1))
            uids = [rng.choice([*active, None, "nobody"]) for _ in range(live)]
            x[padded].normal_()
            known = {uid for uid in uids if uid != "nobody"}
            manager.fetch_new_loras(known)
            if device == "cuda":
                manager.prepare_lora_batch(toy.decode_batch(uids))
                graphs[padded].replay()
                replayed = outputs[padded].clone()
            manager.prepare_lora_batch(toy.decode_batch(uids + [None] * (padded - live)))
            eager = model(x[padded])
            if device == "cuda" and not torch.equal(replayed[:live], eager[:live]):
                unequal += 1
            if step % args.check_every == 0:
                ids = [None if uid == "nobody" else uid for uid in uids]
                right = toy.expected(model, manager, ids, [1] * live, x[padded][:live])
                base = toy.expected(model, manager, [None] * live, [1] * live, x[padded][:live])
                worst = max(worst, ((eager[:live].double() - right).norm() / right.norm()).item())
                manager.prepare_lora_batch(toy.decode_batch([None] * padded))
                bare = [i for i, uid in enumerate(ids) if uid is None]
                base_unequal += not torch.equal(model(x[padded])[bare], eager[bare])
                if any(ids):
                    moved = max(moved, ((base - right).norm() / right.norm()).item())
        prefill = check_prefill(model, manager, rng, device, dtype)
    # Without the overlay the same steps show what stock makes of them.
    overlay = sys.modules.get("lora_fastpath.registry")
    sites = {name: entry.state.name.lower() for name, entry in overlay.registry.entries.items()} if overlay else {}
    facts = {"steps": args.steps, "graphs": len(graphs), "unequal": unequal, "base_unequal": base_unequal}
    facts |= {"error": worst, "moved": moved}
    from sglang.srt.lora.layers import FusedMoEWithLoRA

    experts = [module for module in model.modules() if isinstance(module, FusedMoEWithLoRA)]
    facts["as_deepseek_reads_them"] = all(hasattr(layer, "moe_runner_config") for layer in experts)
    stock_prepared = manager.lora_fastpath.prepares_stock if sites else True
    print(json.dumps(facts | {"prefill_error": prefill, "stock_prepared": stock_prepared, "sites": sites}))


def reload(manager, model, old: str, new: str, rank: int) -> str:
    """Unload the adapter `old`, load random weights as `new`."""
    from sglang.srt.lora.lora_registry import LoRARef

    result = manager.unload_lora_adapter(LoRARef(lora_id=old, lora_name=old, lora_path=f"__{old}__", pinned=False))
    assert result.success, result.error_message
    toy.load(manager, model, new, rank, seed=int(new.removeprefix("loaded")))
    return new


def capture(model, manager, x: dict[int, torch.Tensor]) -> tuple[dict, dict]:
    """One graph for each batch size, recorded as sglang does: on a stream of its own, no adapter active."""
    from sglang.srt.lora.layers import FusedMoEWithLoRA
    from sglang.srt.model_executor import cuda_graph_runner

    experts = [module for module in model.modules() if isinstance(module, FusedMoEWithLoRA)]
    if experts:
        manager.init_cuda_graph_moe_buffers(max(x), SLOTS, manager.dtype, experts[0])
    manager.init_cuda_graph_batch_info(max_bs_in_cuda_graph=max(x), num_tokens_per_bs=1)
    graphs, outputs, stream = {}, {}, torch.cuda.Stream()
    with cuda_graph_runner.model_capture_mode(), torch.cuda.stream(stream):
        for m in sorted(x, reverse=True):
            manager.prepare_lora_batch(toy.decode_batch([None] * m))
            for _ in range(2):
                model(x[m])
            torch.cuda.synchronize()
            graphs[m] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graphs[m], stream=stream):
                outputs[m] = model(x[m])
    return graphs, outputs


def check_prefill(model, manager, rng: random.Random, device: str, dtype: torch.dtype) -> float:
    """Largest relative error of prefill batches against float64, over and under the two-stream limit."""
    worst = 0.0
    for lengths in ([3], [5, 40, 1], [70, 2, 90]) if device == "cpu" else ([3], [5, 40, 1], [300, 7, 300], [5000, 1]):
        uids = [rng.choice(["a", "b", "c", None]) for _ in lengths[:-1]] + ["a"]
        manager.fetch_new_loras(set(uids))
        manager.prepare_lora_batch(toy.extend_batch(uids, lengths, device))
        x = torch.randn(sum(lengths), model.hidden, device=device).to(dtype)
        right = toy.expected(model, manager, uids, lengths, x)
        worst = max(worst, ((model(x).double() - right).norm() / right.norm()).item())
    return worst


if __name__ == "__main__":
    main()
