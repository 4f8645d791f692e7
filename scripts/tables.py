"""Every measured number that README and docs quote, written into them from docs/results: python scripts/tables.py [--check].

A page says where: what stands between ``<!-- begin NAME -->`` and ``<!-- end NAME -->`` is made here, from the committed
files and nothing else, and is overwritten. ``--check`` changes nothing and fails where a page differs; the tests do the
same, so a number cannot be edited by hand. ``figures.py`` draws the pictures from the same files.
"""

from __future__ import annotations

import re
import statistics
import sys
import textwrap
from typing import Any

import tables_audit  # noqa: F401  registers its blocks
import tables_bias  # noqa: F401
import tables_closeness  # noqa: F401
import tables_faults  # noqa: F401
import tables_limits  # noqa: F401
import tables_more  # noqa: F401
import tables_parallel  # noqa: F401
import tables_routes  # noqa: F401
import tables_study  # noqa: F401
from results import BLOCKS, FP8, OURS_AUDITED, ROOT, block, load, masses, of_rounds, small, table

PAGES = (
    "README.md",
    "docs/evidence.md",
    "docs/benchmarks.md",
    "docs/peers-audit.md",
    "docs/limits-h200.md",
    "docs/evidence-training.md",
    "docs/parallel.md",
)
OURS, PEER = "flamia", "flash-attn-4"


# --- speed and memory -----------------------------------------------------------------------------------------------


def where(found: dict[str, Any]) -> str:
    v = found["versions"]
    frontend = f", cuDNN frontend {v['nvidia-cudnn-frontend']}" if "nvidia-cudnn-frontend" in v else ""
    return (
        f"{found['machine']['device']} ({found['machine']['power.limit']}, driver {found['machine']['driver_version']}), "
        f"torch {v['torch']}, Triton {v['triton']}, flash-attn-4 {v['flash-attn-4']}, cuDNN {v['cudnn']}{frontend}; commit "
        f"{found['commit']}, {found['date'][:10]}"
    )


def medians(kind: str) -> list[float]:
    packed = [w for w in load("bench-h200")["workloads"] if w["group"] == "packed"]
    return [w["ratios"][PEER][kind][1] for w in packed]


def memory(w: dict[str, Any], peer: str = PEER) -> float:
    return w["contenders"][OURS]["peak_bytes"] / w["contenders"][peer]["peak_bytes"]


@block
def speed_machine() -> list[str]:
    found = load("bench-h200")
    return [f"{where(found)}. {found['settings']['rounds']} rounds, {found['seconds']:.0f} s in all."]


@block
def speed_table() -> list[str]:
    rows = []
    for w in load("bench-h200")["workloads"]:
        ours, peer, ratio = w["contenders"][OURS], w["contenders"][PEER], w["ratios"][PEER]
        rows.append([w["name"], w["group"], *(
            text for kind in ("train", "forward")
            for text in (f"{ours[kind]['ms']:.3f}", f"{peer[kind]['ms']:.3f}", of_rounds(ratio[kind]))
        ), f"{ours['peak_bytes'] / 1e6:.0f} / {peer['peak_bytes'] / 1e6:.0f}"])  # fmt: skip
    head = "workload | group | training call, ms | flash-attn-4 | ratio | forward, ms | flash-attn-4 | ratio | peak MB"
    return table(head, rows)


