"""Tiles: which rows of a batch a block of a grouped LoRA kernel works on.

A batch of T rows (tokens) is cut, adapter slot by adapter slot, into tiles of at most `rows` rows. One tile is one
line of an int32 table that the shrink and the expand kernel share:

    [ slot | rank | scaling (float32 bits) | used tiles | row 0 | row 1 | ... | row rows-1 ]

Rows without an adapter appear in no tile, so no kernel ever touches them. Used lines stand first, each says how many
there are, and an unused line has slot -1. Everything that a block needs to know stands in one line, because one load that waits for
another is a good part of a kernel that takes 2 us.

The table is built on the host once a step. Under CUDA graphs the grid is captured for the most tiles that any batch
of that size can need (`max_tiles`) and the table is refilled before every replay.
"""

from __future__ import annotations

import numpy as np

HEADER = 4
"""Words before the first row number in a line: slot, rank, scaling, used tiles."""

NO_ADAPTER = -1
"""Slot of a row that no adapter applies to, slot of an unused tile, and filler for missing rows."""


def max_tiles(tokens: int, slots: int, rows: int) -> int:
    """The most tiles of `rows` rows that `tokens` rows spread over at most `slots` adapters can fill."""
    groups = min(tokens, slots)
    return min(tokens, (tokens + groups * (rows - 1)) // rows)


def build_tiles(token_slots: np.ndarray, ranks: np.ndarray, scalings: np.ndarray, rows: int, out: np.ndarray) -> int:
    """Fill `out` with the tiles of one batch and return how many are used.

    token_slots: int [T], the adapter slot of each row, NO_ADAPTER for none.
    ranks: int [S] and scalings: float32 [S], by slot.
    out: int32 [tiles, HEADER + rows]; every line is written, unused ones as NO_ADAPTER.
    Raises ValueError when the batch needs more tiles than `out` has.
    """
    out.fill(NO_ADAPTER)
    with_adapter = np.flatnonzero(token_slots >= 0)
    if not with_adapter.size:
        return 0
    slots = token_slots[with_adapter]
    order = np.argsort(slots, kind="stable")
    tokens, slots = with_adapter[order], slots[order]
    used, first, count = np.unique(slots, return_index=True, return_counts=True)
    tiles_of = -(-count // rows)
    total = int(tiles_of.sum())
    if total > len(out):
        raise ValueError(
            f"{len(token_slots)} rows of {len(used)} adapters need {total} tiles, the table holds {len(out)}"
        )
    group = np.repeat(np.arange(len(used)), count)
    within = np.arange(len(tokens)) - first[group]
    tile = (np.cumsum(tiles_of) - tiles_of)[group] + within // rows
    out[tile, HEADER + within % rows] = tokens
    slot_of = np.repeat(used, tiles_of)
    out[:total, 0] = slot_of
    out[:total, 1] = ranks[slot_of]
    out[:total, 2] = scalings[slot_of].astype(np.float32).view(np.int32)
    out[:total, 3] = total
    return total
