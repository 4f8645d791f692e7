"""The most memory that a training call needs, packed against padded.

What is compared, for the same documents: *packed*, tensors of (tokens, heads, D) with nothing between the documents; and
*aligned and padded*, a batch in which every document has the rows of the longest one, rounded up to a multiple of 128, as
a call has that knows no offsets. Both hold the same real tokens, both are one forward and backward of 16-bit tensors, and
what counts is everything at the worst moment: Q, K, V and dO themselves, O, the gradients, what is kept between forward
and backward, and whatever the call allocates meanwhile. Each is measured, by torch's own counter of allocated bytes.

Two quotients follow. `padding` is one implementation against itself: what packing saves. `against_packed` takes our
packed call as the unit for everybody's.

Where a padded call of 16 heads does not fit on a card the case has fewer heads, for packed and padded alike: all of
these tensors are proportional to the heads. One long document has nothing to pad, and is here to show that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flamia.words import amount

from . import checks, timing
from .peers import CONTENDERS, OURS
from .workloads import Workload, log_uniform

ALIGNMENT = 128


@dataclass(frozen=True)
class Case:
    name: str
    lengths: tuple[int, ...]
    heads: int = 16

    def workload(self, padded: bool) -> Workload:
        lengths = self.lengths
        if padded:
            lengths = (-(-max(lengths) // ALIGNMENT) * ALIGNMENT,) * len(lengths)
        return Workload(f"{self.name} {'padded' if padded else 'packed'}", lengths, self.heads, self.heads)


CASES = (
    Case("1x131072", (131072,)),
    Case("log-uniform 131072", log_uniform(131072, 16, 16384, seed=0)),
    Case("8192+480x256, one head", (8192, *(256,) * 480), heads=1),
)


def measure(case: Case, names: tuple[str, ...], device: str = "cuda") -> dict[str, Any]:
    """Bytes of every contender's packed and padded call, or its own words where it has none."""
    row: dict[str, Any] = {"name": case.name, "heads": case.heads, "documents": len(case.lengths), "calls": []}
    for padded in (False, True):
        workload = case.workload(padded)
        for name in names:
            entry: dict[str, Any] = {"who": name, "padded": padded, "rows": workload.tokens}
            row["calls"].append(entry)
            try:
                entry |= one(name, workload, checked=not padded, device=device)
            except Exception as error:  # out of memory, too, is an answer
                entry["refused"] = f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
            timing.release()
    return row | quotients(row["calls"])


def one(name: str, workload: Workload, checked: bool, device: str) -> dict[str, Any]:
    """Bytes of one training call. checked: hold its sums to the check that precedes every timing, first."""
    inputs = workload.inputs(device)
    contender = CONTENDERS[name](workload, inputs)
    faults = list(checks.check(contender, workload, inputs).faults) if checked else None
    given = sum(x.numel() * x.element_size() for x in inputs)
    timing.release()
    peak = timing.peak(contender.train)
    return {"input_bytes": given, "peak_bytes": peak, "bytes": given + peak, "faults": faults}


def quotients(calls: list[dict[str, Any]]) -> dict[str, Any]:
    size = {(c["who"], c["padded"]): c["bytes"] for c in calls if "bytes" in c}
    own = size.get((OURS, False))
    return {
        "padding": {who: size[who, True] / size[who, False] for who, padded in size if padded and (who, False) in size},
        "against_packed": {
            f"{who} {'padded' if padded else 'packed'}": value / own for (who, padded), value in size.items() if own
        },
    }


def lines(row: dict[str, Any]) -> str:
    out = [f"memory of {row['name']}: {amount(row['documents'], 'document')}"]
    for c in row["calls"]:
        what = f"{c['who']} {'padded' if c['padded'] else 'packed'}, {c['rows']:,} rows"
        text = (
            f"{c['bytes'] / 1e9:.2f} GB ({c['peak_bytes'] / 1e9:.2f} beside inputs)" if "bytes" in c else c["refused"]
        )
        out.append(f"  {what}: {text}" + (f"  WRONG SUMS: {'; '.join(c['faults'])}" if c.get("faults") else ""))
    out.append("  padded over packed: " + ", ".join(f"{who} {x:.2f}" for who, x in row["padding"].items()))
    return "\n".join(out)
