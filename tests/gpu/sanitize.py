"""Each kernel once at small and odd shapes: what compute-sanitizer is pointed at.

compute-sanitizer --tool memcheck python tests/gpu/sanitize.py
"""

from __future__ import annotations

import itertools
import sys
import types
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from lora_fastpath import moe_selfcheck, selfcheck
from lora_fastpath.kernels.moe_activate import moe_activate
from lora_fastpath.kernels.moe_prepare import moe_prepare
from lora_fastpath.patches import dense, moe
from lora_fastpath.streams import Lanes

LANES = Lanes(torch.device("cuda"))
for launch in dense.LAUNCHES:
    for k, ends, ranks, rank in ((1024, (96,), (8, 3, 0), 8), (1100, (100, 132, 164), (128, 1, 16), 128)):
        rows = max(launch.tile_rows) + 3
        case = selfcheck.make_case(rows, k, ends, ranks, rank, torch.bfloat16, "cuda")
        projection = dense.Projection("qkv", types.SimpleNamespace(lanes=LANES), case.a, case.b, ends, pdl=True)
        tables = {size: case.tiles(size) for size in launch.tile_rows}
        for two_streams in (False, True):
            y = case.y.clone()
            lane = LANES.current()
            if two_streams:
                lane.fork(dense.scratch_for(projection, launch, rows))
            dense.add_delta(projection, launch, tables, lane, case.x, y)
            lane.scratch = ()
            torch.cuda.synchronize()
            miss = selfcheck.compare(y, case)
            print(f"up to {launch.rows} rows, K {k}, ends {ends}, two streams {two_streams}: {miss or 'ok'}")
            assert not miss

for hidden, intermediate, ranks in ((256, 128, (8, 3, 0)), (200, 96, (128, 1, 16))):
    case = moe_selfcheck.make_case(
        21, 3, 5, ranks, max(ranks), hidden, intermediate, torch.bfloat16, "cuda", away_every=5, fused_shared=True
    )
    buffers = (case.gate_up_a, case.gate_up_b, case.down_a, case.down_b)
    experts = moe.Experts("moe", None, *buffers, None, fast_math=True, pdl=True)
    for rows, add in itertools.product(moe.BLOCK_ROWS, (False, True)):
        miss = moe.check_kernels(experts, case, rows, add)
        torch.cuda.synchronize()
        print(f"experts, H {hidden}, I {intermediate}, {rows} rows a block, add {add}: {miss or 'ok'}")
        assert not miss

for tokens, top_k, experts, hidden in ((1, 1, 3, 128), (7, 3, 5, 384), (32, 8, 128, 640)):
    case = moe_selfcheck.make_case(tokens, top_k, experts, (4,), 4, hidden, 128, torch.bfloat16, "cuda")
    places = tokens * top_k + (experts + 1) * 15
    tables = [case.topk_ids.new_empty(size) for size in (places, -(-places // 16), 1)]
    codes = torch.empty_like(case.x, dtype=torch.float8_e4m3fn), torch.empty(tokens, hidden // 128, device="cuda")
    moe_prepare(case.x, case.topk_ids, experts, *tables, 16, *codes, fast_math=True, pdl=True)
    out = case.activated.clone()
    codes = torch.empty_like(out, dtype=torch.float8_e4m3fn), torch.empty(len(out), 1, device="cuda")
    moe_activate(case.gate_up, None, case.routing(16), out, *codes, fast_math=True, pdl=True)
    torch.cuda.synchronize()
    print(f"preparation of {tokens} tokens with {top_k} of {experts} experts, H {hidden}: ran")
