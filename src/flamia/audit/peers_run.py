"""Every attention of a machine in one command, within a budget, whatever any of them does.

    python -m flamia.audit.peers_run --out DIR                     on a GPU; needs torch and whatever peers are installed
    python -m flamia.audit.peers_run --out DIR --device cpu --targets sdpa:math flex:eager --seconds 60

Each target runs in a process of its own (``peers_worker``), several at a time, since an audit keeps one core of the host
busy and a GPU hardly at all. What one process cannot import, refuses, crashes on or does not end is written down in its
own words; a process that died, or did not come back from one option set for ``--patience`` seconds, is started again
behind that set as long as its time lasts. Time is shared out among the targets as they come up, and ``--seconds`` is
kept: what is unfinished then is ended.

DIR gets ``peers.json`` (schema below), ``peers.md`` (tables to read), ``records/`` and ``logs/`` of the processes. Exit
code 0 if all that ran is clean, 1 if something leaks, 2 otherwise.

    schema 1; verdict; exit_code; seconds; machine {name: text}; seed; effort
    targets {name: {name, version, about, words, items, head_dims, ended [text]}}
    rows [peer_report's rows with head_dim, effort, words, alike, seconds]
    mass [{target, head_dim, options, heads, seconds, and mass.Mass}]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from flamia import jsonable

from .peer_modules import peers
from .peers import SHORT
from .peers_table import markdown
from .peers_worker import FATAL, LENGTHS, work
from .report import EXIT

OURS = "flamia:mxfp8_scores/strict"
# In the order in which they are started: those that compile longest first.
TARGETS = (
    "flash:4", OURS, "cudnn:fp8", "cudnn:fp8-current", "flex:eager", "varlen", "sdpa:flash", "sdpa:cudnn", "sdpa:efficient",
    "sdpa:math", "sdpa:default", "sdpa:overrideable",
)  # fmt: skip
RESTARTS = 3
GRACE = 0.06  # of a target's time, kept back so that what has begun may end


@dataclass
class Running:
    """One target's process, and what it wrote so far."""

    name: str
    records: Path
    log: Path
    deadline: float
    process: subprocess.Popen[bytes] | None = None
    read: int = 0
    starts: int = 0
    skip: int = 0
    written: int = 0  # bytes of the log before this start
    seen: list[dict[str, Any]] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    told: set[str] = field(default_factory=set)  # refusals that were printed once

    def news(self) -> list[dict[str, Any]]:
        """Records written since the last look; half a line is left for the next."""
        if not self.records.exists():
            return []
        with self.records.open("rb") as source:
            source.seek(self.read)
            whole = source.read()
        whole = whole[: whole.rfind(b"\n") + 1]
        self.read += len(whole)
        new = [json.loads(line) for line in whole.decode().splitlines()]
        self.seen += new
        return new

    def last(self, kind: str) -> dict[str, Any] | None:
        return next((r for r in reversed(self.seen) if r["kind"] == kind), None)

    def unfinished(self) -> dict[str, Any] | None:
        """What this process began and has no result."""
        begun = self.last("begin")
        begun = begun if begun and begun["item"] >= self.skip else None
        done = any(r["kind"] in ("row", "mass") and begun and r["item"] == begun["item"] for r in self.seen)
        return None if done else begun


def last_words(run: Running) -> str:
    """What the process said in the end: faulthandler's headline, or its last line."""
    text = run.log.read_bytes()[run.written :].decode(errors="replace")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    fault = [line for line in lines if line.startswith("Fatal Python error")]
    return (fault or lines or ["no word"])[-1][:300]


def start(run: Running, args: argparse.Namespace) -> None:
    run.starts += 1
    command = [
        sys.executable, "-m", "flamia.audit.peers_run", "--worker", run.name, "--out", str(run.records), "--deadline",
        str(run.deadline), "--device", args.device, "--seed", str(args.seed), "--effort", args.effort, "--threads",
        str(args.threads), "--skip", str(run.skip), "--head-dims", *map(str, args.head_dims), "--lengths",
        *map(str, args.lengths), "--dtypes", *args.dtypes,
    ]  # fmt: skip
    # Without it torch's deterministic mode refuses every matrix product of a GPU.
    environment = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"} | os.environ
    with run.log.open("ab") as log:
        run.written = log.tell()
        run.process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)


