"""Site `row`: RowParallelLinearWithLoRA (o_proj, down_proj).

Under tensor parallelism stock reduces the base output and the shrink's output over the ranks one after the other. The
delta is linear in the shrink, so it joins each rank's partial output here and one all-reduce sums both.
"""

from __future__ import annotations

from typing import Any

import torch

from lora_fastpath import stock
from lora_fastpath.patches import dense


def forward(wrapped: Any, layer: Any, args: tuple, kwargs: dict) -> Any:
    return _forward(wrapped, layer, *args, **kwargs)


def _forward(
    wrapped: Any, layer: Any, input_: torch.Tensor, skip_all_reduce: bool = False, forward_batch: Any = None
) -> Any:
    projection = getattr(layer, "lora_fastpath", None)
    ours = projection is not None and projection.adapter_map.batch is not None
    if not ours or skip_all_reduce or not stock.reduces_output(layer):
        return dense.forward(wrapped, layer, (input_, skip_all_reduce, forward_batch), {})
    # With the reduction skipped sglang adds the delta to the partial output, through apply_lora.
    partial, bias = dense.forward(wrapped, layer, (input_, True, forward_batch), {})
    return stock.all_reduce(partial), bias


WRAPPERS = {
    "RowParallelLinearWithLoRA.forward": forward,
    "RowParallelLinearWithLoRA.apply_lora": dense.apply_lora,
}
