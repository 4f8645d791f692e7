"""Checkpoints that are whole or absent, and that continue a run bit for bit.

A file is written beside its final name, flushed to the disk and renamed: a run that is killed while saving leaves the
previous checkpoint. Older ones are removed only after that.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import torch

NAME = re.compile(r"step-(\d+)\.pt")


def save(folder: Path, step: int, content: dict[str, Any], *, keep: int = 2) -> Path:
    """Write ``folder/step-<step>.pt`` atomically, then remove all but the newest ``keep`` checkpoints."""
    if keep < 1:
        raise ValueError(f"keep = {keep} would remove the checkpoint just written; give at least 1")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step-{step:07d}.pt"
    partial = path.with_suffix(".partial")
    try:
        with partial.open("wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    for old in list_all(folder)[:-keep]:
        old.unlink()
    return path


def list_all(folder: Path) -> list[Path]:
    """The complete checkpoints in ``folder``, oldest step first."""
    if not folder.is_dir():
        return []
    found = [(int(match[1]), path) for path in folder.iterdir() if (match := NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


def remove_all(folder: Path) -> None:
    """Forget an earlier run: pruning goes by step, so its later checkpoints would outlive those of a shorter new one."""
    for old in list_all(folder):
        old.unlink()


def latest(folder: Path) -> Path | None:
    found = list_all(folder)
    return found[-1] if found else None


def load(path: Path) -> dict[str, Any]:
    """Read a checkpoint (tensors and plain values only: nothing in the file is executed)."""
    if not path.is_file():
        raise ValueError(f"checkpoint: {path} does not exist")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ValueError(f"checkpoint: {path} cannot be read ({error.__class__.__name__}: {error})") from error
    missing = {"config", "step", "model"} - set(content)
    if missing:
        raise ValueError(f"checkpoint: {path} was not written by flamia; it lacks {', '.join(sorted(missing))}")
    return content
