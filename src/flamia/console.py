"""Progress and complaints, for people and for logs.

Progress goes to standard error, so that standard output stays what a command was asked for: bars on a terminal,
elsewhere plain lines every few seconds and one at each end. ``require`` is how a command says which extra it needs.
``emit`` is standard output where a program reads it.
"""

from __future__ import annotations

import importlib
import sys
import time
from dataclasses import dataclass
from types import ModuleType, TracebackType
from typing import Any, TextIO

from flamia import jsonable


class MissingExtra(ImportError):
    """A command needs a package that the core library does not depend on."""


def require(name: str) -> ModuleType:
    """Import a package of the ``cli`` extra, or say what to install."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name.split(".")[0]:
            raise
        raise MissingExtra(f"this needs {error.name}, which is not installed: pip install 'flamia[cli]'") from None


def emit(value: Any) -> None:
    """One JSON document on standard output, as ``jsonable`` writes it."""
    print(jsonable.text(value, indent=2))


@dataclass
class Lane:
    """One piece of work: a bar, or lines that begin with its title."""

    progress: Progress
    title: str
    said: float
    finished: bool = False
    bar: Any = None

    def update(self, done: int, total: int, note: str = "") -> None:
        self.progress.show(self, done, total, note)


class Progress:
    """``with Progress() as progress: lane = progress.lane("audit"); lane.update(3, 12, "mxfp8/strict")``."""

    def __init__(self, *, stream: TextIO | None = None, every: float = 5.0) -> None:
        self.every = every
        self.stream = stream or sys.stderr
        self._bars: Any = None

    def __enter__(self) -> Progress:
        if self.stream.isatty():
            rich = require("rich.progress")
            console = require("rich.console").Console(file=self.stream)
            self._bars = rich.Progress(
                rich.TextColumn("{task.description}", style="bold"),
                rich.BarColumn(bar_width=24),
                rich.MofNCompleteColumn(),
                rich.TimeElapsedColumn(),
                rich.TextColumn("{task.fields[note]}"),
                console=console,
            )
            self._bars.start()
        return self

    def lane(self, title: str) -> Lane:
        lane = Lane(self, title, said=time.monotonic())
        if self._bars is not None:
            lane.bar = self._bars.add_task(title, total=None, note="")
        return lane

    def show(self, lane: Lane, done: int, total: int, note: str) -> None:
        if self._bars is not None:
            self._bars.update(lane.bar, completed=done, total=total, note=note)
            return
        ending = done >= total and not lane.finished
        if ending or time.monotonic() - lane.said >= self.every:
            lane.said, lane.finished = time.monotonic(), done >= total
            print(f"{lane.title}  {done}/{total}  {note}".rstrip(), file=self.stream, flush=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bars is not None:
            self._bars.stop()
