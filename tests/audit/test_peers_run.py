"""One command for a whole machine: what crashes, hangs or cannot be had is written down and stops nobody else."""

import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from flamia.audit.controls import attend
from flamia.audit.peers import Axes, Peer
from flamia.audit.peers_run import OURS, TARGETS, parsed
from flamia.audit.peers_worker import SQUARE_LIMIT, Worker, plan

HERE = Path(__file__).parent
TOYS = ("sound", "leaky", "dies", "hangs", "device_lost", "nothere")


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    out = tmp_path_factory.mktemp("peers")
    command = [
        sys.executable, "-m", "flamia.audit.peers_run", "--out", str(out), "--device", "cpu", "--seconds", "60",
        "--targets", *(f"run_toys:{name}" for name in TOYS), "flash:4", "--lengths", "128",
        "--head-dims", "16", "--effort", "spot", "--jobs", "2", "--patience", "8",
    ]  # fmt: skip
    path = os.pathsep.join([str(HERE.parent.parent / "src"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        command, cwd=HERE, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=200
    )
    found = json.loads((out / "peers.json").read_text())
    return done, found, (out / "peers.md").read_text()


def rows(found, name):
    return [row for row in found["rows"] if row["target"] == f"run_toys:{name}"]


def test_the_sound_and_the_leaky_get_their_verdicts_beside_the_broken(ran):
    done, found, page = ran
    assert [row["verdict"] for row in rows(found, "sound")] == ["clean"] * 2
    assert [row["verdict"] for row in rows(found, "leaky")] == ["leak"] * 2
    assert done.returncode == found["exit_code"] == 1 and found["verdict"] == "leak"
    assert "| `run_toys:leaky` |" in page and "prefix O dQ" in page


def test_a_crash_costs_one_option_set(ran):
    _, found, page = ran
    grouped = [row["options"]["grouped"] for row in rows(found, "dies")]
    assert grouped == [True]  # the other one is what it died of
    assert "Fatal Python error: Aborted" in found["targets"]["run_toys:dies"]["ended"][0]
    assert found["targets"]["run_toys:dies"]["ended"][-1] == "done"
    assert [m["length"] for m in found["mass"] if m["target"] == "run_toys:dies"] == [128]
    assert "signal 6" in page


def test_a_hang_is_ended_and_the_rest_goes_on(ran):
    _, found, _ = ran
    assert found["targets"]["run_toys:hangs"]["ended"][0].endswith("did not end in 8 s")
    assert [row["options"]["grouped"] for row in rows(found, "hangs")] == [False]


def test_a_lost_device_is_no_verdict(ran):
    _, found, _ = ran
    first = rows(found, "device_lost")[0]
    assert first["verdict"] == "refused" and "illegal memory access" in first["refused"]
    assert found["targets"]["run_toys:device_lost"]["ended"][0].startswith("the device failed")


def test_what_cannot_be_had_says_why(ran):
    _, found, page = ran
    assert "has no 'nothere'" in found["targets"]["run_toys:nothere"]["words"]
    assert found["targets"]["flash:4"]["words"].startswith("ModuleNotFoundError") and "flash_attn" in page


def test_square_memory_is_not_asked_for_long_sums():
    asked = []

    def call(q, k, v, cu, options):
        asked.append(len(q))
        return attend(q, k, v, cu)

    axes = Axes(packing=("packed",), causal=(True,), windowed=(False,), grouped=(True,), dtype=(torch.bfloat16,))
    out = io.StringIO()
    peer = Peer("toy", "", lambda: (call, axes), square=True)
    assert Worker(peer, out, time.time() + 60, "cpu", 0).run((16,), "spot", (128, 2 * SQUARE_LIMIT)) == 0
    masses = [r for r in map(json.loads, out.getvalue().splitlines()) if r["kind"] == "mass"]
    assert [m["length"] for m in masses] == [128, 2 * SQUARE_LIMIT] and max(asked) < SQUARE_LIMIT
    assert masses[0]["o_bias"] < 2**-8 and masses[0]["refused"] is None and "square" in masses[1]["refused"]


def test_when_the_time_is_over_the_rest_is_not_run():
    def call(q, k, v, cu, options):
        time.sleep(0.01)
        return attend(q, k, v, cu)

    out = io.StringIO()
    axes = Axes(packing=("packed",), dtype=(torch.bfloat16,))
    Worker(Peer("toy", "", lambda: (call, axes)), out, time.time() + 0.2, "cpu", 0).run((16,), "spot", ())
    records = [json.loads(line) for line in out.getvalue().splitlines()]
    assert records[-1] == {"kind": "end", "why": "out of time"}
    assert 1 <= sum(r["kind"] == "row" for r in records) < len(records[0]["items"])


def test_the_ordinary_comes_first_and_every_head_size_is_asked():
    items = plan(Axes(dtype=(torch.bfloat16, torch.float16)), (64, 128), "quick", (4096, 1024), ("bf16",))
    assert [(i.head_dim, i.effort) for i in items[:2]] == [(64, "quick"), (128, "quick")]
    assert [i.length for i in items[2:4]] == [1024, 4096]
    rest = items[4:]
    assert {i.effort for i in rest} == {"spot"} and {i.options.dtype for i in items} == {torch.bfloat16}
    assert len(items[:2] + rest) == 2 * len(Axes(dtype=(torch.bfloat16,)).combinations())
    assert {i.head_dim for i in rest if i.options.windowed and i.options.grouped and i.options.causal} == {64, 128}


def test_by_default_it_audits_ours_and_every_peer_of_a_card():
    args = parsed(["--out", "x"])
    assert OURS in args.targets and {"flash:4", "cudnn:fp8", "varlen", "flex:eager"} <= set(args.targets)
    assert {f"sdpa:{b}" for b in ("flash", "cudnn", "efficient", "math")} <= set(TARGETS)
    assert args.device == "cuda" and args.seconds == 150 and max(args.lengths) == 131072
