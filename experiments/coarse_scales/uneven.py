"""What it costs when neighbouring keys have different scales, so that a step multiplies by a factor for every column: the
kernels on Gaussian tensors as drawn, and with every second key divided by 64, interleaved. Needs a Hopper GPU.

    PYTHONPATH=src python experiments/coarse_scales/uneven.py out.json [commit]
"""

from __future__ import annotations

import json
import pathlib
import statistics
import sys

from flamia import hopper
from flamia.bench import report, timing
from flamia.bench.workloads import chosen
from flamia.codes import encode_tokens
from flamia.packing import Documents
from flamia.recipe import Recipe

RECIPE = Recipe.strict()
WORKLOADS = ["1x32768", "4x4096", "64x1024"]
PASSES = {"dK/dV": (False, True, True), "dQ": (True, False, False)}


def main() -> None:
    found = report.surroundings("cuda", sys.argv[2] if len(sys.argv) > 2 else None)
    found["workloads"] = []
    for workload in chosen(WORKLOADS):
        q, k, v, do, cu = workload.inputs("cuda")
        documents, scale = Documents(cu, cu, None, 0), workload.dim**-0.5
        louder = k.clone()
        louder[1::2] /= 64
        calls: dict[tuple[str, str], timing.Timed] = {}
        kept = []  # a graph reads memory, not tensors: they must live as long as it does
        for name, keys in (("one scale", k), ("two scales", louder)):
            scales = encode_tokens(keys, "e4m3:coarse")[1]
            groups = scales[: len(scales) // 32 * 32].unflatten(0, (-1, 32))
            alike = (groups == groups[:, :1]).all(1).double().mean().item()
            assert (alike > 0.99) if name == "one scale" else (alike < 0.01), (name, alike)
            o, lse, rest, saved = hopper.forward_saving(q, keys, v, documents, RECIPE, scale)
            kept.append((o, lse, rest, saved))

            def forward(keys=keys):
                return hopper.forward_saving(q, keys, v, documents, RECIPE, scale)[:2]

            def backward(wanted, keys=keys, o=o, lse=lse, rest=rest, saved=saved):
                grads = hopper.backward(do, None, q, keys, None, o, lse, rest, documents, RECIPE, scale, saved, wanted)
                return [x for x, want in zip(grads, wanted) if want]

            calls["forward", name] = timing.capture(forward)
            for kind, wanted in PASSES.items():
                calls[kind, name] = timing.capture(lambda wanted=wanted, run=backward: run(wanted))
            calls["train", name] = timing.capture(lambda run=backward, fwd=forward: [*fwd(), *run((True, True, True))])
        timing.interleave(list(calls.values()), 7, 4.0)
        row = {"name": workload.name, "calls": {}}
        for kind in ("forward", *PASSES, "train"):
            one, two = (calls[kind, name].ms for name in ("one scale", "two scales"))
            ratio = statistics.median(b / a for a, b in zip(one, two))
            row["calls"][kind] = {"one": one, "two": two, "ratio": ratio}
            print(
                f"{workload.name:14s} {kind:8s} one scale {statistics.median(one):.3f} ms, two {ratio:.3f}x", flush=True
            )
        found["workloads"].append(row)
        timing.release()
    pathlib.Path(sys.argv[1]).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
