"""Whether the overlay was at work inside the engine: on it must be, absent and off not a trace of it."""

from __future__ import annotations

import pytest

DENSE_RUNS = ["dense-triton", "dense-csgmv"]
ALL_RUNS = [*DENSE_RUNS, "moe-triton", "moe-csgmv", "deepseek-csgmv"]
LOOKED_AT = ("sglang.srt.lora.", "sglang.srt.models.deepseek")
"""Where shims/overlay_report.py looks for replaced functions."""
EXPERT_RUNS = ["experts-triton", "experts-csgmv", "experts-virtual"]


@pytest.mark.parametrize(
    ("overlay", "run"), [("absent", "dense-csgmv"), ("off", "dense-csgmv"), ("off", "experts-triton")]
)
def test_no_trace_without_the_switch(engine, overlay, run):
    result = engine(overlay, run)
    for report in result.reports.values():
        assert report == {"modules": [], "sites": {}, "launches": {}, "foreign": []}
    assert result.overlay_lines == []


@pytest.mark.parametrize("run", [*ALL_RUNS, *EXPERT_RUNS])
def test_every_site_is_bound(engine, run):
    result = engine("on", run)
    for report in result.reports.values():
        assert {"adapters", "qkv", "merged", "column", "row", "replicated", "moe"} <= set(report["sites"])
        assert {state for state, _ in report["sites"].values()} == {"BOUND"}
    assert result.overlay_lines == []


@pytest.mark.parametrize("run", ALL_RUNS)
def test_only_the_sites_targets_are_replaced(engine, run):
    from lora_fastpath.sites import SITES

    report = engine("on", run).reports["mixed"]
    looked_at = [site for site in SITES if site.name in report["sites"] and site.module.startswith(LOOKED_AT)]
    targets = [target for site in looked_at for target in site.targets]
    assert sorted(report["foreign"]) == sorted(targets)


@pytest.mark.parametrize("run", ALL_RUNS)
def test_decode_takes_the_fast_kernels(engine, run):
    """mixed: four requests decode together, through layers of one slice (o, down), two (gate_up) and three (qkv)."""
    launches = engine("on", run).launches("mixed")
    decode = {(kernel, slices) for kernel, slices, rows in launches if rows == 4}
    slices = {"dense": {1, 2, 3}, "moe": {1, 3}, "deepseek": {1, 2}}[run.partition("-")[0]]
    absorbed = {("heads_product", 1)} if run.startswith("deepseek") else set()
    assert decode == {(kernel, n) for kernel in ("shrink", "expand") for n in slices} | absorbed


@pytest.mark.parametrize("run", EXPERT_RUNS)
def test_adapted_experts_take_the_fast_kernels(engine, run):
    """experts: four requests decode together, two experts a token, through qkv and o around the experts."""
    decode = {(kernel, slices) for kernel, slices, rows in engine("on", run).launches("experts") if rows in (4, 8)}
    dense = {(kernel, slices) for kernel in ("shrink", "expand") for slices in (1, 3)}
    assert decode == dense | {("moe_delta", 2), ("moe_activate", 2), ("moe_delta", 1)}


@pytest.mark.parametrize("run", [*ALL_RUNS, "experts-csgmv"])
def test_no_kernel_without_an_adapter_in_the_batch(engine, run):
    assert engine("on", run).launches("base_only") == set()


@pytest.mark.parametrize("run", DENSE_RUNS)
def test_adapter_loaded_while_serving_takes_the_fast_kernels(engine, run):
    assert any(rows <= 4 for _, _, rows in engine("on", run).launches("reload"))
