"""The names that sglang imports from vllm on a machine without CUDA, in plain torch."""

import torch


def rotary_embedding(*args, **kwargs):
    raise NotImplementedError("imported by sglang on the CPU, never called there")


def moe_sum(x: torch.Tensor, out: torch.Tensor) -> None:
    """out[t] = sum over k of x[t, k]."""
    out.copy_(x.sum(1))


def silu_and_mul(out: torch.Tensor, x: torch.Tensor) -> None:
    """out = silu(first half of x's columns) * second half."""
    gate, up = x.chunk(2, dim=-1)
    out.copy_(torch.nn.functional.silu(gate) * up)
