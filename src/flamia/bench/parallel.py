"""Context-parallel attention on several cards against one card with the same packing.

    torchrun --standalone --nproc-per-node 2 -m flamia.bench.parallel --documents 1x131072 --json out/parallel.json

Every rank first makes the call on its own card with the whole buffer, and its rows of O, dQ, dK and dV must have those bits
in the context-parallel call; else nothing is timed. Then rounds of both, one after the other: a figure is one forward, or
one forward and backward, from a barrier to the slowest rank's end, and the ratio is taken within the round. Encoding, the wire
and the copies are inside; making the plan (once for each packing) is timed by itself.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

import flamia
from flamia.bench.report import surroundings
from flamia.bench.workloads import Workload
from flamia.integrations.parallel import ContextParallel


def lengths(text: str) -> tuple[int, ...]:
    """ "1x131072" or "8192+224x256": documents, in order."""
    found: list[int] = []
    for part in text.split("+"):
        match = re.fullmatch(r"(?:(\d+)x)?(\d+)", part.strip())
        if not match:
            raise ValueError(f"documents {text!r}: write lengths such as 1x131072 or 8192+224x256")
        found += [int(match[2])] * int(match[1] or 1)
    return tuple(found)


def slowest(fn: Callable[[], object], device: torch.device) -> float:
    """Milliseconds of a call on all ranks, from a barrier to the last one's end."""
    dist.barrier()
    synchronize(device)
    start = time.perf_counter()
    fn()
    synchronize(device)
    took = torch.tensor([1e3 * (time.perf_counter() - start)], device=device)
    dist.all_reduce(took, op=dist.ReduceOp.MAX)
    return took.item()


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak(fn: Callable[[], object], device: torch.device) -> int:
    """The most bytes that a call needs beside what is there before it."""
    if device.type != "cuda":
        return 0
    synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    fn()
    return torch.cuda.max_memory_allocated(device) - before


def profiled(fn: Callable[[], object], device: torch.device, show: bool) -> None:
    """One call on all ranks, and what its kernels took on the first."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        fn()
        synchronize(device)
    if show:
        print(profile.key_averages().table(sort_by="self_cuda_time_total", row_limit=14, max_name_column_width=50))


def measure(workload: Workload, rounds: int, device: torch.device, profile: bool = False) -> dict:
    q, k, v, do, cu = workload.inputs(str(device))
    ContextParallel(cu)  # the first of a process starts its connections
    started = time.perf_counter()
    here = ContextParallel(cu)
    planned = time.perf_counter() - started
    mine = [here.shard(x).requires_grad_() for x in (q, k, v)]
    my_do = here.shard(do)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    q_mine, k_mine, v_mine = mine

    def one_card() -> list[Tensor]:
        o = flamia.attention_varlen(q, k, v, cu, causal=True)
        assert isinstance(o, Tensor)
        return [o, *torch.autograd.grad(o, leaves, do)]

    def all_cards() -> list[Tensor]:
        o = here.attention(q_mine, k_mine, v_mine)
        assert isinstance(o, Tensor)
        return [o, *torch.autograd.grad(o, mine, my_do)]

    @torch.no_grad()
    def one_forward() -> object:
        return flamia.attention_varlen(q, k, v, cu, causal=True)

    @torch.no_grad()
    def all_forward() -> object:
        return here.attention(q_mine, k_mine, v_mine)

    same = [torch.equal(here.shard(x), y) for x, y in zip(one_card(), all_cards(), strict=True)]
    verdict = torch.tensor([all(same)], dtype=torch.int32, device=device)
    dist.all_reduce(verdict, op=dist.ReduceOp.MIN)
    if not verdict.item():
        sys.exit(f"rank {here.rank}: O, dQ, dK, dV equal to one card's bits: {same}; nothing is timed")
    result: dict = {
        "workload": workload.name, "heads": [workload.heads, workload.kv_heads, workload.dim], "ranks": here.ranks,
        "plan": str(here.plan), "plan_ms": 1e3 * planned,
        "peak_bytes": {"one": peak(one_card, device), "all": peak(all_cards, device)},
    }  # fmt: skip
    for kind, one, many in (("forward", one_forward, all_forward), ("train", one_card, all_cards)):
        for fn in (one, many):
            fn(), fn()
        times = [(slowest(one, device), slowest(many, device)) for _ in range(rounds)]
        ratios = sorted(a / b for a, b in times)
        result[kind] = {
            "one_ms": statistics.median(a for a, _ in times),
            "all_ms": statistics.median(b for _, b in times),
            "ratio": [ratios[0], statistics.median(ratios), ratios[-1]],
        }
    if profile and device.type == "cuda":
        profiled(all_cards, device, here.rank == 0)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", default="1x131072;8192+480x256", help="packings, separated by semicolons")
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--kv-heads", type=int, default=16)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--profile", action="store_true", help="print what the first rank's card does in a training call"
    )
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    parser.add_argument("--commit", help="what to call this version, where git is not at hand")
    options = parser.parse_args()
    if "RANK" not in os.environ:
        sys.exit("start it with torchrun: torchrun --standalone --nproc-per-node 2 -m flamia.bench.parallel")
    cards = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cards else torch.device("cpu")
    if cards:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cards else "gloo", device_id=device if cards else None)
    first = dist.get_rank() == 0
    around = surroundings(str(device), options.commit)
    if first:
        print(
            f"# {dist.get_world_size()} x {around['machine']}, {around['versions']}, commit {around['commit']}",
            flush=True,
        )
    results = []
    for text in options.documents.split(";"):
        workload = Workload(text, lengths(text), options.heads, options.kv_heads, options.dim)
        result = measure(workload, options.rounds, device, options.profile)
        results.append(result)
        if first:
            print(f"{text}: {result['plan']}; plan {result['plan_ms']:.1f} ms")
            for kind in ("forward", "train"):
                row = result[kind]
                low, middle, high = row["ratio"]
                ratio = f"{middle:.3f} ({low:.3f} to {high:.3f})"
                print(f"  {kind:8s} one {row['one_ms']:.2f} ms, all {row['all_ms']:.2f} ms, ratio {ratio}")
            one, every = result["peak_bytes"]["one"], result["peak_bytes"]["all"]
            peaks = f"one {one:,}, all {every:,} bytes" if cards else "not measured on a CPU"
            print(f"  peak beside the inputs: {peaks}", flush=True)
    if first and options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({**around, "parallel": results}, indent=1) + "\n", encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
