"""Things that break the overlay. Each leaves an engine that serves as stock does, and one clear line a site."""

from __future__ import annotations

import compare
import pytest


def serves_like_stock(broken, stock, bits: bool) -> None:
    for answer, other in zip(broken.parts["mixed"], stock.parts["mixed"], strict=True):
        if bits or answer["adapter"] is None:
            assert answer == other
        compare.against_engine(answer, other)


def out_of_service(result) -> dict[str, str]:
    """{site: reason} of the sites that are not bound at the end."""
    sites = result.reports["mixed"]["sites"]
    return {name: reason for name, (state, reason) in sites.items() if state != "BOUND"}


def line_of(result, site: str) -> str:
    """The one line that says why a site left service."""
    lines = [line for line in result.overlay_lines if line.startswith(f"lora-fastpath: site {site} ")]
    assert len(lines) == 1, result.overlay_lines
    return lines[0]


def slices(result) -> set[int]:
    """Slices of the layers whose requests went through our kernels: 3 qkv, 2 gate_up, 1 o and down."""
    return {n for _, n, _ in result.launches("mixed")}


def test_wrapt_missing(engine):
    result = engine("faults", "no_wrapt")
    serves_like_stock(result, engine("absent", "dense-csgmv"), bits=True)
    assert result.reports["mixed"]["foreign"] == []
    assert len(result.overlay_lines) == 1
    assert "wrapt" in result.overlay_lines[0] and "pip install" in result.overlay_lines[0]


def test_sglang_renamed_a_class(engine):
    """The site leaves, the others stay fast, and the renamed layers still get what sglang's kernels need."""
    result = engine("faults", "renamed_class")
    assert set(out_of_service(result)) == {"merged"}
    assert "MergedColumnParallelLinearWithLoRA" in line_of(result, "merged")
    assert slices(result) == {1, 3}
    serves_like_stock(result, engine("absent", "dense-csgmv"), bits=False)


def test_sglang_changed_a_signature_and_a_buffer(engine):
    """A signature is seen at import; a buffer when the site looks for it, at self-check."""
    result = engine("faults", "changed_insides")
    assert set(out_of_service(result)) == {"row", "qkv"}
    assert "RowParallelLinearWithLoRA.forward" in line_of(result, "row") and "scatter" in line_of(result, "row")
    assert "A_buffer" in line_of(result, "qkv")
    assert slices(result) == {2}
    serves_like_stock(result, engine("absent", "dense-csgmv"), bits=False)


@pytest.mark.parametrize(
    ("fault", "reason"), [("shrink_raises", "broken on purpose"), ("expand_wrong", "largest relative error")]
)
def test_kernel_fails_its_self_check(engine, fault, reason):
    """Every site that has layers in this model leaves, before the first request."""
    result = engine("faults", fault)
    serves_like_stock(result, engine("absent", "dense-csgmv"), bits=True)
    assert {"qkv", "merged", "row"} <= set(out_of_service(result))
    for site in ("qkv", "merged", "row"):
        assert reason in line_of(result, site)


def test_no_cuda(engine, reference_of):
    """Without CUDA and without Triton's interpreter nothing of ours can run: one line, and stock serves.

    The engine that serves there is sglang's with its torch_native LoRA backend; no other run has it to compare with.
    """
    result = engine("faults", "no_cuda")
    for answer in result.parts["mixed"]:
        compare.against_float64(answer, reference_of("dense"))
    # A fix needs no kernel, so it stays.
    fixes = {"FusedMoEWithLoRA.__init__", "LoRAMemoryPool.load_lora_weight_to_buffer"}
    assert set(result.reports["mixed"]["foreign"]) == fixes
    assert result.launches("start") | result.launches("mixed") == set()
    assert {"adapters", "qkv", "merged", "column", "row", "replicated"} <= set(out_of_service(result))
    assert len(result.overlay_lines) == 1 and "no CUDA" in line_of(result, "adapters")