@block
def speed_words() -> list[str]:
    found, train, forward = load("bench-h200"), medians("train"), medians("forward")
    means = found["means"][PEER]
    lowest = min(w["ratios"][PEER]["train"][0] for w in found["workloads"])
    sizes = [memory(w) for w in found["workloads"]]
    errors = [w["contenders"][c]["check"]["errors"]["o"] for w in found["workloads"] for c in (OURS, PEER)]
    return [
        f"Over the {means['train']['workloads']} packed workloads the geometric mean of the median ratios is "
        f"**{means['train']['mean']:.3f} for the training call** (least {means['train']['least']:.3f}, greatest "
        f"{max(train):.3f}; {sum(x < 1 for x in train)} of {len(train)} below 1) and {means['forward']['mean']:.3f} for the "
        f"forward alone (least {means['forward']['least']:.3f}, greatest {max(forward):.3f}; {sum(x < 1 for x in forward)} of "
        f"{len(forward)} below 1). The lowest ratio of a single round of any training call is {lowest:.3f}. Peak memory of a "
        f"call is {min(sizes):.2f} to {max(sizes):.2f} times flash-attn-4's. O is {min(errors[::2]):.3f} to "
        f"{max(errors[::2]):.3f} from float32 attention for ours and {min(errors[1::2]):.4f} to {max(errors[1::2]):.4f} for "
        "flash-attn-4 (relative L2)."
    ]


FRONTIER = "flamia-frontier"


def against_peer(w: dict[str, Any], kind: str) -> float:
    """flash-attn-4's time over that of scores as given, median of the rounds."""
    theirs, own = (w["contenders"][who][kind]["samples"] for who in (PEER, FRONTIER))
    return statistics.median(a / b for a, b in zip(theirs, own, strict=True))


@block
def edge_table() -> list[str]:
    rows = []
    for w in load("bench-h200")["workloads"]:
        row = [w["name"]]
        for kind in ("train", "forward"):
            row += [f"{w['contenders'][who][kind]['ms']:.3f}" for who in (OURS, FRONTIER)]
            row += [of_rounds(w["ratios"][FRONTIER][kind]), f"{against_peer(w, kind):.3f}"]
        rows.append(row)
    head = "default | scores as given | cost | flash-attn-4 over it"
    return table(f"workload | training call, ms: {head} | forward, ms: {head}", rows)


@block
def edge_words() -> list[str]:
    found = load("bench-h200")
    packed = [w for w in found["workloads"] if w["group"] == "packed"]
    cost = [w["ratios"][FRONTIER]["train"][1] for w in packed]
    peer = statistics.geometric_mean(against_peer(w, "train") for w in packed)
    means = found["means"][FRONTIER]
    return [
        f"Over the {len(packed)} packed workloads scores as given at the edge cost **{means['train']['mean']:.3f}** of a "
        f"training call (geometric mean; least {min(cost):.3f}, most {max(cost):.3f}) and {means['forward']['mean']:.3f} of "
        f"a forward. flash-attn-4's training call takes {peer:.3f} times as long as ours with them."
    ]


@block
def dense_table() -> list[str]:
    found, rows = load("bench-h200-dense"), []
    for w in found["workloads"]:
        for name, c in w["contenders"].items():
            ratio = [of_rounds(w["ratios"][name][k]) if name != OURS else "" for k in ("train", "forward")]
            faults = "; ".join(c["check"]["faults"]) or "right"
            rows.append([w["name"], c["label"], f"{c['train']['ms']:.3f}", ratio[0], f"{c['forward']['ms']:.3f}", ratio[1],
                         f"{c['peak_bytes'] / 1e6:.0f}", faults])  # fmt: skip
    lines = table("workload | who | training call, ms | ratio | forward, ms | ratio | peak MB | its sums", rows)
    return [*lines, "", f"Not run for lack of time: {', '.join(found['not_run'])}. {where(found)}."]


# --- closeness ------------------------------------------------------------------------------------------------------

TENSORS = ("o", "dq", "dk", "dv")


def claims(recipe: str) -> frozenset[str]:
    import flamia

    return flamia.Recipe.parse(recipe).claims


@block
def readme_accuracy() -> list[str]:
    rows, names = [], {"bf16/strict": "`bf16`", "mxfp8_scores/strict": "`mxfp8_scores/strict` (default)"}
    gaussian = {r["recipe"]: r for r in load("accuracy-cpu") if r["inputs"] == "gaussian"}
    for recipe in ("bf16/strict", "mxfp8_scores/strict", "mxfp8/strict", "nvfp4_fp8/strict", "mxfp8/fast"):
        error = " / ".join(f"{gaussian[recipe]['error'][t]:.3f}"[1:] for t in TENSORS)
        label = names.get(recipe, f"`{recipe}`") + (", scales over 32 tokens" if recipe == "mxfp8/fast" else "")
        yes = ["yes" if claim in claims(recipe) else "**no**" for claim in ("prefix", "document")]
        rows.append([label, error, *yes])
    return table("recipe | error of O / dQ / dK / dV | future invisible | documents apart", rows)


