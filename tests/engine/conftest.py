"""Engines for the tests of this folder. Each serves once a session, when a test first asks for one of its group."""

from __future__ import annotations

import functools
import importlib.util
import pathlib
import sys

import pytest

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import harness
import reference
import stub_libcuda
import tiny_models
from harness import Run

BACKENDS = ("triton", "csgmv")
SERVED = [
    Run(f"{model}-{backend}", model, model, {"lora_backend": backend})
    for model in ("dense", "moe", "deepseek")
    for backend in BACKENDS
    if (model, backend) != ("deepseek", "triton")  # to save two engine starts
]
FOUR_SLOTS = {"max_loras_per_batch": 4}
EXPERTS = [
    Run("experts-csgmv", "moe", "experts", {"lora_backend": "csgmv"} | FOUR_SLOTS),
    Run("experts-triton", "moe", "few_experts", {"lora_backend": "triton"} | FOUR_SLOTS),
]
VIRTUAL_EXPERTS = {"lora_backend": "triton", "lora_use_virtual_experts": True} | FOUR_SLOTS
VIRTUAL = Run("experts-virtual", "moe", "few_experts", VIRTUAL_EXPERTS)
DEEPSEEK_EXPERTS = Run("deepseek_experts-csgmv", "deepseek", "deepseek_experts", {"lora_backend": "csgmv"} | FOUR_SLOTS)
LOGPROBS_IN_CHUNKS = {"SGLANG_ENABLE_LOGITS_PROCESSER_CHUNK": "1", "SGLANG_LOGITS_PROCESSER_CHUNK_SIZE": "16"}
LM_HEAD = Run("lm_head-triton", "dense", "lm_head", {"lora_backend": "triton"}, LOGPROBS_IN_CHUNKS)
OFF = ("dense-csgmv", "moe-triton", "experts-triton")
FAULTS = ("no_wrapt", "renamed_class", "changed_insides", "shrink_raises", "expand_wrong")
GROUPS = {
    "absent": ("absent", [*SERVED, *EXPERTS]),
    "off": ("off", [run for run in [*SERVED, *EXPERTS] if run.name in OFF]),
    "on": ("on", [*SERVED, *EXPERTS, VIRTUAL, DEEPSEEK_EXPERTS, LM_HEAD]),
    "faults": (
        "on",
        [Run(fault, "dense", "mixed", {"lora_backend": "csgmv"}, {"ENGINE_FAULT": fault}) for fault in FAULTS]
        + [Run("no_cuda", "dense", "mixed", {"lora_backend": "torch_native"}, {"TRITON_INTERPRET": None})],
    ),
}
"""Group: (overlay, runs). One driver process serves a group's runs one after the other."""


def pytest_collection_modifyitems(items):
    here = [item for item in items if HERE in item.path.parents]
    for item in here:
        item.add_marker(pytest.mark.engine)
        if not importlib.util.find_spec("sglang"):
            item.add_marker(pytest.mark.skip(reason="sglang is not installed"))


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> pathlib.Path:
    root = tmp_path_factory.mktemp("models")
    tiny_models.write(root)
    return root


@pytest.fixture(scope="session")
def reference_of(models):
    """reference_of(model name): the float64 model."""
    return functools.cache(lambda name: reference.Model(models / name))


@pytest.fixture(scope="session")
def stub(tmp_path_factory) -> pathlib.Path:
    """A folder with a libcuda.so.1 for LD_LIBRARY_PATH."""
    return stub_libcuda.write(tmp_path_factory.mktemp("stub")).parent


@pytest.fixture(scope="session")
def engine(models, stub, tmp_path_factory, pytestconfig):
    """engine(group, run name): the harness.Result of that run. Starts the group's engines on first use."""
    out = tmp_path_factory.mktemp("engines")
    capture = pytestconfig.pluginmanager.getplugin("capturemanager")

    def say(text: str) -> None:
        with capture.global_and_fixture_disabled():
            print(f"\n{text}", end="", flush=True)

    @functools.cache
    def group(name: str) -> harness.Group:
        overlay, runs = GROUPS[name]
        made = harness.Group(overlay, runs, models, stub, out / name, say)
        made.serve()
        return made

    return lambda name, run: group(name).result(run)
