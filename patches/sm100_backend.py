"""Site `sm100-backend`: ServerArgs. --moe-runner-backend experimental_sgl_trtllm, a name for what sglang has under two.

With adapters it is flashinfer_trtllm_routed, where sglang chooses the experts and adapters can follow (site sm100); without
it is flashinfer_trtllm.
"""

from __future__ import annotations

from typing import Any

from lora_fastpath import stock

BACKEND = "experimental_sgl_trtllm"
FIELDS = ("moe_runner_backend", "speculative_moe_runner_backend")


def prepare_server_args(wrapped: Any, _: Any, args: tuple, kwargs: dict) -> Any:
    """The command line allows the name."""
    with stock.also_allowed(BACKEND):
        return wrapped(*args, **kwargs)


def post_init(wrapped: Any, server_args: Any, args: tuple, kwargs: dict) -> None:
    asked = [field for field in FIELDS if getattr(server_args, field) == BACKEND]
    if asked:
        if found := stock.not_blackwell():
            raise ValueError(
                f"--{asked[0].replace('_', '-')} {BACKEND} needs a GPU of compute capability 10.x, this machine has {found}; "
                "choose triton, which sglang serves adapters on there, or auto"
            )
        # sglang turns adapters on later in its own set-up, for --lora-paths alone.
        adapters = server_args.enable_lora or (server_args.enable_lora is None and server_args.lora_paths)
        for field in asked:
            setattr(server_args, field, "flashinfer_trtllm_routed" if adapters else "flashinfer_trtllm")
    wrapped(*args, **kwargs)


WRAPPERS = {"prepare_server_args": prepare_server_args, "ServerArgs.__post_init__": post_init}