@block
def closeness() -> list[str]:
    found = load("accuracy-cpu")
    kinds = list(dict.fromkeys(r["inputs"] for r in found))
    rows = []
    for recipe in dict.fromkeys(r["recipe"] for r in found):
        mine = {r["inputs"]: r["error"] for r in found if r["recipe"] == recipe}
        rows.append([f"`{recipe}`", *(" / ".join(f"{mine[k][t]:.3f}" for t in TENSORS) for k in kinds)])
    return table("recipe | " + " | ".join(k.replace("_", " ") for k in kinds), rows)


@block
def rounding_shares() -> list[str]:
    found = [r for r in load("accuracy-cpu") if r["inputs"] == "gaussian"]
    rows = [
        [f"`{r['recipe']}`", f"{min(r['cosine'].values()):.4f}", small(r["residual"]["mean"]), *(
            f"{r['residual'][q]:.4f}" for q in ("q0.01", "q0.99")
        ), f"{100 * r['shares']['p_zeroed']:.1f}%", f"{100 * r['shares']['u_zeroed']:.1f}%"] for r in found
    ]  # fmt: skip
    return table(
        "recipe | least cosine of the four | mean row residual of U | its 1% quantile | 99% | P zeroed | U zeroed", rows
    )


# --- README ---------------------------------------------------------------------------------------------------------


@block
def readme_measured() -> list[str]:
    found = load("bench-h200")
    mean = found["means"][PEER]
    ours, fp8 = ({m["length"]: m for m in masses(n)} for n in (OURS_AUDITED, FP8))
    longest = max(ours)
    sizes = sorted(memory(w) for w in found["workloads"])
    return [
        f"Measured on an {found['machine']['device']} beside flash-attn-4 {found['versions']['flash-attn-4']}: a training call "
        f"runs at {mean['train']['mean']:.3f} times its speed, a forward at {mean['forward']['mean']:.3f} (geometric means of "
        f"{mean['train']['workloads']} packed workloads), with {sizes[0]:.1f} to {sizes[-1]:.1f} times its peak memory. Where "
        f"every V is 1, O of {longest:,} tokens is {1 - ours[longest]['o_bias']:.2f} on the average; in cuDNN's FP8 attention "
        f"it is {1 - fp8[longest]['o_bias']:.2f}. [The evidence](docs/evidence.md), with commands and raw files."
    ]


def wrapped(line: str) -> str:
    if line.startswith("|"):
        return line
    return "\n".join(textwrap.wrap(line, 120, break_on_hyphens=False, break_long_words=False))


def filled(page: str) -> str:
    """A page with every block made anew."""

    def new(m: re.Match[str]) -> str:
        if m[1] not in BLOCKS:
            raise SystemExit(f"{m[1]}: no such block; there are {', '.join(BLOCKS)}")
        return f"<!-- begin {m[1]} -->\n" + "\n".join(map(wrapped, BLOCKS[m[1]]())) + f"\n<!-- end {m[1]} -->"

    return re.sub(r"<!-- begin ([\w-]+) -->\n.*?<!-- end \1 -->", new, page, flags=re.S)


def main() -> int:
    stale = []
    for name in PAGES:
        path = ROOT / name
        text = path.read_text()
        if (new := filled(text)) != text:
            stale.append(name)
            if "--check" not in sys.argv:
                path.write_text(new)
    print("\n".join(stale) or "nothing to change")
    return int("--check" in sys.argv and bool(stale))


if __name__ == "__main__":
    raise SystemExit(main())
