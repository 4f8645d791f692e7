"""How a figure comes about.

A call is captured in a CUDA graph where it can be, and replayed: what is timed is the card's work, not how fast a host
queues it. A replay that does not write its results (work that went to a stream nobody captured) is noticed: results are
zeroed before and looked at after. What cannot be captured is called from the host, several times in a row so that most of
its queueing is hidden, and the report says so.

Contenders take turns within a round, in the opposite order in every other one, so that a card that slows down slows all of
them; ratios are taken within a round. Memory is the peak of one call made from the host, above what the inputs hold.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass
class Timed:
    """One call to be timed, and its figures."""

    run: Callable[[], object]
    how: str
    calls: int = 1
    ms: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.ms)


def synchronize() -> None:
    torch.cuda.synchronize()


def capture(fn: Callable[[], Any], looked_at: bool = True) -> Timed:
    """The call as a graph, or as it is with the reason why it is not one. looked_at: whether what it returns are results
    that a replay must write; a part of a call may have none to show."""
    stream = torch.cuda.current_stream()
    try:
        side = torch.cuda.Stream()
        side.wait_stream(stream)
        with torch.cuda.stream(side):
            fn()
        stream.wait_stream(side)
        synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = fn()
        if not looked_at:
            graph.replay()
            synchronize()
            return Timed(_Replay(graph, results), "graph")
        results = (results,) if isinstance(results, Tensor) else tuple(results)
        with torch.no_grad():
            for x in results:
                x.zero_()
        graph.replay()
        synchronize()
        if not all(bool((x.float() != 0).any()) for x in results):
            return Timed(fn, "calls (a graph of it computes nothing)")
        return Timed(_Replay(graph, results), "graph")
    except Exception as error:  # libraries have their own kinds for "not while a stream is captured"
        torch.cuda.set_stream(stream)
        synchronize()
        return Timed(fn, f"calls (no graph: {' '.join(str(error).split())[:80]})")


@dataclass(frozen=True)
class _Replay:
    graph: Any
    results: Any  # a graph's memory lives as long as they

    def __call__(self) -> None:
        self.graph.replay()


def sample(timed: Timed) -> float:
    """Milliseconds of one call."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    synchronize()
    start.record()
    for _ in range(timed.calls):
        timed.run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / timed.calls


def interleave(some: list[Timed], rounds: int, seconds: float, least_ms: float = 15.0) -> int:
    """Fill in the figures of all, round by round; returns how many rounds there was time for, three at least."""
    for timed in some:
        timed.calls = 1
        sample(timed)
        timed.calls = max(1, min(50, round(least_ms / max(sample(timed), 1e-3))))
    started, done = time.monotonic(), 0
    while done < rounds and (done < 3 or time.monotonic() - started < seconds):
        for timed in some if done % 2 == 0 else reversed(some):
            timed.ms.append(sample(timed))
        done += 1
    return done


def peak(fn: Callable[[], object]) -> int:
    """Bytes that one call needs at its worst moment, beside what is there already."""
    synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    fn()
    synchronize()
    return torch.cuda.max_memory_allocated() - before


def release() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
