"""kernels/launch.py against a kernel that only records; tests/gpu runs the real thing with many shapes of one kernel."""

from __future__ import annotations

import pytest
import torch

from lora_fastpath.kernels import launch as launching


class Kernel:
    """Analysed launches are kernel[grid](...), which answers the compiled variant, launched by compiled[grid](...)."""

    def __init__(self, compiled=None):
        self.calls, self.compiled = [], compiled

    def __getitem__(self, grid):
        def run(*args, **options):
            self.calls.append((grid, args, options))
            return self.compiled

        return run


@pytest.fixture(autouse=True)
def nothing_compiled(monkeypatch):
    monkeypatch.setattr(launching, "_compiled", {})


def test_a_known_variant_skips_the_analysis_and_gets_the_new_arguments():
    compiled = Kernel()
    kernel = Kernel(compiled)
    for rows, tensor in ((3, torch.zeros(4)), (7, torch.ones(4))):
        launching.launch(kernel, ("fp32",), (rows,), (tensor, None), (rows,), (16,), {"num_warps": 4})
    assert len(kernel.calls) == len(compiled.calls) == 1
    grid, args, options = compiled.calls[0]
    assert grid == (7, 1, 1) and args[0].equal(torch.ones(4)) and args[1:] == (None, 7, 16) and options == {}


@pytest.mark.parametrize("other", [{"key": ("fp16",)}, {"constants": (32,)}], ids=str)
def test_another_key_or_constant_is_another_variant(other):
    kernel = Kernel(Kernel())
    first = {"key": ("fp32",), "constants": (16,)}
    for now in (first, first | other):
        launching.launch(kernel, now["key"], (1,), (torch.zeros(4),), (), now["constants"], {})
    assert len(kernel.calls) == 2


def test_an_unaligned_address_is_analysed_every_time():
    compiled = Kernel()
    kernel = Kernel(compiled)
    for tensor in (torch.zeros(8), torch.zeros(8)[1:], torch.zeros(8)[1:]):
        launching.launch(kernel, (), (1,), (torch.zeros(4), tensor), (), (), {})
    assert len(kernel.calls) == 3 and not compiled.calls


def test_the_interpreter_compiles_nothing():
    kernel = Kernel(None)
    for _ in range(2):
        launching.launch(kernel, (), (1,), (torch.zeros(4),), (), (), {})
    assert len(kernel.calls) == 2


def test_integer_helpers():
    assert [launching.cdiv(a, 16) for a in (1, 15, 16, 17, 33)] == [1, 1, 1, 2, 3]
    assert [launching.power_of_2(n) for n in (1, 2, 3, 16, 17)] == [1, 2, 4, 16, 32]
