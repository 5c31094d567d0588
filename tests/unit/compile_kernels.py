"""Compile the kernels for GPUs that are not here; prints one JSON line. Run by test_compile.py, without the interpreter.

python tests/unit/compile_kernels.py 90
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from lora_fastpath.kernels import (
    expand,
    heads_product,
    moe_activate,
    moe_delta,
    moe_prepare,
    moe_sum,
    shrink,
    sm100_activate,
    sm100_gather,
)

POINTERS = {"tiles": "*i32", "arrivals": "*i32", "topk_ids": "*i32", "row_slots": "*i32", "slot_ranks": "*i32"}
POINTERS |= {"sorted_pairs": "*i32", "block_experts": "*i32", "padded": "*i32", "codes": "*fp8e4nv", "scales": "*fp32", "parts": "*fp32", "weights": "*fp32"}
POINTERS |= {"permuted": "*i32"}
SM100 = {"in_use": "*i32", "gate_up_scales": "*fp32", "global_scale": "*fp32", "code_scales": "*fp32", "gate_up": "*fp8e4nv"}
FP4 = {pointer: "*u8" for pointer in ("codes", "code_scales", "x", "scales", "rows", "row_scales")} | {"gate_up": "*bf16"}
UNSPECIALIZED = (
    "tokens",
    "pairs",
    "experts",
    "top_k",
    "rows_share",
    "block_size",
    "slots",
    "places",
    "scaling",
    "x_row_stride",
    "x_head_stride",
    "y_row_stride",
    "y_head_stride",
)


def kernels():
    """(name, kernel, constants, warps, stages, pointers that are float32)."""
    for rows, columns, warps in ((1, 64, 4), (16, 128, 4), (64, 128, 4)):
        slices = dict(R=16, SLICES=3, END0=4096, END1=4608, END2=5120, END3=5120)
        tile = dict(BLOCK_ROWS=rows, BLOCK_N=columns, BLOCK_R=16, PDL=True)
        yield f"expand {rows}", expand._expand_kernel, slices | tile, warps, 1, ()
    for rows, columns, k in ((1, 16, 256), (16, 16, 256), (64, 64, 128)):
        sizes = dict(K=4096, N=48, SLICES=3, SPLIT_K=8, BLOCK_ROWS=rows, BLOCK_N=columns, BLOCK_K=k)
        yield f"shrink {rows}", shrink._shrink_kernel, sizes, 4, 3, ()
    for rows, k, n, add in ((1, 128, 16, False), (16, 512, 16, False), (16, 16, 512, True), (64, 128, 128, True)):
        sizes = dict(K=k, N=n, ADD=add, BLOCK_ROWS=rows, BLOCK_K=min(128, k), BLOCK_N=max(16, min(128, n)), PDL=True)
        yield f"heads {rows} {k} {n}", heads_product._heads_kernel, sizes, 4, 2, ()
    for rows, warps in ((16, 4), (32, 2), (64, 4)):
        for rank, block_k in ((8, 128), (16, 128), (64, 64), (128, 32)):
            block_r = max(16, rank)
            sizes = dict(R=rank, SLOTS=8, BLOCK_ROWS=rows, BLOCK_K=block_k, BLOCK_R=block_r, ADD=rows == 64)
            sizes["BLOCK_N"] = max(16, min(256, 4096 // rows, 8192 // block_r))
            for slices, k, n in ((2, 2048, 768), (1, 768, 2048)):
                name = f"moe delta {rows} rank {rank} slices {slices}"
                yield name, moe_delta._moe_delta_kernel, sizes | dict(SLICES=slices, K=k, N=n), warps, 4, ()
    for rows in (1, 8):
        sizes = dict(I=768, BLOCK_ROWS=rows, BLOCK_N=moe_activate.BLOCK_N, FAST_MATH=True, PDL=True)
        yield f"moe activate {rows}", moe_activate._moe_activate_kernel, sizes, 4, 1, ()
        sizes |= dict(codes_ptr=None, scales_ptr=None, delta_ptr=None)
        yield f"moe activate {rows} plain", moe_activate._moe_activate_kernel, sizes, 4, 1, ()
    for hidden, experts in ((2048, 128), (4096, 256), (7168, 256)):
        sizes = dict(H=hidden, BINS=2 * experts, BLOCK_H=1 << (hidden - 1).bit_length(), FAST_MATH=True, PDL=True)
        sizes["MOST_PAIRS"] = moe_prepare.MOST_PAIRS
        yield f"moe prepare {hidden} {experts}", moe_prepare._moe_prepare_kernel, sizes, 8, 1, ()
    sizes = dict(H=2048, TOP_K=8, BLOCK_N=moe_sum.BLOCK_N, PDL=True)
    in_place = dict(permuted_ptr=None, weights_ptr=None)
    yield "moe sum", moe_sum._moe_sum_kernel, sizes | in_place, 4, 1, ()
    yield "moe sum permuted", moe_sum._moe_sum_kernel, sizes, 4, 1, ()
    for rows in (1, 8):
        sizes = dict(I=768, SPAN=128, BLOCK_ROWS=rows, BLOCK_N=moe_activate.BLOCK_N, FAST_MATH=True, PDL=True)
        kernel = sm100_activate._sm100_activate_kernel
        yield f"sm100 activate fp8 {rows}", kernel, sizes | dict(global_scale_ptr=None), 4, 1, ()
        fp4 = dict(gate_up_scales_ptr=None, in_use_ptr=None)
        yield f"sm100 activate fp4 {rows}", kernel, sizes | fp4, 4, 1, ()
    sizes = dict(H=7168, TOP_K=8, SPAN=128, BLOCK=sm100_gather.BLOCK, PDL=True)
    yield "sm100 gather", sm100_gather._sm100_gather_kernel, sizes, 4, 1, ()


def pointers(name: str) -> dict[str, str]:
    if not name.startswith("sm100"):
        return POINTERS
    return POINTERS | SM100 | (FP4 if "fp8" not in name else {})


def main(capability: int) -> None:
    found = {}
    for name, kernel, constants, warps, stages, float32 in kernels():
        if capability < 90 and name.startswith("sm100"):
            continue
        if "PDL" in constants:
            constants["PDL"] = capability >= 90
        if capability < 90:  # no FP8 there, and no experts in it
            constants |= {name: None for name in ("codes_ptr", "scales_ptr") if name in kernel.arg_names}
        signature, attributes = {}, {}
        for i, argument in enumerate(kernel.arg_names):
            if argument in constants:
                signature[argument] = "constexpr"
                continue
            pointer = argument.removesuffix("_ptr") if argument.endswith("_ptr") else ""
            kind = "*fp32" if pointer in float32 else pointers(name).get(pointer, "*bf16")
            signature[argument] = kind if pointer else "fp32" if argument == "scaling" else "i32"
            if argument not in UNSPECIALIZED:
                attributes[(i,)] = [["tt.divisibility", 16]]
        source = ASTSource(kernel, signature, constants, attributes)
        options = {"num_warps": warps, "num_stages": stages} | ({"launch_pdl": True} if constants.get("PDL") else {})
        compiled = compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        instructions = re.findall(r"griddepcontrol\.wait|ld\.global", compiled.asm["ptx"])
        wait = instructions.index("griddepcontrol.wait") if "griddepcontrol.wait" in instructions else None
        found[name] = {
            "shared": compiled.metadata.shared,
            "loads_before_wait": wait,
        }
    print(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]))