def look(run: Running, args: argparse.Namespace, hard: float) -> bool:
    """Has this target come to its end? A process that died or hangs is started again behind what did it."""
    process, now = run.process, time.time()
    assert process is not None
    code, stuck = process.poll(), run.unfinished()
    if code is None:
        late = stuck is not None and now - stuck["at"] > args.patience
        if now < hard and not late:
            return False
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if now >= hard:
            run.ended.append(f"out of time in {stuck['what']}" if stuck else "out of time")
            return True
        assert stuck is not None
        run.ended.append(f"{stuck['what']} did not end in {args.patience:.0f} s")
    else:
        run.news()
        end = (run.last("end") or {"why": "done"})["why"]
        if code == 0:
            run.ended.append(str(end))
            return True
        where = stuck["what"] if (stuck := run.unfinished()) else "its start" if code != FATAL else "the last set"
        died = f"signal {-code}" if code < 0 else f"exit code {code}"
        if code == FATAL:
            run.ended.append(f"the device failed: {end}")
        else:
            run.ended.append(f"the process died ({died}) in {where}: {last_words(run)}")
    begun = run.last("begin")
    if begun is None or run.starts > RESTARTS or now > run.deadline:
        return True
    run.skip = begun["item"] + 1
    start(run, args)
    return False


def say(begin: float, run: Running, record: dict[str, Any]) -> None:
    """One line of progress; a refusal in the same words is told once."""
    kind, text, words = record["kind"], "", record.get("refused")
    if words in run.told:
        return
    if words:
        run.told.add(words)
    if kind == "target" and run.starts < 2:
        text = record["words"] or f"{len(record['items'])} items; version {record['version']}"
    elif kind == "row":
        text = f"{record['effort']} D {record['head_dim']} {' '.join(record['words'])}: {record['verdict']}"
        text += f" ({record['moved']})" if record["moved"] else ""
    elif kind == "mass":
        text = f"{record['length']} tokens: " + (record["refused"] or f"O off by {record['o_bias']:.2g}")
    if text:
        print(f"{time.time() - begin:6.1f} s  {run.name:<28} {text[:200]}", flush=True)


def machine(device: str) -> dict[str, str]:
    facts = {
        "python": platform.python_version(), "torch": torch.__version__, "system": platform.platform(),
        "cores": str(os.cpu_count()),
    }  # fmt: skip
    try:
        import triton

        facts["triton"] = triton.__version__
    except ImportError:
        facts["triton"] = "not installed"
    if torch.device(device).type == "cuda":
        facts["device"] = torch.cuda.get_device_name()
        facts["cudnn"] = str(torch.backends.cudnn.version())
        facts["cuda"] = str(torch.version.cuda)
    return facts


