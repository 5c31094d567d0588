"""What "the same answer" means: against the float64 model, against another engine, bit for bit."""

from __future__ import annotations

import reference

TIE = 1e-2
"""Two best log-probabilities this close may come out in either order in float16."""
LOGPROB = 2e-2
"""Largest error of a log-probability in float16. Seen with stock sglang on these models: 0.007."""
ROUTER_TIE = 5e-3
"""Experts whose router logits lie closer than this may be swapped by float16's rounding."""


def against_float64(answer: dict, model: reference.Model) -> float:
    """Check each generated token against the model's at the same place, given the same tokens before it.

    Returns the largest error of a log-probability, of the prompt's tokens and the generated ones.
    """
    prompt, tokens = answer["prompt"], answer["tokens"]
    expected = model.logprobs([*prompt, *tokens[:-1]], answer["adapter"])
    of_prompt, of_tokens = expected[: len(prompt) - 1], expected[len(prompt) - 1 :]
    for place, (token, row) in enumerate(zip(tokens, of_tokens, strict=True)):
        best, second = row.topk(2).values.tolist()
        right = row[token].item() == best or (best - second < TIE and best - row[token].item() < TIE)
        assert right, (
            f"{who(answer)}: token {place} is {token}, float64 says {row.argmax()} (better by {best - row[token]:.3f})"
        )
    errors = (
        [abs(row[token].item() - got) for row, token, got in zip(of_tokens, tokens, answer["logprobs"], strict=True)]
        + [
            abs(row[token].item() - got)
            for row, token, got in zip(of_prompt, prompt[1:], answer["input_logprobs"], strict=True)
        ]
        + [
            abs(row[token].item() - got)
            for row, step in zip(of_tokens, answer["top"], strict=True)
            for token, got in step
        ]
    )
    assert max(errors) < LOGPROB, f"{who(answer)}: a log-probability is off by {max(errors):.4f}"
    return max(errors)


def against_engine(answer: dict, other: dict) -> None:
    """The same tokens up to the first tie, and log-probabilities within the bound as far as the tokens agree."""
    assert (answer["adapter"], answer["prompt"]) == (other["adapter"], other["prompt"])
    pairs = list(zip(answer["input_logprobs"], other["input_logprobs"], strict=True))
    for mine, theirs, value, its, top in zip(
        answer["tokens"], other["tokens"], answer["logprobs"], other["logprobs"], other["top"], strict=True
    ):
        if mine != theirs:
            assert top[0][1] - top[1][1] < TIE, f"{who(answer)}: token {mine}, the other engine says {theirs}"
            break
        pairs.append((value, its))
    error = max(abs(a - b) for a, b in pairs)
    assert error < LOGPROB, f"{who(answer)}: log-probabilities of the two engines differ by {error:.4f}"


def who(answer: dict) -> str:
    adapter = answer["adapter"] or "no adapter"
    return f"{adapter}, prompt of {len(answer['prompt'])}, {len(answer['tokens'])} tokens"
