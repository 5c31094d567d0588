"""When the wrappers of experts and of absorbed attention take the fast path, and what they do when they cannot."""

from __future__ import annotations

import os
import types
import weakref

import numpy as np
import pytest
import torch

from lora_fastpath import moe_selfcheck, stock
from lora_fastpath.gate import Path
from lora_fastpath.kernels import tiles as tiling
from lora_fastpath.patches import dense, mla, moe
from lora_fastpath.streams import Lanes

interpreted = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="TRITON_INTERPRET=1 is not set")


class Map:
    """An AdapterMap as far as the wrappers see it."""

    def __init__(self, batch: object) -> None:
        self.batch, self.lanes, self.fallen_back = batch, Lanes(torch.device("cpu")), []

    def fall_back(self, reason: str, say: bool = False) -> None:
        self.fallen_back.append((reason, say))


@pytest.fixture
def declined(monkeypatch) -> list[tuple[str, str]]:
    found = []
    for module in (moe, mla):
        fake = types.SimpleNamespace(decline=lambda site, reason, failed=False: found.append((site, reason)))
        monkeypatch.setattr(module, "registry", fake)
    return found


def case_of(tokens: int) -> moe_selfcheck.MoeCase:
    return moe_selfcheck.make_case(tokens, 2, 3, (4, 2), 4, 32, 16, torch.float16, "cpu")


def expert_layer(path: Path | None, rows: int, case: moe_selfcheck.MoeCase, monkeypatch) -> types.SimpleNamespace:
    batch = path and types.SimpleNamespace(path=path, rows=rows, row_slots=case.row_slots, slot_ranks=case.slot_ranks)
    without_lora = types.SimpleNamespace(run=lambda dispatched, quant: types.SimpleNamespace(hidden_states="base"))
    buffers = (case.gate_up_a, case.gate_up_b, case.down_a, case.down_b)
    experts = moe.Experts("moe", Map(batch), *buffers, without_lora, fast_math=False, pdl=False)
    monkeypatch.setattr(stock, "is_standard_topk", lambda topk: topk.standard)
    monkeypatch.setattr(stock, "combine", lambda layer, out: out)
    dispatcher = types.SimpleNamespace(
        dispatch=lambda hidden_states, topk_output: types.SimpleNamespace(
            hidden_states=hidden_states, topk_output=topk_output
        )
    )
    base_layer = types.SimpleNamespace(dispatcher=dispatcher)
    return types.SimpleNamespace(lora_fastpath=experts, base_layer=base_layer, _quant_info=None)


def topk_of(case: moe_selfcheck.MoeCase, standard: bool = True) -> types.SimpleNamespace:
    return types.SimpleNamespace(topk_ids=case.topk_ids, topk_weights=case.weights, standard=standard)


def ask(layer, case, topk) -> object:
    return moe.forward(lambda hidden, topk: "stock", layer, (case.x, topk), {})


def test_experts_before_the_first_batch_are_stocks(monkeypatch):
    case = case_of(5)
    assert ask(expert_layer(None, 5, case, monkeypatch), case, topk_of(case)) == "stock"


def test_experts_of_a_batch_without_adapters_run_sglangs_own_sequence(monkeypatch):
    case = case_of(5)
    layer = expert_layer(Path.BASE, 5, case, monkeypatch)
    assert ask(layer, case, topk_of(case)) == "base" and not layer.lora_fastpath.adapter_map.fallen_back


@pytest.mark.parametrize(("rows", "standard"), [(4, True), (5, False)])
def test_experts_of_rows_that_were_not_mapped_are_stocks(monkeypatch, declined, rows, standard):
    case = case_of(5)
    layer = expert_layer(Path.ONE_STREAM, rows, case, monkeypatch)
    assert ask(layer, case, topk_of(case, standard)) == "stock"
    assert layer.lora_fastpath.adapter_map.fallen_back[0][1] and not declined


