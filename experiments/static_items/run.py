"""Items drawn from a counter, or dealt out beforehand? The library's kernels beside copies of them in which CTA c takes
items c, 2G - 1 - c, 2G + c, .. of the list (G CTAs; there and back, longest first), interleaved. Needs a Hopper GPU.

    PYTHONPATH=src python experiments/static_items/run.py out.json [commit]

The copies differ in the lines that draw, and bits must be equal: which CTA computes an item changes nothing in it.
"""

from __future__ import annotations

import importlib
import json
import pathlib
import re
import shutil
import statistics
import sys
import tempfile
from types import ModuleType

import torch

from flamia import hopper
from flamia.bench import report, timing
from flamia.bench.workloads import chosen
from flamia.packing import Documents
from flamia.recipe import Recipe

RECIPE = Recipe.strict()
PASSES = {"dK/dV": (False, True, True), "dQ": (True, False, False)}
WORKLOADS = ["1x16384", "16x4096", "8192+224x256", "64x1024", "log-uniform"]
THERE_AND_BACK = """

@gluon.jit
def dealt(t):
    \"\"\"The item after t in this CTA's share.\"\"\"
    count = gl.num_programs(0)
    turn = t // count + 1
    c = gl.program_id(0)
    return turn * count + gl.where(turn % 2 == 0, c, count - 1 - c)
"""


def copy_with_dealt_items() -> ModuleType:
    home = pathlib.Path(tempfile.mkdtemp())
    source = home / "dealt_hopper"
    shutil.copytree(pathlib.Path(hopper.__file__).parent, source)
    common = source / "common.py"
    common.write_text(common.read_text() + THERE_AND_BACK)
    for name in ("forward", "dkv", "dq"):
        file = source / f"{name}.py"
        text = file.read_text()
        text, drawn = re.subn(r"gl\.atomic_add\(COUNTS \+ \d, 1\)", "dealt(t)", text)
        assert drawn >= 2
        text = text.replace("t = dealt(t)", "t = gl.program_id(0)", 1)
        file.write_text(text.replace("from .common import (", "from .common import (\n    dealt,", 1) if "import (" in text
                        else text.replace("from .common import ", "from .common import dealt, ", 1))  # fmt: skip
    sys.path.insert(0, str(home))
    return importlib.import_module("dealt_hopper")


def main() -> None:
    rooms = {"drawn": hopper, "dealt": copy_with_dealt_items()}
    found = report.surroundings("cuda", sys.argv[2] if len(sys.argv) > 2 else None)
    found["workloads"] = []
    for workload in chosen(WORKLOADS):
        q, k, v, do, cu = workload.inputs("cuda")
        documents, scale = Documents(cu, cu, None, 0), workload.dim**-0.5
        calls: dict[tuple[str, str], timing.Timed] = {}
        bits, kept = [], []  # a graph reads memory, not tensors: they must live as long as it does
        for name, room in rooms.items():
            o, lse, rest, saved = room.forward_saving(q, k, v, documents, RECIPE, scale)
            kept.append((o, lse, rest, saved))

            def backward(wanted, room=room, o=o, lse=lse, rest=rest, saved=saved):
                grads = room.backward(do, None, q, k, None, o, lse, rest, documents, RECIPE, scale, saved, wanted)
                return [x for x, want in zip(grads, wanted) if want]

            def forward(room=room):
                return room.forward_saving(q, k, v, documents, RECIPE, scale)[:2]

            bits.append([o, *backward((True, True, True))])
            calls["forward", name] = timing.capture(forward)
            for kind, wanted in PASSES.items():
                calls[kind, name] = timing.capture(lambda wanted=wanted, run=backward: run(wanted))
            calls["train", name] = timing.capture(lambda run=backward, fwd=forward: [*fwd(), *run((True, True, True))])
        assert all(torch.equal(a, b) for a, b in zip(*bits)), workload.name
        timing.interleave(list(calls.values()), 7, 4.0)
        row = {"name": workload.name, "calls": {}}
        for kind in ("forward", *PASSES, "train"):
            drawn, dealt = (calls[kind, name].ms for name in rooms)
            ratio = statistics.median(b / a for a, b in zip(drawn, dealt))
            row["calls"][kind] = {"drawn": drawn, "dealt": dealt, "ratio": ratio}
            print(
                f"{workload.name:14s} {kind:8s} drawn {statistics.median(drawn):.3f} ms, dealt out {ratio:.3f}x",
                flush=True,
            )
        found["workloads"].append(row)
        timing.release()
    pathlib.Path(sys.argv[1]).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
