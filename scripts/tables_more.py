"""The blocks of `python -m flamia.bench.more`: what quantisation takes, orders, memory and a model, packed against padded."""

from __future__ import annotations

from typing import Any

from results import block, load, of_rounds, table
from tables_closeness import made_at

OURS, PEER = "flamia", "flash-attn-4"
PAPERS_MEMORY = 6.2
"""What FLAMIA's paper gives for the memory of a padded call of 131,072 tokens over a packed one."""
STATED = 4800
"""GB/s of an H200's memory by its maker's data sheet."""


def more() -> Any:
    return load("bench-more-h200")


@block
def more_machine() -> list[str]:
    found = more()
    return [f"{found['seconds']:.0f} s {made_at(found)}, {found['machine']['power.limit']}."]


@block
def share_table() -> list[str]:
    rows = []
    for s in more()["share"]:
        parts = [f"{s['ms'][x]:.3f}" for x in ("lists", "encode", "forward", "encode_gradient", "dkv", "dq")]
        rates = [f"{s['gb_per_s'][x]:,.0f}" for x in ("encode", "encode_gradient")]
        rows.append([s["name"], s["documents"], *parts, f"{s['train_ms']:.3f}", f"{s['parts_over_whole']:.3f}",
                     f"**{100 * s['share']:.1f}%**", *rates])  # fmt: skip
    return table(
        "workload | documents | lists | encode Q, K, V | forward | encode dO | dK, dV | dQ | training call, ms | parts "
        "over it "
        "| quantisation | GB/s: Q, K, V | dO", rows
    )  # fmt: skip


@block
def share_words() -> list[str]:
    found = more()["share"]
    shares, rates = (
        [100 * s["share"] for s in found],
        [s["gb_per_s"][x] for s in found for x in ("encode", "encode_gradient")],
    )
    copies = [s["gb_per_s"]["copy"] for s in found]
    return [
        f"Quantisation takes {min(shares):.1f}% of a training call with one document of 32,768 tokens and "
        f"{max(shares):.1f}% with "
        f"1,024 documents of 64. Its bytes, counted, pass at {min(rates):,.0f} to {max(rates):,.0f} GB/s, "
        f"{100 * min(rates) / STATED:.0f} to {100 * max(rates) / STATED:.0f}% of the {STATED:,} GB/s that the card's "
        f"maker states; "
        f"the copy of a gibibyte that was to be the yardstick ran at {min(copies):,.0f} to {max(copies):,.0f} only, so "
        f"it is none."
    ]


ABOUT = {
    "log-uniform": "log-uniform, as drawn", "longest first": "the same documents, longest first",
    "longest last": "the same, longest last", "shuffled": "the same, shuffled", "1024x64": "1,024 documents of 64",
}  # fmt: skip


@block
def order_table() -> list[str]:
    rows = []
    for w in more()["workloads"]:
        c, ratio = w["contenders"], w["ratios"][PEER]
        text = [of_rounds(ratio[k]) for k in ("train", "forward")]
        rows.append([ABOUT.get(w["name"], w["name"]), w["documents"], f"{w['pairs']:,}", f"{c[OURS]['train']['ms']:.3f}",
                     f"{c[PEER]['train']['ms']:.3f}", text[0], text[1],
                     " / ".join(f"{c[x]['peak_bytes'] / 1e6:.0f}" for x in (OURS, PEER))])  # fmt: skip
    return table(
        "workload | documents | visible pairs | training call, ms | flash-attn-4 | ratio | ratio of the forward | peak "
        "MB",
        rows,
    )


def spread(names: tuple[str, ...], who: str) -> float:
    """Greatest over least of the training call's medians, in percent above 1."""
    ms = [w["contenders"][who]["train"]["ms"] for w in more()["workloads"] if w["name"] in names]
    return 100 * (max(ms) / min(ms) - 1)


