"""Side streams: where a shrink runs beside the base layer.

There is one lane for each stream that calls a LoRA layer, because models run some layers on a second stream of their own
and sharing a side stream (or its scratch) would order or race what is independent. A stream must not be created inside a
graph capture, so spare lanes are made ahead.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

ARRIVALS = 16384
"""Counters a lane holds for split-K launches (64 KiB); see kernels/shrink.py."""

SPARE_LANES = 4


class Lane:
    """The side stream, its two events and its counters, for one calling stream. On the CPU everything is in line."""

    def __init__(self, device: torch.device) -> None:
        self.arrivals = torch.zeros(ARRIVALS, dtype=torch.int32, device=device)
        self.scratch: tuple = ()
        self._cuda = device.type == "cuda"
        if self._cuda:
            self._side = torch.cuda.Stream(device)
            self._fork = torch.cuda.Event()
            self._join = torch.cuda.Event()

    def fork(self, scratch: tuple = ()) -> None:
        """Mark the point that work on the side stream has to wait for: the layer's input is ready.

        Whatever that work will write has to be allocated by now, before the base layer runs. The base layer's own
        temporaries go back to the allocator as soon as its kernels are queued; a tensor allocated after that may share
        their memory, and the side stream would write into what the base GEMM has yet to read. scratch: such tensors,
        for a caller that does its side work elsewhere and finds them in `self.scratch`.
        """
        if self._cuda:
            self._fork.record()
        self.scratch = scratch

    @contextlib.contextmanager
    def side(self) -> Iterator[None]:
        """Run the body on the side stream, from the fork on, and join it back afterwards.

        Tensors that the body writes must have been allocated outside it, on the calling stream: what the side stream's
        own pool hands out could be reused under graph replay before the calling stream has read it.
        """
        if not self._cuda:
            yield
            return
        main = torch.cuda.current_stream()
        self._side.wait_event(self._fork)
        try:
            with torch.cuda.stream(self._side):
                yield
        finally:  # whatever the body has queued is still to be waited for, and a capture must not end with a loose stream
            self._join.record(self._side)
            main.wait_event(self._join)


class Lanes:
    """All lanes of one device, by calling stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._by_stream: dict[int, Lane] = {}
        self._spare = [Lane(device) for _ in range(SPARE_LANES)]

    def current(self) -> Lane:
        """The calling stream's lane. RuntimeError when a capture needs more lanes than were made ahead."""
        key = torch.cuda.current_stream(self._device).cuda_stream if self._device.type == "cuda" else 0
        lane = self._by_stream.get(key)
        if lane is None:
            if self._spare:
                lane = self._spare.pop()
            elif self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                raise RuntimeError(f"{SPARE_LANES} spare side streams are used up inside one graph capture")
            else:
                lane = Lane(self._device)
            self._by_stream[key] = lane
        return lane
