"""The text of a study: Python sources that the machine has, cut into documents of one length.

By default these are the modules of this Python's standard library and of the installed torch: tens of megabytes that
every machine with a card holds, and that the versions in a result name; the SHA-256 over all files says whether another
machine has the same. A text is counted once however often it occurs, a file's side (to train on, or held out) is decided
by its contents, and what is left of a file behind its last whole piece is dropped: here documents have one length, so
that shapes never change.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flamia.train.data import IGNORED, as_tensor, find_files, standard_library

HELD_OUT = 0.05
"""Share of the files, by their hash."""
ORDER_SEED = 20
"""Of the order of the pieces: one for all runs, whatever the seed of their weights."""


@dataclass(frozen=True)
class Text:
    """train, held_out: (pieces, length) uint8, each a document, in the order in which they are used."""

    train: Tensor
    held_out: Tensor
    facts: dict[str, Any]


def default_sources() -> list[Path]:
    return [standard_library(), Path(torch.__file__).parent]


def read(sources: Sequence[Path], length: int, *, suffix: str | None = ".py") -> Text:
    """The files under `sources`, folders or single files; suffix: of the files of a folder that count, None for all text."""
    contents: dict[bytes, bytes] = {}
    for source in sources:
        for path in find_files(source):
            if suffix is None or path.name.endswith(suffix) or path == source:
                content = path.read_bytes()
                contents[hashlib.sha256(content).digest()] = content
    limit = int(HELD_OUT * 2**64)
    order = sorted(contents)
    pieces: dict[bool, list[Tensor]] = {True: [], False: []}
    for digest in order:
        whole = as_tensor(contents[digest]) if contents[digest] else torch.zeros(0, dtype=torch.uint8)
        side = pieces[int.from_bytes(digest[:8], "big") <= limit]
        side += [piece for piece in whole.split(length) if len(piece) == length]
    if not pieces[True] or not pieces[False]:
        raise ValueError(
            f"{', '.join(map(str, sources))}: too little text to train on and to hold out documents of {length} bytes"
        )
    train, held_out = (_shuffled(torch.stack(pieces[side])) for side in (False, True))
    facts = {
        "sources": [f"{source.name} ({suffix or 'all text'})" for source in sources],
        "files": len(order),
        "bytes": sum(map(len, contents.values())),
        "sha256": hashlib.sha256(b"".join(order)).hexdigest(),
        "train_bytes": train.numel(),
        "held_out_bytes": held_out.numel(),
    }
    return Text(train, held_out, facts)


def given(path: str | None, length: int) -> Text:
    """The text of a command's --text, a file or a folder of any text; the default sources where none is named."""
    return read([Path(path)], length, suffix=None) if path else read(default_sources(), length)


def _shuffled(pieces: Tensor) -> Tensor:
    return pieces[torch.randperm(len(pieces), generator=torch.Generator().manual_seed(ORDER_SEED))]


def batches(pieces: Tensor, documents: int, count: int) -> Tensor:
    """(count, documents, length) from the front, going round where there are fewer."""
    index = torch.arange(count * documents) % len(pieces)
    return pieces[index].unflatten(0, (count, documents))


def targets(tokens: Tensor) -> Tensor:
    """The next byte of each, int64; nothing is predicted across a document's end."""
    following = tokens.long().roll(-1, -1)
    following[..., -1] = IGNORED
    return following