@block
def order_words() -> list[str]:
    loads = more()["workloads"]
    order = ("log-uniform", "longest first", "longest last", "shuffled")
    skewed = ("16x4096", *(w["name"] for w in loads if w["group"] == "skewed"))
    tiny = next(w for w in loads if w["group"] == "tiny")
    ratio = tiny["ratios"][PEER]
    rounds = [
        100 * (max(x) / min(x) - 1)
        for w in loads
        if w["name"] in order
        for x in [w["contenders"][OURS]["train"]["samples"]]
    ]
    return [
        f"The order of the same documents changes our training call by {spread(order, OURS):.1f}% (flash-attn-4: "
        f"{spread(order, PEER):.1f}%; rounds of one and the same order differ by {min(rounds):.1f} to "
        f"{max(rounds):.1f}%). At "
        f"constant tokens and constant visible pairs, 16 equal documents against skewed lengths, ours changes by "
        f"{spread(skewed, OURS):.1f}% and flash-attn-4 by {spread(skewed, PEER):.1f}%. With 1,024 documents of 64 "
        f"tokens the ratio is "
        f"{ratio['train'][1]:.3f} for a training call and {ratio['forward'][1]:.3f} for the forward, at "
        f"{tiny['contenders'][OURS]['peak_bytes'] / tiny['contenders'][PEER]['peak_bytes']:.2f} times the peak memory."
    ]


@block
def memory_table() -> list[str]:
    rows = []
    for case in more()["memory"]:
        held = {(c["who"], c["padded"]): c for c in case["calls"]}
        for who in (OURS, PEER):
            packed, padded = held[who, False], held[who, True]
            against = [f"{case['against_packed'][f'{who} {how}']:.2f}" for how in ("packed", "padded")]
            sizes = [f"{x['bytes'] / 1e9:.2f}" for x in (packed, padded)]
            lines = f"{packed['rows']:,} / {padded['rows']:,}"
            rows.append(
                [
                    case["name"],
                    case["documents"],
                    case["heads"],
                    who,
                    lines,
                    *sizes,
                    f"**{case['padding'][who]:.2f}**",
                    *against,
                ]
            )
    return table(
        "case | documents | heads | who | rows packed / padded | packed, GB | padded, GB | padded over packed "
        "| packed over our packed | padded over our packed", rows
    )  # fmt: skip


@block
def memory_words() -> list[str]:
    one, mixed, many = more()["memory"]
    held = {(c["who"], c["padded"]): c for c in mixed["calls"]}
    rows = held[OURS, True]["rows"] / held[OURS, False]["rows"]
    return [
        f"With documents of log-uniform length, {held[OURS, False]['rows']:,} tokens in all, padding costs "
        f"**{mixed['padding'][OURS]:.2f} times** the packed call's memory, {many['padding'][OURS]:.1f} times with one "
        f"long document "
        f"among {many['documents'] - 1} short ones, and {one['padding'][OURS]:.0f} with one document. The paper's "
        f"figure is "
        f"{PAPERS_MEMORY}: it is not reached with these lengths, and could not be, since the padded batch has "
        f"{rows:.2f} times the "
        f"rows and everything is proportional to them. Against flash-attn-4's padded call ours, packed, is "
        f"{mixed['against_packed'][f'{PEER} padded']:.2f} times smaller; flash-attn-4's packed call needs "
        f"{mixed['against_packed'][f'{PEER} packed']:.2f} of ours."
    ]


@block
def model_table() -> list[str]:
    (found,) = more()["model"]
    rows = []
    for name, v in found["variants"].items():
        off = f"{v['gradient_error']:.4f}" if v["gradient_error"] else "the unit"
        ratio = of_rounds(v["ratio"], 2)
        rows.append([name, f"{v['ms']:.1f}", f"{v['tokens_per_s']:,.0f}", ratio, f"{v['peak_bytes'] / 1e9:.1f}", off])
    return table(
        "attention | a step, ms | real tokens a second | time over ours, packed | peak GB | gradients from torch's",
        rows,
    )


@block
def model_words() -> list[str]:
    (found,) = more()["model"]
    v = found["variants"]
    ours, peer, padded = (v[x] for x in ("flamia packed", "flash-attn-4 packed", "torch padded"))
    return [
        f"{found['parameters'] / 1e6:.1f} million parameters, {found['layers']} layers of width {found['width']} with "
        f"{found['heads']} "
        f"heads of {found['head_dim']}; {found['tokens']:,} tokens in {found['documents']} documents of up to "
        f"{found['longest']:,}, "
        f"{found['padded_rows']:,} rows where padded. Packed, ours trains on {ours['tokens_per_s']:,.0f} tokens a "
        f"second, "
        f"{ours['tokens_per_s'] / padded['tokens_per_s']:.2f} times what torch's attention does on the padded batch, "
        f"and "
        f"{100 * (1 - ours['tokens_per_s'] / peer['tokens_per_s']):.1f}% less than flash-attn-4 packed "
        f"({peer['tokens_per_s']:,.0f})."
    ]
