"""The blocks of closeness, on a card and on activations, and of dependency: how far results are, and how far they move."""

from __future__ import annotations

from typing import Any

from results import block, load, small, table

TENSORS = ("o", "dq", "dk", "dv")
LABELS = {
    "flamia": "flamia",
    "flash-attn-4": "flash-attn-4",
    "torch-varlen": "torch varlen_attn",
    "cudnn-fp8": "cuDNN fp8",
}
FORMATS = {"e4m3:feature32": "MXFP8", "nvfp4:feature16": "NVFP4", "e2m1:feature32": "MXFP4"}
PAPER = {"NVFP4": (0.937, 0.857), "MXFP4": (0.749, 0.816)}
"""Cosines without and with rotation that FLAMIA's paper reports for outlier channels in K."""


def four(values: dict[str, float], digits: int) -> str:
    return " / ".join(f"{values[name]:.{digits}f}" for name in TENSORS)


def made_at(found: dict[str, Any]) -> str:
    v, m = found["versions"], found["machine"]
    cuda = f", cuDNN {v['cudnn']}" if v.get("cudnn") else ""
    cuda += f", flash-attn-4 {v['flash-attn-4']}" if "flash-attn-4" in v else ""
    name = "a CPU (x86-64)" if m["device"] == "cpu" else f"an {m['device']}"
    return f"on {name}: torch {v['torch'].partition('+')[0]}{cuda}; commit {found['commit']}, {found['date'][:10]}"


# --- closeness ------------------------------------------------------------------------------------------------------


def plain(who: str) -> str:
    return f"`{who}`"


@block
def closeness_machine() -> list[str]:
    found = load("closeness-h200")
    r = found["rows"][0]
    return [
        f"{r['documents']} documents of {r['tokens'] // r['documents']:,} tokens, {r['heads']} heads of "
        f"{r['head_dim']}, causal, "
        f"{made_at(found)}."
    ]


@block
def closeness_card() -> list[str]:
    rows = []
    for r in load("closeness-h200")["rows"]:
        if r["inputs"] != "gaussian":
            continue
        seen = "residual_rounded" in r
        quantiles = " / ".join(f"{r['residual_rounded'][q]:+.4f}" for q in ("q0.01", "q0.5", "q0.99")) if seen else ""
        shares = [f"{100 * r['shares'][n]:.3f}%" for n in ("p_zeroed", "u_zeroed")] if seen else ["", ""]
        clipped = small(100 * max(r["shares"]["p_saturated"], r["shares"]["u_saturated"])) if seen else ""
        who = plain(r["who"]) if seen else f"**{LABELS[r['who']]}**, kernel"
        rows.append([who, four(r["error"], 4), four(r["cosine"], 5), quantiles, *shares, clipped + "%" if seen else ""])
    return table(
        "who | relative L2 of O / dQ / dK / dV | cosine of O / dQ / dK / dV | row residual of U: 1% / median / 99% | P "
        "zeroed "
        "| U zeroed | clipped", rows
    )  # fmt: skip


@block
def closeness_words() -> list[str]:
    rows = [r for r in load("closeness-h200")["rows"] if r["inputs"] == "gaussian"]
    by = {(r["backend"], r["who"]): r for r in rows}
    kernel, reference = by["kernel", "flamia"], by["reference", "mxfp8_scores/strict"]
    apart = max(abs(kernel["error"][t] / reference["error"][t] - 1) for t in TENSORS)
    fp8 = by["kernel", "cudnn-fp8"]
    ratios = [fp8["error"][t] / kernel["error"][t] for t in TENSORS]
    return [
        f"Our kernel's errors are those of the reference with the same recipe to {100 * apart:.2f}%. cuDNN's FP8 is "
        f"{min(ratios):.2f} "
        f"to {max(ratios):.2f} times as far from float64 as ours, and its cosine of O, {fp8['cosine']['o']:.5f}, says "
        f"nothing "
        "of the mass that it loses at this length (above)."
    ]


def rotations() -> list[tuple[int, str, dict[str, float], dict[str, float]]]:
    """Factor, format, and the cosines without and with rotation."""
    found: dict[tuple[int, str, bool], dict[str, float]] = {}
    for r in load("closeness-h200")["rows"]:
        if r["inputs"].startswith("outlier") and r["backend"] == "reference":
            cell = r["who"].rpartition("=")[2]
            found[int(r["inputs"].partition(":")[2]), FORMATS[cell], "rotate=True" in r["who"]] = r["cosine"]
    return [(f, name, found[f, name, False], found[f, name, True]) for f, name, turned in found if not turned]