def run_all(args: argparse.Namespace) -> dict[str, Any]:
    """Start, watch and end the processes; return the document."""
    begin = time.time()
    end = begin + args.seconds
    for folder in ("records", "logs"):
        (args.out / folder).mkdir(parents=True, exist_ok=True)
    waiting, done = list(args.targets), list[Running]()
    running: list[tuple[Running, float]] = []
    jobs = args.jobs or max(1, min(len(waiting), (os.cpu_count() or 2) - 1))
    while waiting or running:
        while waiting and len(running) < jobs:
            name, now = waiting.pop(0), time.time()
            # With jobs at a time, whoever starts now and those that wait behind share what is left in so many turns.
            turns = -(-(len(waiting) + 1) // jobs)
            share = (end - now) / turns
            file = re.sub(r"[^\w.]+", "-", name)
            records, log = args.out / "records" / f"{file}.jsonl", args.out / "logs" / f"{file}.txt"
            for old in (records, log):
                old.unlink(missing_ok=True)
            run = Running(name, records, log, now + share * (1 - GRACE))
            start(run, args)
            running.append((run, now + share))
        time.sleep(0.1)
        for pair in list(running):
            run, hard = pair
            for record in run.news():
                say(begin, run, record)
            if look(run, args, hard):
                running.remove(pair)
                done.append(run)
                print(f"{time.time() - begin:6.1f} s  {run.name:<28} ended: {'; '.join(run.ended)[:300]}", flush=True)
    return document(done, args, time.time() - begin)


def document(runs: Sequence[Running], args: argparse.Namespace, seconds: float) -> dict[str, Any]:
    order = {name: n for n, name in enumerate(args.targets)}
    runs = sorted(runs, key=lambda r: order[r.name])
    targets, rows, masses = {}, [], []
    for run in runs:
        head = run.last("target") or {"name": run.name, "version": None, "about": "", "words": None, "items": []}
        targets[run.name] = {k: v for k, v in head.items() if k != "kind"} | {"ended": run.ended}
        if run.last("target") is None:
            targets[run.name]["words"] = run.ended[-1] if run.ended else "did not start"
        for r in run.seen:
            plain = {k: v for k, v in r.items() if k != "kind"}
            if r["kind"] == "row":
                rows.append(plain)
            elif r["kind"] == "mass":
                masses.append({"target": run.name} | plain)
    verdicts = {r["verdict"] for r in rows} - {"refused"}
    verdict = "leak" if "leak" in verdicts else "clean" if verdicts == {"clean"} else "undecided"
    return {
        "schema": 1, "verdict": verdict, "exit_code": EXIT[verdict], "seconds": round(seconds, 1),
        "machine": machine(args.device), "seed": args.seed, "effort": args.effort, "targets": targets, "rows": rows,
        "mass": masses,
    }  # fmt: skip


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m flamia.audit.peers_run", description="Audit every attention of a machine within a budget."
    )
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder for peers.json, peers.md, records/ and logs/")
    add("--seconds", type=float, default=150.0, help="in all")
    add("--targets", nargs="+", default=list(TARGETS), help="of flamia audit --list-targets, or module:function")
    add("--device", default="cuda")
    add("--effort", default="quick", help="of each target's ordinary call; every other option set gets spot")
    add("--head-dims", nargs="+", type=int, default=[64, 128])
    add("--dtypes", nargs="+", default=["bf16"], choices=sorted(SHORT.values()))
    add("--lengths", nargs="*", type=int, default=list(LENGTHS), help="whose sums are read (the mass contract)")
    add("--jobs", type=int, default=0, help="targets at a time; 0: as many as there are cores, less one")
    add("--patience", type=float, default=60.0, help="seconds for one option set, compilation included")
    add("--threads", type=int, default=1, help="CPU threads of each")
    add("--seed", type=int, default=0)
    for name, kind in (("--worker", str), ("--deadline", float), ("--skip", int)):
        add(name, type=kind, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parsed(argv)
    if args.worker:
        return work(
            args.worker, args.out, args.deadline, args.device, args.seed, tuple(args.head_dims), args.effort,
            tuple(args.lengths), args.skip or 0, args.threads, tuple(args.dtypes),
        )  # fmt: skip
    known = {peer.name for peer in peers()}
    strangers = [name for name in args.targets if name not in known and ":" not in name]
    if strangers:
        raise SystemExit(f"--targets {' '.join(strangers)}: unknown; known are {', '.join(sorted(known))}")
    if torch.device(args.device).type == "cuda" and not torch.cuda.is_available():
        raise SystemExit(f"--device {args.device}: torch finds no CUDA device here; --device cpu audits what a CPU can")
    found = run_all(args)
    (args.out / "peers.json").write_text(jsonable.text(found) + "\n", encoding="utf-8")
    (args.out / "peers.md").write_text(markdown(found), encoding="utf-8")
    print(f"{args.out / 'peers.md'}: {found['verdict']}, {found['seconds']} s", flush=True)
    return int(found["exit_code"])


if __name__ == "__main__":
    sys.exit(main())