def test_experts_that_a_launch_cannot_take_leave_with_the_reason(monkeypatch, declined):
    case = case_of(5)
    case.x = case.x.float()
    layer = expert_layer(Path.TWO_STREAMS, 5, case, monkeypatch)
    assert ask(layer, case, topk_of(case)) == "stock"
    (site, reason) = declined[0]
    assert site == "moe" and "input: torch.float32" in reason and "expected contiguous torch.float16" in reason
    assert layer.lora_fastpath.adapter_map.fallen_back


def test_stock_does_not_find_our_buffers_in_its_way(monkeypatch, declined):
    """What a failed run has allocated is gone when sglang serves the layer: it may have failed for want of memory."""
    case, held = case_of(5), []

    def run(*_):
        held.append(weakref.ref(buffer := torch.empty(4)))
        raise RuntimeError(f"made to fail beside {buffer.shape}")

    monkeypatch.setattr(moe, "run", run)
    layer = expert_layer(Path.ONE_STREAM, 5, case, monkeypatch)
    assert moe.forward(lambda *_: held[0]() is None, layer, (case.x, topk_of(case)), {}) is True


def test_no_rows_are_no_work(monkeypatch):
    case = case_of(5)
    case.x, case.topk_ids, case.weights = case.x[:0], case.topk_ids[:0], case.weights[:0]
    assert ask(expert_layer(Path.ONE_STREAM, 0, case, monkeypatch), case, topk_of(case)).shape == (0, 32)


@interpreted
@pytest.mark.parametrize(
    ("path", "in_order", "many"),
    [
        (Path.ONE_STREAM, True, 4096),
        (Path.ONE_STREAM, True, 11),  # 12 pairs
        (Path.TWO_STREAMS, True, 4096),
        (Path.TWO_STREAMS, False, 4096),
    ],
)
def test_experts_are_float64(monkeypatch, path, in_order, many):
    """The whole pipeline around base GEMMs of our own, which find their input untouched."""
    case = case_of(6)
    w13 = torch.randn(3, 32, 32, generator=torch.Generator().manual_seed(1)).half() * 32**-0.5
    w2 = torch.randn(3, 32, 16, generator=torch.Generator().manual_seed(2)).half() * 0.25
    pairs_of = case.topk_ids.flatten().long()

    class Gemms:
        scaling = 1.0

        def __init__(self, layer, dispatched, align) -> None:
            self.tables = align(case.topk_ids, 16, 3)
            self.x = dispatched.hidden_states.repeat_interleave(2, 0)

        def gate_up(self, out, codes) -> None:
            out.copy_(torch.einsum("pk,pnk->pn", self.x.float(), w13[pairs_of].float()))

        def down(self, activated, out, codes) -> None:
            y = torch.einsum("pk,pnk->pn", activated.float(), w2[pairs_of].float())
            out.copy_((case.weights.flatten()[:, None] * y).view(out.shape))

        def blocks(self) -> tuple:
            return *self.tables, 16

        def sums_in_order(self) -> bool:
            return in_order

        def sum_over_experts(self, y) -> torch.Tensor:
            return y.float().sum(1).half()

    monkeypatch.setattr(stock, "ExpertGemms", Gemms)
    monkeypatch.setattr(moe, "MANY_PAIRS", many)
    layer = expert_layer(path, 6, case, monkeypatch)
    case.topk_ids = case.topk_ids.long()  # as a model's own routing may give them
    for buffer in (case.gate_up_a, case.gate_up_b, case.down_a, case.down_b):
        buffer.nan_to_num_(0.0)
    before = case.x.clone()
    got = ask(layer, case, topk_of(case))
    assert torch.equal(case.x, before)
    right = torch.zeros(6, 32, dtype=torch.float64)
    for pair, expert in enumerate(pairs_of.tolist()):
        token, slot = pair // 2, int(case.row_slots[pair // 2])
        x = case.x[token].double()
        gate_up = w13[expert].double() @ x
        if slot >= 0:
            a, b = case.gate_up_a[slot, expert].double(), case.gate_up_b[slot, expert].double()
            gate_up = gate_up + torch.cat([b[:16] @ a[:4] @ x, b[16:] @ a[4:] @ x])
        middle = torch.nn.functional.silu(gate_up[:16]) * gate_up[16:]
        y = w2[expert].double() @ middle
        if slot >= 0:
            y = y + case.down_b[slot, expert].double() @ case.down_a[slot, expert].double() @ middle
        right[token] += case.weights.flatten()[pair].double() * y
    torch.testing.assert_close(got.double(), right, rtol=1e-2, atol=1e-2)


