"""A real engine's tokens and log-probabilities: overlay absent, off and on, both LoRA backends."""

from __future__ import annotations

import compare
import pytest
import scenarios

RUNS = ["dense-triton", "dense-csgmv", "moe-triton", "moe-csgmv", "deepseek-csgmv", "experts-triton", "experts-csgmv"]
MODELS = {"experts": "moe"}  # kinds of runs that are no model's name
served = pytest.mark.parametrize(
    ("model", "run"), [(MODELS.get(run.partition("-")[0], run.partition("-")[0]), run) for run in RUNS], ids=RUNS
)
STOCK_IS_WRONG = {("stale_experts", "qv")}
"""(part, adapter) whose answers stock gets wrong."""


def untimed(result) -> dict[str, list[dict]]:
    return {name: answers for name, answers in result.parts.items() if name not in scenarios.TIMED}


@served
@pytest.mark.parametrize("overlay", ["absent", "on"])
def test_float64_arithmetic(engine, reference_of, overlay, model, run):
    """Absent: our model and sglang agree on what LoRA is, so the harness can be believed. On: the overlay's promise."""
    expected = reference_of(model)
    for part, answers in engine(overlay, run).parts.items():
        for answer in answers:
            if overlay == "on" or (part, answer["adapter"]) not in STOCK_IS_WRONG:
                compare.against_float64(answer, expected)
    assert expected.router_gap > compare.ROUTER_TIE, "choose another seed in tiny_models.py: two experts nearly tie"


@pytest.mark.parametrize("run", ["dense-csgmv", "moe-triton", "experts-triton"])
def test_off_is_stock_bit_for_bit(engine, run):
    assert untimed(engine("off", run)) == untimed(engine("absent", run))


@served
def test_on_is_stock_within_float16(engine, model, run):
    stock = untimed(engine("absent", run))
    for name, answers in untimed(engine("on", run)).items():
        for answer, other in zip(answers, stock[name], strict=True):
            if (name, answer["adapter"]) not in STOCK_IS_WRONG:
                compare.against_engine(answer, other)


@served
def test_requests_without_adapter_keep_their_bits(engine, model, run):
    """In the very batches in which others have adapters, prompts longer than the gate included."""

    def base(overlay):
        parts = untimed(engine(overlay, run))
        return {name: [a for a in answers if a["adapter"] is None] for name, answers in parts.items()}

    assert base("on") == base("absent")
    assert any(base("on").values())


def test_virtual_experts(engine, reference_of):
    """Stock computes up's delta with gate's A there, so nothing but float64 is a reference."""
    for answer in engine("on", "experts-virtual").parts["experts"]:
        compare.against_float64(answer, reference_of("moe"))


def test_deepseeks_experts(engine, reference_of):
    """A dense layer, then experts with a shared one. Stock's prefill dies there, so nothing but float64 is a reference."""
    expected = reference_of("deepseek")
    for answers in engine("on", "deepseek_experts-csgmv").parts.values():
        for answer in answers:
            compare.against_float64(answer, expected)
    assert expected.router_gap > compare.ROUTER_TIE, "choose another seed in tiny_models.py: two experts nearly tie"


def test_stock_leaves_stale_expert_weights(engine, reference_of):
    """The fault that fix-stale-experts is for; when a release no longer has it, the fix can go."""
    (wrong,) = [a for a in engine("absent", "experts-csgmv").parts["stale_experts"] if a["adapter"] == "qv"]
    with pytest.raises(AssertionError):
        compare.against_float64(wrong, reference_of("moe"))


def test_adapter_on_lm_head_with_prompt_logprobs_in_chunks(engine, reference_of):
    """Stock 0.5.12.post1 fails on this request (an append to None); the site fix-lm-head-logprobs mends it."""
    for answer in engine("on", "lm_head-triton").parts["lm_head"]:
        compare.against_float64(answer, reference_of("dense"))


@pytest.mark.parametrize("model", ["dense", "moe", "deepseek"])
def test_adapters_matter(reference_of, model):
    """Each adapter moves log-probabilities by far more than the tests' bounds, so that a missing one cannot pass."""
    expected = reference_of(model)
    prompt = scenarios.prompt(1, 6)
    base = expected.logprobs(prompt, None)
    for name in (folder.name for folder in expected.folder.iterdir() if folder.name != "base"):
        assert (expected.logprobs(prompt, name) - base).abs().max() > 20 * compare.LOGPROB, name
