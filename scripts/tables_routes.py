"""The tables of the page of evidence that set routes side by side: `mxfp8` beside the default, and what scores as given at the
mask's edge cost after their kernels changed."""

from __future__ import annotations

import statistics

from results import block, load, of_rounds, table

OURS, FRONTIER = "flamia", "flamia-frontier"
ROUTES = {
    OURS: "`mxfp8_scores/strict`",
    "flamia-mxfp8": "`mxfp8/strict`",
    "flamia-mxfp8-fast": "`mxfp8/fast,dq_accumulator=fp32`",
}


def machine(found: dict) -> str:
    v = found["versions"]
    card = f"{found['machine']['device']}, torch {v['torch']}, Triton {v['triton']}"
    return f"{card}; commit {found['commit']}, {found['date'][:10]}"


@block
def routes_machine() -> list[str]:
    found = load("routes-h200")
    return [f"{machine(found)}; {found['settings']['rounds']} rounds."]


@block
def routes_table() -> list[str]:
    rows = []
    for w in load("routes-h200")["workloads"]:
        for name, label in ROUTES.items():
            c = w["contenders"][name]
            check = c["check"]
            ratio = [of_rounds(w["ratios"][name][kind], 2) if name != OURS else "" for kind in ("train", "forward")]
            errors = " / ".join(f"{check['errors'][t]:.3f}" for t in ("o", "dq", "dk", "dv"))
            mass = f"{abs(check['mass_o']):.0e}, {abs(check['mass_dv']):.0e}"
            train, forward = (f"{c[kind]['ms']:.2f}" for kind in ("train", "forward"))
            rows.append(
                [w["name"], label, train, ratio[0], forward, ratio[1], errors, mass, f"{c['peak_bytes'] / 1e6:.0f}"]
            )
    head = "workload | recipe | training call, ms | over the default | forward, ms | over the default"
    return table(f"{head} | error of O / dQ / dK / dV | mass lost in O, dV | peak MB", rows)


@block
def routes_words() -> list[str]:
    found = load("routes-h200")
    words = []
    for name, label in list(ROUTES.items())[1:]:
        times = [w["ratios"][name]["train"][1] for w in found["workloads"]]
        gradients = [
            w["contenders"][name]["check"]["errors"][t] / w["contenders"][OURS]["check"]["errors"][t]
            for w in found["workloads"] for t in ("dq", "dk")
        ]  # fmt: skip
        words.append(
            f"{label} takes {min(times):.1f} to {max(times):.1f} times the default's training call; its dQ and dK are "
            f"{min(gradients):.2f} to {max(gradients):.2f} times as far from exact attention."
        )
    return [" ".join(words)]


@block
def edge_again() -> list[str]:
    found = load("bench-edge-h200")
    packed = [w["ratios"][FRONTIER]["train"][1] for w in found["workloads"] if w["group"] == "packed"]
    forward = [w["ratios"][FRONTIER]["forward"][1] for w in found["workloads"] if w["group"] == "packed"]
    return [
        f"Timed again without flash-attn-4 ({machine(found)}), after dK/dV's steps at the edge had got a mask more: "
        f"**{statistics.geometric_mean(packed):.3f}** of a training call (least {min(packed):.3f}, most {max(packed):.3f}) and "
        f"{statistics.geometric_mean(forward):.3f} of a forward."
    ]
