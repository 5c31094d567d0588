"""One thing to break in an engine's processes, by the name in ENGINE_FAULT. Each must leave a serving stock engine."""

from __future__ import annotations

import sys

from import_hooks import after_import, edit_source

LAYERS = "sglang.srt.lora.layers"


def install(name: str) -> None:
    FAULTS[name]()


def no_wrapt() -> None:
    """`import wrapt` answers as if it were not installed."""

    class Missing:
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] == "wrapt":
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    sys.meta_path.insert(0, Missing())


def replace_in_layers(old: str, new: str) -> None:
    """A release of sglang whose LoRA layers are written otherwise, and work."""

    def edit(source: str) -> str:
        if old not in source:
            raise LookupError(f"{LAYERS} has no {old!r}: the fault must be written anew for this release")
        return source.replace(old, new)

    edit_source(LAYERS, edit)


def renamed_class() -> None:
    replace_in_layers("MergedColumnParallelLinearWithLoRA", "MergedLinearWithLoRA")


def changed_insides() -> None:
    """A method with one parameter more in one class, a buffer with another name in another."""
    old = "def forward(self, input_: torch.Tensor, skip_all_reduce=False, forward_batch=None):"
    replace_in_layers(old, old.replace("forward_batch=None", "forward_batch=None, scatter=False"))
    replace_in_layers("A_buffer_qkv", "qkv_A_buffer")


def shrink_raises() -> None:
    @after_import("lora_fastpath.kernels.shrink")
    def replace(module):
        def shrink(*args, **options):
            raise RuntimeError("broken on purpose")

        module.shrink = shrink


def expand_wrong() -> None:
    """Expand adds a delta that is a tenth too large."""

    @after_import("lora_fastpath.kernels.expand")
    def replace(module):
        launch = module.expand

        def expand(h, *args, **options):
            launch(h * 1.1, *args, **options)

        module.expand = expand


FAULTS = {fault.__name__: fault for fault in (no_wrapt, renamed_class, changed_insides, shrink_raises, expand_wrong)}
