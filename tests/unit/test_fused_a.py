"""When the fused a-projection is taken, and when sglang's own way is (tests/toy/mla_prefix.py has the results)."""

from __future__ import annotations

import types

import pytest
import torch

from lora_fastpath import stock
from lora_fastpath.gate import Path
from lora_fastpath.patches import fused_a

BASE = types.SimpleNamespace(path=Path.BASE, rows=4)


def attention(batch: object, wrapped: bool = True, broken: bool = False, fused: bool = True) -> types.SimpleNamespace:
    layer = types.SimpleNamespace(apply_lora=lambda y, x: y)
    if wrapped:
        layer.lora_fastpath = types.SimpleNamespace(broken=broken, adapter_map=types.SimpleNamespace(batch=batch))
    return types.SimpleNamespace(fused_qkv_a_proj_with_mqa=layer, use_min_latency_fused_a_gemm=fused)


@pytest.fixture
def fused_gemm(monkeypatch):
    monkeypatch.setattr(stock, "fused_a_gemm", lambda layer, x: "fused")


def project(of: types.SimpleNamespace, x: object) -> str:
    return fused_a.prepare_qkv_latent(lambda *args, **kwargs: "stock", of, (x,), {"forward_batch": None})


@pytest.mark.parametrize("rows", [1, 16])
def test_few_rows_are_fused(fused_gemm, rows):
    assert project(attention(BASE), torch.zeros(rows, 8)) == "fused"


@pytest.mark.parametrize("x", [torch.zeros(17, 8), torch.zeros(0, 8), (torch.zeros(4, 8), torch.ones(4, 1))], ids=type)
def test_rows_that_the_gemm_does_not_take_are_stocks(fused_gemm, x):
    assert project(attention(BASE), x) == "stock"


@pytest.mark.parametrize(
    "of",
    [attention(BASE, wrapped=False), attention(None), attention(BASE, broken=True), attention(BASE, fused=False)],
    ids=["not wrapped", "before the first batch", "broken", "no such GEMM"],
)
def test_layers_that_are_not_served_are_stocks(fused_gemm, of):
    assert project(of, torch.zeros(4, 8)) == "stock"