@interpreted
@pytest.mark.parametrize("count", [1, 3, 6])
def test_experts_are_self_checked_with_no_more_than_there_are(count, monkeypatch):
    """A rank of an expert-parallel server may have fewer than the check would like; ids past them are not its own."""
    case = moe_selfcheck.make_case(5, 1, count, (4,), 4, 32, 16, torch.float16, "cpu")
    buffers = (case.gate_up_a, case.gate_up_b, case.down_a, case.down_b)
    experts = moe.Experts("moe", Map(None), *buffers, None, fast_math=False, pdl=False)
    assert moe.self_check(experts) == ""
    right = moe.moe_prepare

    def wrong(x, topk_ids, count, sorted_pairs, *others, **options):
        right(x, topk_ids, count, sorted_pairs, *others, **options)
        sorted_pairs[:2] = sorted_pairs[:2].flip(0)

    monkeypatch.setattr(moe, "moe_prepare", wrong)
    assert moe.self_check(experts) == "self-check of the preparation: pairs are not sorted by expert"


HEADS, NOPE, V, LATENT, RANK = 2, 24, 40, 72, 8


def correction_of(path: Path | None, rows: int = 3) -> mla.Correction:
    slots = np.array([0, -1, 1][:rows], np.int32)
    launch = dense.launch_for(rows)
    tables = {}
    for size in launch.tile_rows:
        table = np.empty((tiling.max_tiles(rows, 2, size), tiling.HEADER + size), np.int32)
        tiling.build_tiles(slots, np.array([8, 3], np.int32), np.array([2.0, 0.5], np.float32), size, table)
        tables[size] = torch.from_numpy(table)
    batch = path and types.SimpleNamespace(path=path, rows=rows, launch=launch, tables=tables)
    generator = torch.Generator().manual_seed(0)
    a = (torch.randn(2, RANK, LATENT, generator=generator) * LATENT**-0.5).half()
    b = (torch.randn(2, HEADS * (NOPE + V), RANK, generator=generator) * RANK**-0.5).half()
    layer = types.SimpleNamespace(A_buffer=a, B_buffer=b)
    attention = types.SimpleNamespace(num_local_heads=HEADS, qk_nope_head_dim=NOPE, v_head_dim=V)
    return mla.serve(layer, attention, Map(batch))


def attention_of(correction: mla.Correction | None) -> types.SimpleNamespace:
    kv_b = types.SimpleNamespace(lora_fastpath_mla=correction) if correction else types.SimpleNamespace()
    return types.SimpleNamespace(kv_b_proj=kv_b)


def ask_q(correction, x, y) -> object:
    return mla.apply_q_correction(lambda *_: "stock", None, (attention_of(correction), x, y), {})


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3)).half()


def test_corrections_without_adapters_change_nothing():
    y = random(3, HEADS, LATENT)
    before = y.clone()
    assert ask_q(correction_of(Path.BASE), random(3, HEADS, NOPE), y) is y and torch.equal(y, before)


@pytest.mark.parametrize("correction", [None, correction_of(None)], ids=["other layer", "no batch yet"])
def test_corrections_that_are_not_ours_are_stocks(correction):
    assert ask_q(correction, random(3, HEADS, NOPE), random(3, HEADS, LATENT)) == "stock"


