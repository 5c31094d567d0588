"""The gate's answers, one by one."""

from __future__ import annotations

import pytest

from lora_fastpath.gate import Path, choose

DECODE = dict(rows=16, active=True, decode=True, capturing=False, nolora_graph=False, max_tokens=256)


@pytest.mark.parametrize(
    "change,path",
    [
        ({}, Path.TWO_STREAMS),
        ({"rows": 256}, Path.TWO_STREAMS),
        ({"rows": 257}, Path.ONE_STREAM),
        ({"decode": False}, Path.ONE_STREAM),
        ({"active": False}, Path.BASE),
        # A graph is captured with no adapter and replayed with any.
        ({"active": False, "capturing": True}, Path.TWO_STREAMS),
        ({"capturing": True, "nolora_graph": True}, Path.BASE),
    ],
)
def test_path(change, path):
    found, reason = choose(**DECODE | change)
    assert found is path and reason
