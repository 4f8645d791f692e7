"""Who works when: independent tasks in processes of one thread each, as many at a time as there are cores.

One thread per process beats one process with all threads here: the tensors are small, so threads spend their time
waiting for one another. It also makes every number in the report independent of the number of cores.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty
from typing import Any

from flamia.console import Lane, Progress
from flamia.demo import tasks
from flamia.train.checkpoint import latest

Plan = dict[str, tuple[Callable[..., Any], dict[str, Any]]]
"""Name -> (function of ``tasks``, its arguments beside ``say``)."""


@dataclass
class Demo:
    """Everything the report shows."""

    audit: Any = None
    explained: list[Any] = field(default_factory=list)
    runs: list[Any] = field(default_factory=list)
    text: list[Any] = field(default_factory=list)
    accuracy: list[Any] = field(default_factory=list)
    data: str = ""
    tokens: int = 0
    """Length of the accuracy inputs."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Of each task, in its process; "total" is what the person waited."""

    @property
    def exit_code(self) -> int:
        """The audit's: 0 clean, 1 leak, 2 undecided."""
        return self.audit.exit_code

    def summary(self) -> dict[str, Any]:
        return {
            "audit": self.audit.verdict,
            "exit_code": self.exit_code,
            "controls_missed": self.audit.missed,
            "runs": [run.summary() for run in self.runs],
            "text": {
                name: {"moved": found.moved, "watched": found.watched, "largest": found.largest}
                for name, found in self.text
            },
            "accuracy": [result.to_dict() for result in self.accuracy],
            "seconds": self.seconds,
        }


def worker(name: str, messages: Any, function: Callable[..., Any], arguments: dict[str, Any]) -> tuple[Any, float]:
    """Run one task in a process of its own; progress goes back through ``messages``."""
    import torch

    torch.set_num_threads(1)
    started = time.perf_counter()
    result = function(lambda done, total, note: messages.put((name, done, total, note)), **arguments)
    return result, round(time.perf_counter() - started, 1)


@dataclass(frozen=True)
class Size:
    """How much of everything. ``audited`` None means all presets; controls always come on top."""

    audited: tuple[str, ...] | None = None
    explained: tuple[str, ...] = tasks.EXPLAINED
    read: tuple[str, ...] = tasks.READ
    measured: tuple[str, ...] = tasks.MEASURED
    steps: int = 120
    tokens: int = 1024


FULL = Size()
QUICK = Size(
    audited=("mxfp8/strict", "mxfp8/fast"),
    explained=("v_stripes_floor",),
    read=("mxfp8/strict", "v_stripes_floor"),
    measured=("bf16/strict", "mxfp8/strict"),
    steps=12,
    tokens=160,
)


def run(out: Path, *, data: Path | None = None, size: Size = FULL, processes: int | None = None) -> Demo:
    """Do all tasks and gather their results; checkpoints, logs and curves stay in ``out/train``."""
    from flamia.train import load_corpus, plots

    demo = Demo(data=str(load_corpus(data)), tokens=size.tokens)  # refuses bad data before any work
    folders = {recipe: out / "train" / recipe.replace("/", "-") for recipe in tasks.TRAINED}
    changes = {"steps": size.steps, "evaluate_every": max(1, size.steps // 4)}
    started = time.perf_counter()
    plan: Plan = {"audit": (tasks.audit_presets, {"names": size.audited})}
    for recipe, folder in folders.items():
        arguments = {"recipe": recipe, "folder": folder, "data": data, "changes": changes}
        plan[f"train {recipe}"] = (tasks.train_model, arguments)
    plan["leak maps"] = (tasks.explain_leaks, {"names": size.explained})
    plan["accuracy"] = (tasks.measure_accuracy, {"tokens": size.tokens, "names": size.measured})

    def then() -> Plan:
        probe = {"checkpoint": latest(folders[tasks.PROBED]), "data": data, "names": size.read}
        return {"real text": (tasks.read_text, probe)}

    results = work(plan, {f"train {tasks.PROBED}": then}, processes or os.cpu_count() or 1)
    demo.seconds = {name: seconds for name, (_, seconds) in results.items()}
    demo.seconds["total"] = round(time.perf_counter() - started, 1)
    demo.audit, demo.explained = results["audit"][0], results["leak maps"][0]
    demo.runs = [results[f"train {recipe}"][0] for recipe in tasks.TRAINED]
    demo.text, demo.accuracy = results["real text"][0], results["accuracy"][0]
    plots.save(plots.loss_curves(demo.runs), out / "train" / "losses.png")
    return demo


def work(plan: Plan, after: Mapping[str, Callable[[], Plan]], processes: int) -> dict[str, tuple[Any, float]]:
    """Run the plan; when a task named in ``after`` is done, what it returns is added. Name -> (result, seconds)."""
    context = multiprocessing.get_context("spawn")  # torch's threads do not survive a fork
    results: dict[str, tuple[Any, float]] = {}
    with (
        context.Manager() as manager,
        Progress(every=10.0) as progress,
        ProcessPoolExecutor(processes, mp_context=context) as pool,
    ):
        messages = manager.Queue()
        lanes: dict[str, Lane] = {}
        waiting: dict[Future[tuple[Any, float]], str] = {}

        def submit(tasks_: Plan) -> None:
            for name, (function, arguments) in tasks_.items():
                waiting[pool.submit(worker, name, messages, function, arguments)] = name

        submit(plan)
        try:
            while waiting:
                done, _ = wait(waiting, timeout=0.2, return_when=FIRST_COMPLETED)
                relay(messages, lanes, progress)
                for future in done:
                    name = waiting.pop(future)
                    results[name] = future.result()
                    if name in after:
                        submit(after[name]())
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return results


def relay(messages: Any, lanes: dict[str, Lane], progress: Progress) -> None:
    """Show what the workers have said since the last look."""
    while True:
        try:
            name, done, total, note = messages.get_nowait()
        except Empty:
            return
        if name not in lanes:
            lanes[name] = progress.lane(name)
        lanes[name].update(done, total, note)
