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

from lora_fastpath.kernels import expand, heads_product, moe_activate, moe_expand, moe_route, moe_shrink, shrink

POINTERS = {"tiles": "*i32", "arrivals": "*i32", "counts": "*i32", "topk_ids": "*i32", "row_slots": "*i32"}
POINTERS |= {"slot_ranks": "*i32", "parts": "*fp32", "weights": "*fp32"}
UNSPECIALIZED = (
    "tokens",
    "pairs",
    "tile_programs",
    "experts",
    "top_k",
    "rows_share",
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
    for rows in (16, 64):
        for rank in (8, 16, 64, 128):
            block_r = max(16, rank)
            at, h = f"{rows} rank {rank}", ("h",)
            sizes = dict(K=2048, N=2 * rank, R=rank, SPLIT_K=2, BLOCK_ROWS=rows, BLOCK_N=32)
            sizes["BLOCK_K"] = 256 if rows == 16 else 64
            yield f"moe shrink {at}", moe_shrink._moe_shrink_kernel, sizes, 4, 3, h
            sizes = dict(I=768, R=rank, SPLIT_K=2, BLOCK_ROWS=rows, BLOCK_R=block_r, FAST_MATH=True, PDL=True)
            sizes["BLOCK_N"] = max(16, min(128, 4096 // max(block_r, rows)))
            yield f"moe activate {at}", moe_activate._moe_activate_kernel, sizes, 4, 1, h
            sizes = dict(H=2048, R=rank, SPLIT_K=2, BLOCK_ROWS=rows, BLOCK_R=block_r, PDL=True)
            sizes["BLOCK_N"] = max(16, min(128, 8192 // max(block_r, rows)))
            yield f"moe expand {at}", moe_expand._moe_expand_kernel, sizes, 4, 1, h
    for bins, chunk, warps in ((256, 16, 4), (1024, 2048, 32), (8192, 2048, 32)):
        sizes = dict(BINS=bins, BLOCK_ROWS=16, CHUNK=chunk)
        yield f"moe route {bins}", moe_route._moe_route_kernel, sizes, warps, 3, ()


def main(capability: int) -> None:
    found = {}
    for name, kernel, constants, warps, stages, float32 in kernels():
        if "PDL" in constants:
            constants["PDL"] = capability >= 90
        signature, attributes = {}, {}
        for i, argument in enumerate(kernel.arg_names):
            if argument in constants:
                signature[argument] = "constexpr"
                continue
            pointer = argument.removesuffix("_ptr") if argument.endswith("_ptr") else ""
            kind = "*fp32" if pointer in float32 else POINTERS.get(pointer, "*bf16")
            signature[argument] = kind if pointer else "i32"
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
