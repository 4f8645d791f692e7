"""Is a kernel as fast as its cycles, or as its watts? One launch on a cool card beside a second of them, with the clock and
the power that the driver reports meanwhile; and the same kernels on numbers that toggle fewer bits. Needs a Hopper GPU.

    PYTHONPATH=src python experiments/power/run.py out.json

flash-attn-4 is timed beside ours where it can be imported. A reading is taken 0.45 s after a loop of some 0.7 s was started; it
is left out where the loop was over by then.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time

import torch

from flamia import hopper
from flamia.packing import Documents
from flamia.recipe import Recipe

RECIPE, HEADS, DIM = Recipe.strict("mxfp8_scores"), 16, 128
PASSES = {"dK/dV": (False, True, True), "dQ": (True, False, False)}


def reading() -> list[float]:
    query = ["nvidia-smi", "--query-gpu=clocks.sm,power.draw.instant", "--format=csv,noheader,nounits"]
    return [float(x) for x in subprocess.run(query, capture_output=True, text=True, check=True).stdout.split(",")]


def timed(call, count: int) -> tuple[torch.cuda.Event, torch.cuda.Event]:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(count):
        call()
    end.record()
    return start, end


def isolated(call) -> float:
    """Milliseconds of one launch after a pause, the median of nine."""
    found = []
    for _ in range(9):
        time.sleep(0.012)
        torch.cuda._sleep(200_000)  # the launch is queued by the time the clock runs
        start, end = timed(call, 1)
        end.synchronize()
        found.append(start.elapsed_time(end))
    return statistics.median(found)


def sustained(call, one: float) -> dict:
    count = max(20, int(350 / one))
    timed(call, count)
    start, end = timed(call, count)
    time.sleep(0.45)
    meanwhile = None if end.query() else reading()
    end.synchronize()
    return {"sustained_ms": start.elapsed_time(end) / count, "clock_mhz_and_watts": meanwhile}


def on_codes(x):
    """x as its E4M3 codes stand for it: three bits of a significand in place of seven."""
    power = 2.0 ** torch.ceil(torch.log2(x.float().abs().amax(-1, keepdim=True) / 448))
    return ((x.float() / power).to(torch.float8_e4m3fn).float() * power).to(x.dtype)


def jobs(lengths: list[int]) -> dict:
    tokens = sum(lengths)
    torch.manual_seed(0)
    q, k, v, do = (torch.randn(tokens, HEADS, DIM, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    cu = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32).cuda()
    documents, scale, zero = Documents(cu, cu, None, 0), DIM**-0.5, torch.zeros_like(q)
    o, lse, residual, saved = hopper.forward_saving(q, k, v, documents, RECIPE, scale)

    def backward(wanted, q=q, k=k, do=do):
        return hopper.backward(
            do, None, q, k, None, o, lse, residual, documents, RECIPE, scale, saved=saved, wanted=wanted
        )

    found = {
        "forward": lambda: hopper.forward_saving(q, k, v, documents, RECIPE, scale),
        "forward, Q = K = 0": lambda: hopper.forward_saving(zero, zero, v, documents, RECIPE, scale),
        **{name: lambda wanted=wanted: backward(wanted) for name, wanted in PASSES.items()},
        "dK/dV, Q on codes": lambda: backward(PASSES["dK/dV"], q=on_codes(q)),
        "dK/dV, Q = 0": lambda: backward(PASSES["dK/dV"], q=zero),
        "dK/dV, dO = 0": lambda: backward(PASSES["dK/dV"], do=zero),
        "dQ, K on codes": lambda: backward(PASSES["dQ"], k=on_codes(k)),
        "dQ, K = 0": lambda: backward(PASSES["dQ"], k=zero),
    }
    try:
        from flash_attn.cute.interface import flash_attn_varlen_func
    except ImportError:
        return found
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    most = {"max_seqlen_q": max(lengths), "max_seqlen_k": max(lengths)}

    def peer():
        out = flash_attn_varlen_func(*leaves, cu_seqlens_q=cu, cu_seqlens_k=cu, causal=True, **most)
        return out[0] if isinstance(out, tuple) else out

    kept = peer()
    return found | {
        "flash-attn-4 forward": peer,
        "flash-attn-4 backward": lambda: torch.autograd.grad(kept, leaves, do, retain_graph=True),
    }


def main() -> None:
    rows = []
    for name, lengths in (("1x16384", [16384]), ("64x1024", [1024] * 64)):
        for what, call in jobs(lengths).items():
            call()
            one = isolated(call)
            rows.append({"workload": name, "what": what, "isolated_ms": one, **sustained(call, one)})
            print(rows[-1], flush=True)
    with open(sys.argv[1], "w") as file:
        json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