@block
def closeness_outliers() -> list[str]:
    rows = [
        [factor, name, *(f"{a[t]:.3f} -> {b[t]:.3f}" for t in TENSORS)] for factor, name, a, b in rotations()
    ]  # fmt: skip
    for r in load("closeness-h200")["rows"]:
        if r["inputs"].startswith("outlier") and r["backend"] == "kernel" and r["who"] != "torch-varlen":
            factor = int(r["inputs"].partition(":")[2])
            rows.append([factor, f"{LABELS[r['who']]}, kernel", *(f"{r['cosine'][t]:.3f}" for t in TENSORS)])
    rows.sort(key=lambda row: row[0])
    return table("K's factor | scores in | cosine of O | dQ | dK | dV", rows)


@block
def outlier_words() -> list[str]:
    largest = max(f for f, *_ in rotations())
    said = []
    for factor, name, a, b in rotations():
        if factor == largest and name in PAPER:
            was, turned = PAPER[name]
            said.append(f"{name} {was} to {turned} there, {a['o']:.3f} to {b['o']:.3f} here")
    return [
        f"FLAMIA's paper reports the same two directions: at a factor of {largest}, cosine of O, {'; '.join(said)}. "
        f"Its inputs are "
        "not ours, so only directions and rough sizes can be compared."
    ]


def layers() -> list[str]:
    return list(dict.fromkeys(r["inputs"] for r in load("closeness-activations-cpu")["rows"]))


def of_layers(recipe: str) -> list[dict[str, Any]]:
    rows = load("closeness-activations-cpu")["rows"]
    return [next(r for r in rows if r["inputs"] == layer and r["who"] == recipe) for layer in layers()]


def captured_recipes() -> list[str]:
    return list(dict.fromkeys(r["who"] for r in load("closeness-activations-cpu")["rows"]))


def layer_names() -> str:
    return " | ".join(f"layer {name.partition(':')[2]}" for name in layers())


@block
def captured_machine() -> list[str]:
    found = load("closeness-activations-cpu")
    r = found["rows"][0]
    return [
        f"{r['tokens']:,} tokens of held-out text in {r['documents']} documents, {r['heads']} heads of "
        f"{r['head_dim']}, "
        f"{made_at(found)}."
    ]


@block
def closeness_captured() -> list[str]:
    rows = [[plain(name), *(four(r["error"], 3) for r in of_layers(name))] for name in captured_recipes()]
    return table("relative L2 of O / dQ / dK / dV | " + layer_names(), rows)


WHO = {
    "flamia": "the default recipe's kernels",
    "flamia-frontier": "the same with `frontier_scores=bf16`",
    "torch-varlen": "torch's 16-bit flash attention",
    "cudnn-fp8": "cuDNN's FP8",
}


@block
def captured_kernels_machine() -> list[str]:
    found = load("closeness-activations-h200")
    return [f"The same activations, kernels {made_at(found)}."]


@block
def captured_kernels() -> list[str]:
    found = load("closeness-activations-h200")["rows"]
    rows = [[what, *(four(r["error"], 3) for r in found if r["who"] == who)] for who, what in WHO.items()]
    return table("kernels | " + layer_names(), rows)


@block
def captured_shares() -> list[str]:
    rows = []
    for name in captured_recipes():
        mine = of_layers(name)
        shares = [" / ".join(f"{100 * r['shares'][x]:.1f}%" for x in ("p_zeroed", "u_zeroed")) for r in mine]
        cosine = " / ".join(f"{min(r['cosine'].values()):.4f}" for r in mine)
        middle = " / ".join(f"{r['residual_rounded']['q0.5']:+.1e}" for r in mine)
        rows.append([plain(name), *shares, cosine, middle])
    return table(
        f"P zeroed / U zeroed | {layer_names()} | least cosine, by layer | median row residual, by layer", rows
    )


