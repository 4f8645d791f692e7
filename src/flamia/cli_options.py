"""What the commands share: their common options, and how they check and print."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]
Recipes = Annotated[
    list[str] | None,
    typer.Option("--recipe", "-r", help='A recipe such as "mxfp8/strict", or the name of a control; may be repeated.'),
]
Data = Annotated[
    Path | None,
    typer.Option(help="A text file or a folder of them; by default Python's own standard library."),
]
Device = Annotated[str | None, typer.Option(help='"cpu" or "cuda"; by default the GPU if there is one.')]
Threads = Annotated[int, typer.Option(min=0, help="CPU threads; 0 leaves torch's choice.")]
Seed = Annotated[int, typer.Option(help="Seed of inputs, weights and data order.")]


def set_threads(threads: int) -> None:
    if threads:
        import torch

        torch.set_num_threads(threads)


def check_device(device: str | None) -> None:
    """Refuse a device that is not here, before any work and without a traceback."""
    import torch

    if device is None:
        return
    try:
        kind = torch.device(device).type
    except RuntimeError:
        raise ValueError(f"device = {device!r}: write cpu, cuda or cuda:0") from None
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device = {device!r}: torch finds no CUDA device here")


def print_wide(value: Any) -> None:
    """Print a rich value; into a pipe wide enough for any table, since one cut to 80 columns is unreadable."""
    Console(width=None if sys.stdout.isatty() else 200).print(value)
