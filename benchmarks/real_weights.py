"""Do the outputs hold on a GPU? A model with random weights at sane scales, served by stock sglang and with the overlay.

    python benchmarks/real_weights.py --shape qwen3-30b-a3b-fp8 --layers 4

All prompts run in one batch, every fourth without an adapter, the others over three of different ranks (one of them on
attention alone). Two comparisons, printed and written to --results/NAME.json:

    with stock          greedy tokens up to each prompt's first difference, how near the two best tokens were there, and
                        the largest difference of a log-probability before it; stock runs the triton LoRA backend without
                        virtual experts, where it is right
    with and without    prompts without an adapter, in that batch and in one where nobody has any, on the same engine: bits

Exit status 0 if every first difference is a near tie (--tie) and the second comparison finds no difference.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import engine_ab
from engine_pool import EngineProcess, close_all, environment, free_ports
from model_folder import SHAPES, is_moe, linears, write_model

RANKS = {"adapter0": (16, "all"), "adapter1": (8, "all"), "adapter2": (16, "attention")}
EFFECT = 0.5
"""Size of an adapter's delta relative to the base layer's output."""


def write_weights(folder: Path, config: dict) -> None:
    """FOLDER/model.safetensors for a Qwen3-like config: unit-variance outputs, logits of spread 3; FP8 blocks if it says so."""
    import torch
    from safetensors.torch import save_file

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    hidden, head = config["hidden_size"], config["head_dim"]
    dtype = torch.bfloat16 if device == "cuda" else torch.float16

    def random(*shape: int, scale: float) -> torch.Tensor:
        return (torch.randn(shape, device=device) * scale).to(dtype)

    def norm(size: int) -> torch.Tensor:
        return (1 + 0.1 * torch.randn(size, device=device)).to(dtype)

    weights = {
        "model.embed_tokens.weight": random(config["vocab_size"], hidden, scale=1.0),
        "lm_head.weight": random(config["vocab_size"], hidden, scale=3 * hidden**-0.5),
        "model.norm.weight": norm(hidden),
    }
    for name, out, into in linears(config, "all"):
        weight = random(out, into, scale=into**-0.5)
        if "quantization_config" in config:
            weight, weights[f"{name}.weight_scale_inv"] = (part.cpu() for part in fp8_blocks(weight))
        weights[f"{name}.weight"] = weight.cpu()
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        if is_moe(config):
            weights[f"{at}.mlp.gate.weight"] = random(config["num_experts"], hidden, scale=4 * hidden**-0.5)
        for name, size in (
            ("input_layernorm", hidden), ("post_attention_layernorm", hidden),
            ("self_attn.q_norm", head), ("self_attn.k_norm", head),
        ):  # fmt: skip
            weights[f"{at}.{name}.weight"] = norm(size)
    save_file({name: tensor.cpu() for name, tensor in weights.items()}, folder / "model.safetensors")


def fp8_blocks(weight):
    """(float8 codes, float32 scales) of a matrix in blocks of 128 by 128."""
    import torch

    rows, columns = weight.shape
    blocks = torch.nn.functional.pad(weight.float(), (0, -columns % 128, 0, -rows % 128))
    blocks = blocks.unflatten(0, (-1, 128)).unflatten(2, (-1, 128))  # [block rows, 128, block columns, 128]
    scales = blocks.abs().amax((1, 3)).clamp_min(1e-12) / torch.finfo(torch.float8_e4m3fn).max
    codes = (blocks / scales[:, None, :, None]).flatten(2, 3).flatten(0, 1)[:rows, :columns]
    return codes.to(torch.float8_e4m3fn), scales


def write_adapters(root: Path, config: dict) -> dict[str, str]:
    import torch
    from safetensors.torch import save_file

    folders = {}
    for seed, (name, (rank, targets)) in enumerate(RANKS.items()):
        generator = torch.Generator().manual_seed(seed)
        folder = root / name
        folder.mkdir(parents=True, exist_ok=True)
        modules, tensors = linears(config, targets), {}
        for module, out, into in modules:
            at = f"base_model.model.{module}"
            a = torch.randn(rank, into, generator=generator) * into**-0.5
            b = torch.randn(out, rank, generator=generator) * EFFECT / 2 * rank**-0.5  # alpha is twice the rank
            tensors[f"{at}.lora_A.weight"], tensors[f"{at}.lora_B.weight"] = a.bfloat16(), b.bfloat16()
        save_file(tensors, folder / "adapter_model.safetensors")
        peft = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 2 * rank, "bias": "none"}
        peft["target_modules"] = sorted({module.rsplit(".", 1)[1] for module, _, _ in modules})
        (folder / "adapter_config.json").write_text(json.dumps(peft))
        folders[name] = str(folder)
    return folders


def compare(stock: list[dict], ours: list[dict], tie: float) -> dict:
    """Two engines' answers to the same prompts; an answer is {"tokens", "logprobs", "top"}.

    top: the two best tokens of each step as [[log-probability, token], ...]. A first difference is a near tie when both
    engines' tokens are stock's two best and these are at most `tie` apart.
    """
    lengths, differences, margins, far = [], [0.0], [], []
    for prompt, (a, b) in enumerate(zip(stock, ours, strict=True)):
        same = next((i for i, (s, t) in enumerate(zip(a["tokens"], b["tokens"])) if s != t), len(a["tokens"]))
        lengths.append(same)
        differences += [abs(p - q) for p, q in zip(a["logprobs"][:same], b["logprobs"][:same])]
        if same < len(a["tokens"]):
            (first, _), (second, runner_up) = a["top"][same]
            margins.append(first - second)
            if b["tokens"][same] != runner_up or first - second > tie:
                far.append(prompt)
    return {
        "prompts": len(lengths),
        "prompts_equal": sum(n == len(a["tokens"]) for n, a in zip(lengths, stock)),
        "tokens_before_difference": sum(lengths),
        "largest_logprob_difference": max(differences),
        "largest_margin_at_difference": max(margins, default=0.0),
        "differences_that_are_no_tie": far,
    }


def main() -> int:
    ap = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ap.add_argument("--shape", default="qwen3-30b-a3b-fp8", choices=sorted(SHAPES))
    ap.add_argument("--layers", type=int, default=4)
    ap.add_argument("--prompts", type=int, default=64)
    ap.add_argument("--tokens", type=int, default=128)
    ap.add_argument("--input-len", type=int, default=32)
    ap.add_argument("--tie", type=float, default=0.2, help="largest difference of two log-probabilities that is a tie")
    ap.add_argument("--out", type=Path, default=Path("/tmp/lora-fastpath-outputs"))
    ap.add_argument("--results", type=Path, default=Path(__file__).resolve().parent / "results" / "outputs")
    ap.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    args = ap.parse_args()
    names = ["stock_triton", "fast", "fast_triton"]
    like_ab = ["--batches", str(args.prompts), "--steps", str(args.tokens), "--prefill", "", "--device", args.device]
    shared = engine_ab.arguments([*like_ab, "--input-len", str(args.input_len), "--out", str(args.out)])
    folder = args.out / f"{args.shape}-{args.layers}"
    config = write_model(folder / "model", args.shape, args.layers)
    write_weights(folder / "model", config)
    adapters = write_adapters(folder, config)
    shared.shape, shared.engines = args.shape, names
    settings = engine_ab.engine_settings(shared, config, folder / "model") | {"load_format": "auto"}
    extra = engine_ab.cpu_environment(shared.cpu_harness, args.out) if args.device == "cpu" else {}
    lora = [None if i % 4 == 3 else f"adapter{i % 4 % len(RANKS)}" for i in range(args.prompts)]
    fields = {"batch": args.prompts, "input_len": args.input_len, "new_tokens": args.tokens}
    engines, answers, sites = [], {}, {}
    try:
        for name, port in zip(names, free_ports(len(names))):
            own, sites_of = engine_ab.ENGINES[name]
            engine = settings | own | {"nccl_port": port, "enable_lora": True}
            engine |= {"lora_paths": adapters, "max_loras_per_batch": len(adapters) + 1}
            worker = {"engine": engine, "vocabulary": config["vocab_size"]}
            engines.append(EngineProcess(name, worker, environment(sites_of, extra), args.out / f"{name}.log"))
            engines[-1].wait_until_up(600)
            answers[name] = engines[-1].ask("answers", 600, lora=lora, **fields)["answers"]
            if sites_of:
                answers[f"{name} alone"] = engines[-1].ask("answers", 600, lora=[None] * args.prompts, **fields)["answers"]
                sites[name] = engines[-1].ask("state", 60)["sites"]
    finally:
        close_all(engines)
    result = engine_ab.header(shared, sys.argv[1:], "real_weights.py") | {"sites": sites, "with_stock": {}, "without_adapter_unequal": {}}
    base = [i for i, adapter in enumerate(lora) if adapter is None]
    for name in names[1:]:
        result["with_stock"][name] = compare(answers["stock_triton"], answers[name], args.tie)
        unequal = [i for i in base if answers[name][i] != answers[f"{name} alone"][i]]
        result["without_adapter_unequal"][name] = unequal
    moved = compare(answers["fast"], answers["fast alone"], args.tie)
    result["adapters_change"] = moved["prompts"] - moved["prompts_equal"]
    for unused in ("engines", "cells"):
        del result[unused]
    print(json.dumps({key: value for key, value in result.items() if key != "sites"}, indent=1))
    args.results.mkdir(parents=True, exist_ok=True)
    path = args.results / f"{args.shape}-{args.layers}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    bound = all(s["state"] in ("bound", "pending") for found in sites.values() for s in found)
    right = not any(r["differences_that_are_no_tie"] for r in result["with_stock"].values())
    return 0 if bound and right and not any(result["without_adapter_unequal"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
