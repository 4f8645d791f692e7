"""Progress and complaints, for people and for logs.

Progress goes to standard error, so that standard output stays what a command was asked for: a bar on a terminal,
elsewhere one plain line every few seconds and one at the end. ``require`` is how a command says which extra it needs.
"""

from __future__ import annotations

import importlib
import sys
import time
from types import ModuleType, TracebackType
from typing import Any, TextIO


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


class Progress:
    """``with Progress("audit", 12) as progress: progress.update(3, "mxfp8/strict")``."""

    def __init__(self, title: str, total: int, *, stream: TextIO | None = None, every: float = 5.0) -> None:
        self.title, self.total, self.every = title, total, every
        self.stream = stream or sys.stderr
        self._bar: Any = None
        self._task: Any = None
        self._said = time.monotonic()

    def __enter__(self) -> Progress:
        if self.stream.isatty():
            rich = require("rich.progress")
            console = require("rich.console").Console(file=self.stream)
            self._bar = rich.Progress(
                rich.TextColumn("{task.description}", style="bold"),
                rich.BarColumn(bar_width=32),
                rich.MofNCompleteColumn(),
                rich.TextColumn("{task.fields[note]}"),
                rich.TimeRemainingColumn(),
                console=console,
            )
            self._task = self._bar.add_task(self.title, total=self.total, note="")
            self._bar.start()
        return self

    def update(self, done: int, note: str = "") -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=done, note=note)
        elif done >= self.total or time.monotonic() - self._said >= self.every:
            self._said = time.monotonic()
            print(f"{self.title}  {done}/{self.total}  {note}".rstrip(), file=self.stream, flush=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