def test_a_correction_of_rows_that_were_not_mapped_is_stocks(declined):
    correction = correction_of(Path.ONE_STREAM)
    assert ask_q(correction, random(7, HEADS, NOPE), random(7, HEADS, LATENT)) == "stock"
    assert correction.adapter_map.fallen_back and not declined


def test_a_correction_that_raises_leaves_with_the_reason(declined, monkeypatch):
    def broken(*args, **kwargs):
        raise RuntimeError("made to fail")

    monkeypatch.setattr(mla, "heads_product", broken)
    correction = correction_of(Path.ONE_STREAM)
    assert ask_q(correction, random(3, HEADS, NOPE), random(3, HEADS, LATENT)) == "stock"
    assert declined == [("mla", "RuntimeError: made to fail")]


@interpreted
@pytest.mark.parametrize("path", [Path.ONE_STREAM, Path.TWO_STREAMS])
def test_both_corrections_are_float64(path):
    correction = correction_of(path)
    a, b = correction.v_shrink[:, 0].double(), torch.cat([correction.q_shrink.transpose(2, 3), correction.v_expand], 2)
    b = b.double()
    q, out = random(3, HEADS, NOPE), random(HEADS, 3, LATENT).transpose(0, 1)
    attention, flat = random(3, HEADS, LATENT), random(3, HEADS * V)
    right_out, right_flat = out.double(), flat.double().view(3, HEADS, V)
    for row, (slot, rank, scaling) in {0: (0, 8, 2.0), 2: (1, 3, 0.5)}.items():
        for head in range(HEADS):
            b_k, b_v = b[slot, head, :NOPE, :rank], b[slot, head, NOPE:, :rank]
            right_out[row, head] += scaling * (q[row, head].double() @ b_k) @ a[slot, :rank]
            right_flat[row, head] += scaling * b_v @ (a[slot, :rank] @ attention[row, head].double())
    module = attention_of(correction)
    for apply, x, y, right in (
        (mla.apply_q_correction, q, out, right_out),
        (mla.apply_v_correction, attention, flat, right_flat.flatten(1)),
    ):
        correction.mark()
        assert (correction.h is not None) == (path is Path.TWO_STREAMS)
        before = y.clone()
        assert apply(None, None, (module, x, y), {}) is y and correction.h is None
        torch.testing.assert_close(y.double(), right, rtol=4e-3, atol=4e-3)
        assert torch.equal(y[1], before[1]) and not torch.equal(y[0], before[0])


@interpreted
def test_a_mark_that_no_correction_has_used_is_forgotten():
    """A batch that is not absorbed leaves it; the next one may have other rows and one stream."""
    correction, eager = correction_of(Path.TWO_STREAMS), correction_of(Path.ONE_STREAM, rows=1)
    correction.mark()
    assert len(correction.h) == 3
    correction.adapter_map.batch = eager.adapter_map.batch
    correction.mark()
    assert correction.h is None
    y = random(1, HEADS, LATENT)
    before = y.clone()
    assert ask_q(correction, random(1, HEADS, NOPE), y) is y and not torch.equal(y, before)


@interpreted
def test_a_correction_is_self_checked(monkeypatch):
    correction, right = correction_of(None), mla.heads_product
    assert mla.self_check(correction) == ""

    def wrong(x, w, tiles, y, *, add, pdl=False):
        right(x, w, tiles, y, add=add, pdl=pdl)
        if add and w.shape[2] == V:
            y[0] += 0.1

    monkeypatch.setattr(mla, "heads_product", wrong)
    assert "self-check of the v correction, 1 rows a tile: error" in mla.self_check(correction)


def test_buffers_of_other_heads_do_not_fit():
    layer = types.SimpleNamespace(A_buffer=random(2, RANK, LATENT), B_buffer=random(2, 100, RANK))
    attention = types.SimpleNamespace(num_local_heads=HEADS, qk_nope_head_dim=NOPE, v_head_dim=V)
    with pytest.raises(mla.Unfit, match="does not hold 2 heads of 24 and 40"):
        mla.serve(layer, attention, Map(None))
