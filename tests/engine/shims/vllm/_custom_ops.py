"""The names that sglang imports from vllm on a machine without CUDA, in plain torch."""

import numpy
import torch


def rotary_embedding(*args, **kwargs):
    raise NotImplementedError("imported by sglang on the CPU, never called there")


def moe_sum(x: torch.Tensor, out: torch.Tensor) -> None:
    """out[t] = sum over k of x[t, k]."""
    out.copy_(x.sum(1))


def silu_and_mul(out: torch.Tensor, x: torch.Tensor) -> None:
    """out = silu(first half of x's columns) * second half, in float32 and rounded once, as sglang's kernel for CUDA does.

    exp is numpy's, which Triton's interpreter takes too: so a kernel that does the same has the same bits.
    """
    gate, up = x.float().chunk(2, dim=-1)
    out.copy_(gate / (1 + torch.from_numpy(numpy.exp(-gate.numpy()))) * up)
