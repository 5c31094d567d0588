"""The gate's answers, one by one."""

from __future__ import annotations

import pytest

from lora_fastpath.gate import Path, choose

GRAPH = dict(rows=16, active=False, replayable=True, capturing=True, nolora_graph=False, max_tokens=256)


@pytest.mark.parametrize(
    "change,path",
    [
        ({}, Path.TWO_STREAMS),  # captured with no adapter, replayed with any
        ({"rows": 256}, Path.TWO_STREAMS),
        ({"rows": 257}, Path.ONE_STREAM),
        ({"nolora_graph": True}, Path.BASE),
        ({"capturing": False}, Path.ONE_STREAM),  # captured again while serving, unannounced
        ({"capturing": False, "nolora_graph": True}, Path.BASE),
        ({"capturing": False, "replayable": False}, Path.BASE),
        ({"capturing": False, "active": True}, Path.ONE_STREAM),
        ({"capturing": False, "active": True, "rows": 8192}, Path.ONE_STREAM),
    ],
)
def test_path(change, path):
    found, reason = choose(**GRAPH | change)
    assert found is path and reason
