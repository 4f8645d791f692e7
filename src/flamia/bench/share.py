"""How a training call's time divides, and how much of it is quantisation.

Six calls of the package's own functions are timed side by side, each in a graph: the lists of work, the encoding of Q, K
and V (lists included), the forward (both included), the encoding of dO, and each pass of the backward (dO's encoding
included). Parts are differences of medians, so their sum is a whole call up to what a difference of two medians is
uncertain by; `parts_over_whole` says how well they add up, against the public function's own training call.

Bytes are counted, not measured: every 16-bit tensor that an encoder must read once, every code, factor and 16-bit copy
that it must write once, whole blocks of 128 rows where it writes those (but for the factors of groups, a quarter of a byte
for each key). Beside them stands a copy between two buffers of a gibibyte on the same card in the same rounds (two bytes of
traffic for each byte copied). It is no bound: in a graph a copy may be slower than a kernel, and on an H200 it was.
"""

from __future__ import annotations

from typing import Any

import torch

from flamia.packing import Documents

from . import checks, timing
from .peers import ours
from .workloads import Workload

BLOCK = 128
COPIED = 2**30


def padded_rows(lengths: tuple[int, ...]) -> int:
    return sum(-(-n // BLOCK) * BLOCK for n in lengths)


def traffic(w: Workload) -> dict[str, int]:
    """Bytes that each encoder must move."""
    rows, read = padded_rows(w.lengths), w.tokens
    heads = w.heads + 2 * w.kv_heads
    forward = 2 * read * heads * w.dim + rows * (heads * (w.dim + 4) + 2 * w.kv_heads * w.dim)
    gradient = w.heads * (read * (4 * w.dim + 4) + rows * (3 * w.dim + 8))
    return {"encode": forward, "encode_gradient": gradient}


def measure(w: Workload, rounds: int, seconds: float, device: str = "cuda") -> dict[str, Any]:
    """One workload. The sums of the whole call are checked first; wrong ones are reported and nothing is timed."""
    from flamia.hopper import launch, schedule
    from flamia.recipe import Recipe

    inputs = w.inputs(device)
    whole = ours(w, inputs)
    verdict = checks.check(whole, w, inputs)
    row: dict[str, Any] = {"name": w.name, "tokens": w.tokens, "documents": len(w.lengths), "check": verdict.to_dict()}
    if verdict.faults:
        return row | {"faults": list(verdict.faults)}
    q, k, v, do, cu = inputs
    documents, recipe, scale = Documents(cu, cu, None, 0 if w.causal else None), Recipe.strict(), w.dim**-0.5
    o, lse, rest, saved = launch.forward_saving(q, k, v, documents, recipe, scale)
    plan = launch.parts(launch.empty_saved(q, k, documents), q, k, documents).plan
    spare = torch.empty_like(o), torch.empty_like(lse)
    source = torch.empty(COPIED, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def backward(*wanted: bool) -> tuple[torch.Tensor, ...]:
        found = launch.backward(do, None, q, k, None, o, lse, rest, documents, recipe, scale, saved, wanted)  # type: ignore[arg-type]
        return tuple(x for x, wish in zip(found, wanted) if wish)

    calls = {
        "lists": timing.capture(lambda: schedule.lay_out(plan, documents, w.tokens, w.tokens), looked_at=False),
        "encode": timing.capture(lambda: launch.encode(q, k, v, documents, scale, *spare)[2]),
        "forward": timing.capture(lambda: launch.forward_saving(q, k, v, documents, recipe, scale)[:2]),
        "encode_gradient": timing.capture(lambda: backward(False, False, False), looked_at=False),
        "dkv": timing.capture(lambda: backward(False, True, True)),
        "dq": timing.capture(lambda: backward(True, False, False)),
        "train": timing.capture(whole.train),
        "copy": timing.capture(lambda: target.copy_(source), looked_at=False),
    }
    row["rounds"] = timing.interleave(list(calls.values()), rounds, seconds)
    row["samples"] = {name: call.ms for name, call in calls.items()}
    row["how"] = {name: call.how for name, call in calls.items() if call.how != "graph"}
    return row | divided({name: call.median for name, call in calls.items()}, traffic(w))


def divided(ms: dict[str, float], moved: dict[str, int]) -> dict[str, Any]:
    """Parts in ms, the share of both encoders and the lists, and traffic in GB/s, from the medians of the calls."""
    parts = {
        "lists": ms["lists"],
        "encode": ms["encode"] - ms["lists"],
        "forward": ms["forward"] - ms["encode"],
        "encode_gradient": ms["encode_gradient"],
        "dkv": ms["dkv"] - ms["encode_gradient"],
        "dq": ms["dq"] - ms["encode_gradient"],
    }
    rates = {name: moved[name] / parts[name] * 1e-6 for name in moved}
    return {
        "ms": parts,
        "train_ms": ms["train"],
        "parts_over_whole": sum(parts.values()) / ms["train"],
        "share": (parts["lists"] + parts["encode"] + parts["encode_gradient"]) / ms["train"],
        "bytes": moved,
        "gb_per_s": rates | {"copy": 2 * COPIED / ms["copy"] * 1e-6},
    }


def lines(row: dict[str, Any]) -> str:
    if "ms" not in row:
        return f"share of {row['name']}: not timed, {'; '.join(row['faults'])}"
    parts = ", ".join(f"{name} {value:.3f}" for name, value in row["ms"].items())
    rates = ", ".join(f"{name} {value:.0f}" for name, value in row["gb_per_s"].items())
    return (
        f"share of {row['name']}: {100 * row['share']:.1f}% of {row['train_ms']:.3f} ms; {parts} ms, together "
        f"{row['parts_over_whole']:.3f} of it; GB/s {rates}"
    )
