"""The blocks of docs/limits-h200.md: counters of each kernel beside its floor, watts and clocks, what products alone take."""

from __future__ import annotations

from typing import Any

from results import block, load, table

NAMES = {"forward_kernel": "forward", "dkv_kernel": "dK/dV", "dq_kernel": "dQ"}
TOP_CLOCK = 1.98e9  # of the card, in Hz


def cycles(k: dict[str, Any]) -> float:
    """Of one multiprocessor, for a block of 128 x 128 weights."""
    found = load("limits-h200")
    return k["elapsed_cycles"] * found["multiprocessors"] / found["blocks_of_128x128"]


@block
def limits_machine() -> list[str]:
    found = load("limits-h200")
    return [f"{found['machine']}; {found['workload']}; kernels of {found['counters']['commit']}, {found['date']}."]


@block
def limits_counters() -> list[str]:
    rows = []
    for name, k in load("limits-h200")["counters"]["kernels"].items():
        floor = k["tensor_cycles_of_a_block"]
        rows.append([
            NAMES[name], f"{k['duration_ns'] / 1e6:.2f}", f"{k['sm_clock_hz'] / 1e9:.2f}", f"{floor:,}", f"{cycles(k):,.0f}",
            *(f"{k[p + '_percent']:.0f}%" for p in ("tensor_pipe", "issue_slots", "xu_pipe", "fma_pipe", "shared_data_pipe",
                                                   "l2", "dram")),
        ])  # fmt: skip
    head = (
        "kernel | ms | clock, GHz | tensor cycles of a 128 x 128 block | cycles it took | tensor pipe | issue slots | "
        "exp2 and conversions | FMA | shared memory | L2 | DRAM"
    )
    return table(head, rows)


@block
def limits_words() -> list[str]:
    kernels = load("limits-h200")["counters"]["kernels"].values()
    now = sum(k["duration_ns"] for k in kernels) / 1e6
    pipe = sum(k["duration_ns"] * k["tensor_pipe_percent"] / 100 for k in kernels) / 1e6
    floor = sum(k["tensor_cycles_of_a_block"] for k in kernels)
    found = load("limits-h200")
    ideal = floor * found["blocks_of_128x128"] / found["multiprocessors"] / TOP_CLOCK * 1e3
    return [
        f"The three take {now:.2f} ms here. With the tensor pipe always busy at the same clocks it would be {pipe:.2f} ms, and "
        f"at the card's {TOP_CLOCK / 1e9:.2f} GHz {ideal:.2f} ms: a limit of this choice of products, {now / ideal:.2f} times "
        "faster than today, that no kernel here reaches, for the reason below."
    ]


def state(row: dict[str, Any]) -> list[str]:
    seen = row["clock_mhz_and_watts"]
    return ["", ""] if seen is None else [f"{seen[0] / 1e3:.2f}", f"{seen[1]:.0f}"]


@block
def limits_power() -> list[str]:
    rows = [
        [r["workload"], r["what"], f"{r['isolated_ms']:.3f}", f"{r['sustained_ms']:.3f}", *state(r)]
        for r in load("limits-h200")["power"]["rows"]
    ]
    return table("workload | what | one launch, ms | sustained, ms | clock then, GHz | watts then", rows)


@block
def limits_data() -> list[str]:
    rows = [[r["what"], f"{r['sustained_ms']:.3f}", *state(r)] for r in load("limits-h200")["data"]["rows"]]
    return table("what | sustained, ms | clock then, GHz | watts then", rows)


@block
def limits_products() -> list[str]:
    rows = [
        [r["what"], f"{r['whole_ms']:.3f}", f"{r['products_ms']:.3f}", f"{r['whole_ms'] / r['products_ms']:.2f}"]
        for r in load("limits-h200")["products_alone"]["rows"]
    ]
    return table("what | whole kernel, ms | without making weights, ms | ratio", rows)
