"""What the engines are asked, in parts. Each part is a function of a running engine and gives a list of answers.

An answer is {"adapter": folder name of the weights that must apply, or None, "prompt", "tokens": generated,
"logprobs": of each generated token, "top": [[token, logprob] best first] of each, "input_logprobs": of prompt[1:]}.

All requests of one `ask` reach the scheduler in one message, so the batches that it forms are the same in every run:
that is what lets runs be compared bit for bit. Only `while_serving` depends on timing.
"""

from __future__ import annotations

import asyncio
import dataclasses
import pathlib
import random
from collections.abc import Callable

Answer = dict
Request = tuple[str | None, int, int]  # adapter, prompt length, tokens to generate
TOP = 3


@dataclasses.dataclass(frozen=True)
class Scenario:
    adapters: tuple[str, ...]  # loaded at start
    modules: tuple[str, ...]  # what may be adapted
    parts: tuple[Callable[..., list[Answer]], ...]


def prompt(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(3, 256), k=length)


def arguments(max_new_tokens: int) -> dict:
    return {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": True}


def answer(weights: str | None, tokens: list[int], output: dict) -> Answer:
    meta = output["meta_info"]
    return {
        "adapter": weights,
        "prompt": tokens,
        "tokens": [token for _, token, _ in meta["output_token_logprobs"]],
        "logprobs": [value for value, _, _ in meta["output_token_logprobs"]],
        "top": [[[token, value] for value, token, _ in step] for step in meta["output_top_logprobs"]],
        "input_logprobs": [value for value, _, _ in meta["input_token_logprobs"]][1:],
    }


def ask(engine, seed: int, requests: list[Request], weights: dict[str, str] | None = None) -> list[Answer]:
    """Send the requests together. `weights`: the weights' folder of adapters that are served under another name."""
    prompts = [prompt(seed + i, length) for i, (_, length, _) in enumerate(requests)]
    outputs = engine.generate(
        input_ids=prompts,
        lora_path=[adapter for adapter, _, _ in requests],
        sampling_params=[arguments(new) for _, _, new in requests],
        return_logprob=True,
        logprob_start_len=0,
        top_logprobs_num=TOP,
    )
    names = [(weights or {}).get(adapter, adapter) for adapter, _, _ in requests]
    return [answer(name, tokens, output) for name, tokens, output in zip(names, prompts, outputs, strict=True)]


def mixed(engine, model: pathlib.Path) -> list[Answer]:
    """Two adapters and no adapter in one batch."""
    return ask(engine, 10, [("a", 4, 4), (None, 3, 4), ("b", 5, 4), (None, 2, 4)])


def alone(engine, model: pathlib.Path) -> list[Answer]:
    return ask(engine, 20, [("a", 3, 2)])


def base_only(engine, model: pathlib.Path) -> list[Answer]:
    """No request has an adapter: nothing of LoRA needs to run."""
    return ask(engine, 30, [(None, 4, 3), (None, 2, 3)])


def long(engine, model: pathlib.Path) -> list[Answer]:
    """Prompts longer than the gate (16 rows in the tests), and one longer than a prefill chunk (72 rows)."""
    return ask(engine, 40, [("a", 80, 2), (None, 20, 2), ("b", 19, 2)])


def queue(engine, model: pathlib.Path) -> list[Answer]:
    """More requests than run at once, more adapters than slots: they join as others leave, slots change hands."""
    return ask(
        engine,
        50,
        [
            ("a", 4, 5),
            (None, 3, 1),
            ("b", 2, 3),
            ("c", 5, 3),
            ("partial", 3, 2),
            ("qv", 4, 2),
            ("a", 2, 2),
            (None, 2, 3),
        ],
    )


def queue_moe(engine, model: pathlib.Path) -> list[Answer]:
    return ask(engine, 50, [("a", 4, 4), (None, 3, 1), ("b", 2, 2), ("qv", 5, 2), ("a", 3, 2), (None, 2, 2)])


def reload(engine, model: pathlib.Path) -> list[Answer]:
    """A new adapter, then other weights of another rank under its name; its slot is free for the next one."""
    loaded = engine.load_lora_adapter("new", str(model / "late"))
    assert loaded.success, loaded
    answers = ask(engine, 70, [("new", 4, 2), (None, 3, 2), ("a", 3, 2)], {"new": "late"})
    assert engine.unload_lora_adapter("new").success
    assert engine.load_lora_adapter("new", str(model / "later")).success
    return answers + ask(engine, 80, [("new", 4, 2), ("a", 3, 2)], {"new": "later"})


def while_serving(engine, model: pathlib.Path) -> list[Answer]:
    """Requests arrive one by one, an adapter is loaded and another unloaded, all while others decode."""

    async def one(adapter: str | None, weights: str | None, seed: int, length: int, new: int) -> Answer:
        tokens = prompt(seed, length)
        output = await engine.async_generate(
            input_ids=tokens,
            lora_path=adapter,
            sampling_params=arguments(new),
            return_logprob=True,
            logprob_start_len=0,
            top_logprobs_num=TOP,
        )
        return answer(weights, tokens, output)

    async def session() -> list[Answer]:
        first = asyncio.create_task(one("a", "a", 90, 4, 8))
        base = asyncio.create_task(one(None, None, 91, 3, 7))
        await asyncio.sleep(0.2)
        loaded = await engine.async_load_lora_adapter("fresh", str(model / "late"))
        assert loaded.success, loaded
        second = asyncio.create_task(one("fresh", "late", 92, 5, 3))
        await asyncio.sleep(0.2)
        third = asyncio.create_task(one("b", "b", 93, 2, 3))
        answers = [await task for task in (first, base, second, third)]
        assert (await engine.async_unload_lora_adapter("fresh")).success
        return answers

    return engine.loop.run_until_complete(session())


def experts(engine, model: pathlib.Path) -> list[Answer]:
    """Two adapters on experts, one on other layers alone and no adapter: four requests decode in one batch."""
    return ask(engine, 95, [("experts", 4, 3), (None, 3, 3), ("experts2", 5, 3), ("a", 2, 3)])


def long_experts(engine, model: pathlib.Path) -> list[Answer]:
    """Prompts longer than the gate, of which several are one batch, and one longer than a prefill chunk."""
    return ask(engine, 105, [("experts2", 80, 2), (None, 20, 2), ("only_experts", 19, 2)])


def long_deepseek_experts(engine, model: pathlib.Path) -> list[Answer]:
    """Prompts longer than the gate. None is longer than a prefill chunk: on the CPU that attention has no cached prefix."""
    return ask(engine, 115, [("experts", 20, 2), (None, 18, 2), ("only_experts", 17, 2)])


def queue_experts(engine, model: pathlib.Path) -> list[Answer]:
    """More requests than run at once, more adapters than slots."""
    return ask(
        engine,
        110,
        [("experts", 4, 3), (None, 3, 1), ("only_experts", 2, 2), ("experts2", 5, 2), ("experts", 3, 2), (None, 2, 2)],
    )


def stale_experts(engine, model: pathlib.Path) -> list[Answer]:
    """An adapter on the attention alone gets the slot of one on the experts, the only slot that is empty."""
    before = ask(engine, 120, [("experts", 3, 1)])
    assert engine.unload_lora_adapter("experts").success
    return before + ask(engine, 125, [("qv", 4, 2), (None, 3, 2)])


ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLA = ("q_a_proj", "kv_a_proj_with_mqa", "q_b_proj", "kv_b_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")


def kv_b(engine, model: pathlib.Path) -> list[Answer]:
    """An adapter on kv_b_proj alone: prefill and decode absorb that layer into their attention."""
    return ask(engine, 60, [("kv_b", 20, 3), (None, 3, 3), ("a", 3, 3)])


def lm_head(engine, model: pathlib.Path) -> list[Answer]:
    """An adapter on lm_head, prompt log-probabilities in several chunks (16 rows in the tests)."""
    return ask(engine, 85, [("head", 40, 2), (None, 20, 2), ("a", 3, 2)])


DENSE = Scenario(
    ("a", "b", "c", "partial", "qv"),
    (*ATTENTION, *MLP),
    (mixed, alone, base_only, long, queue, reload, while_serving),
)
EXPERTS = ("experts", "experts2", "only_experts", "a", "qv")
SCENARIOS = {
    "dense": DENSE,
    "mixed": dataclasses.replace(DENSE, parts=(mixed,)),
    "moe": Scenario(("a", "b", "qv"), ATTENTION, (mixed, base_only, long, queue_moe)),
    # Not down_proj: with all of an MLP sglang wraps the experts too, and then its prefill dies of fix-deepseek-experts' fault.
    "deepseek": Scenario(("a", "b", "kv_b"), (*MLA, "gate_proj", "up_proj"), (mixed, base_only, kv_b)),
    "deepseek_experts": Scenario(
        ("experts", "experts2", "only_experts", "a"), (*MLA, *MLP), (experts, base_only, long_deepseek_experts)
    ),
    "lm_head": Scenario(("head", "a"), (*ATTENTION, *MLP, "lm_head"), (lm_head,)),
    "experts": Scenario(EXPERTS, (*ATTENTION, *MLP), (experts, base_only, long_experts, queue_experts, stale_experts)),
    "few_experts": Scenario(EXPERTS, (*ATTENTION, *MLP), (experts,)),
}
TIMED = {while_serving.__name__}
"""Parts whose batches depend on timing, and so the last bits of their results."""