@block
def captured_words() -> list[str]:
    default, whole = of_layers("mxfp8_scores/strict"), of_layers("mxfp8/strict")
    random = {r["who"]: r for r in load("closeness-h200")["rows"] if r["inputs"] == "gaussian"}
    rows = load("closeness-activations-cpu")["rows"]
    gradients = [max(r["error"]["dq"], r["error"]["dk"]) for r in default]
    tighter = [max(r["error"]["dq"], r["error"]["dk"]) for r in whole]
    before = max(random["mxfp8_scores/strict"]["error"][t] for t in ("dq", "dk"))
    ends = [r["residual_rounded"][q] for r in rows for q in ("q0.01", "q0.99")]
    clipped = max(max(r["shares"]["p_saturated"], r["shares"]["u_saturated"]) for r in rows)
    return [
        f"**The default recipe's dQ and dK are {min(gradients):.2f} to {max(gradients):.2f} off on a trained model, "
        f"where Gaussian "
        f"inputs said {before:.2f}**; `mxfp8/strict` is {min(tighter):.2f} to {max(tighter):.2f} off. The 1% and 99% "
        f"quantiles of "
        f"the signed row residuals lie between {min(map(abs, ends)):.2f} and {max(map(abs, ends)):.2f} in size for "
        f"every recipe, "
        f"bf16 among them. Nothing was clipped ({small(100 * clipped)}%)."
    ]


SIXTEEN = {
    "": "nothing (the default)",
    "frontier_scores": "the scores (`frontier_scores=bf16`)",
    "frontier.o_v frontier.e_v": "V in O and E",
    "frontier_scores frontier.o_v frontier.e_v": "both",
    "e_format": "E everywhere, and V in O, but no scores",
}  # by the options that say so


@block
def closeness_frontier() -> list[str]:
    found: dict[str, list[dict[str, Any]]] = {}
    for r in load("closeness-frontier-cpu")["rows"]:
        options = " ".join(option.partition("=")[0] for option in r["who"].split(",")[1:])
        found.setdefault(SIXTEEN[options], []).append(r["error"])
    rows = [[what, *(four(e, 3) for e in errors)] for what, errors in found.items()]
    return table("16 bits for, in the blocks of the diagonal | " + layer_names(), rows)


# --- dependency -----------------------------------------------------------------------------------------------------

SHORT = {"k": "K", "v": "V", "q": "Q", "do": "dO", "document": "another document", "offset": "moved", "truncate": "cut off",
         "2^20": "2^20", "2^126": "2^126", "nan": "NaN", "window": "behind a window"}  # fmt: skip


def size(x: float | str) -> str:
    return "not finite" if x == "inf" else "0" if x == 0 else f"{float(x):.2g}"


@block
def dependency_machine() -> list[str]:
    found = load("dependency-cpu")
    count = sum(s["O"]["comparisons"] + s["dQ"]["comparisons"] for r in found["rows"] for s in r["channels"].values())
    return [
        f"{len(found['rows'])} recipes, {count:,} comparisons, effort `{found['effort']}`, heads {found['heads'][0]}/"
        f"{found['heads'][1]} of {found['head_dim']}, documents of {', '.join(map(str, found['lengths']))} tokens, "
        f"seed "
        f"{found['seed']}, {made_at(found)}."
    ]


@block
def dependency_table() -> list[str]:
    found, rows = load("dependency-cpu"), []
    for r in found["rows"]:
        cells = []
        for channel in found["channels"]:
            o, dq = (size(r["channels"][channel][t]["largest"]) for t in ("O", "dQ"))
            cells.append("0" if o == dq == "0" else f"{o} / {dq}")
        rows.append([plain(r["recipe"]), *cells])
    return table("recipe | " + " | ".join(SHORT[c] for c in found["channels"]), rows)


@block
def dependency_words() -> list[str]:
    rows = load("dependency-cpu")["rows"]
    still = [r for r in rows if not any(s[t]["moved"] for s in r["channels"].values() for t in s)]
    count = sum(s[t]["comparisons"] for r in still for s in r["channels"].values() for t in s)
    return [
        f"No bit moved in {count:,} comparisons of {', '.join(plain(r['recipe']) for r in still)}. Every other recipe "
        "moved by about its own size somewhere: where a scale or a mean is shared, a large enough hidden token rewrites a "
        "row."
    ]


@block
def dependency_peers() -> list[str]:
    found, rows = load("peers-h200"), []
    for name, contracts in found["contracts"].items():
        cells = []
        for contract in ("prefix", "truncate", "document", "offset", "mask"):
            status = contracts.get(contract, {})
            sizes = [p["largest"] for p in found["probes"] if p["target"] == name and p["contract"] == contract]
            worst = "inf" if "inf" in sizes else max(sizes, default=0)
            if status.get("leak"):
                cells.append(f"{size(worst) if sizes else 'follows'} ({status['leak']} sets)")
            else:
                seen = [f"{'0' if x == 'clean' else x} ({status[x]})" for x in ("clean", "undecided") if status.get(x)]
                cells.append(", ".join(seen) or "not asked")
        rows.append([plain(name), *cells])
    return table("target | later tokens | cut off | another document | moved | behind a window or mask", rows)
