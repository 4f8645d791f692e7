"""Bytes of real text, packed without padding.

A document is a file, or a piece of one where the file is longer than the context. Documents are laid end to end until a
batch holds exactly the number of tokens asked for; the one that does not fit is cut, and its rest opens the next batch
as a document of its own. So no token is padding, every batch costs the same, and documents start at arbitrary offsets:
the layout for which packed attention exists, and the one in which groups counted by address would leak.

Nothing is predicted across a document's end: its last byte has no target.

The order is a function of the seed alone, never of the recipe, and the position of the stream is four integers, so a
run resumes at the byte where it stopped and two recipes are compared on the same batches in the same order.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

IGNORED = -100
"""Target of a token that predicts nothing: what ``cross_entropy`` skips."""

SUFFIXES = (".py", ".txt", ".rst", ".md", ".html", ".c", ".h", ".cpp", ".cu", ".toml", ".json", ".tex")
SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "node_modules"})


def standard_library() -> Path:
    """The folder of this Python's own sources: a few megabytes of real text that every machine with Python has."""
    return Path(sysconfig.get_paths()["stdlib"])


def find_files(path: Path) -> list[Path]:
    """The text files under ``path`` in an order that the file system does not decide: sorted by relative POSIX path."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise ValueError(f"data: {path} is neither a file nor a folder; give a text file or a folder of text files")
    found = []
    for folder, folders, names in os.walk(path):
        folders[:] = [name for name in folders if name not in SKIPPED_FOLDERS and not name.startswith(".")]
        found += [Path(folder, name) for name in names if name.endswith(SUFFIXES)]
    return sorted(found, key=lambda file: file.relative_to(path).as_posix())


@dataclass(frozen=True)
class Corpus:
    """Two disjoint lists of files (uint8 tensors) and what they came from."""

    train: tuple[Tensor, ...]
    validation: tuple[Tensor, ...]
    source: str
    fingerprint: str

    @property
    def train_bytes(self) -> int:
        return sum(len(file) for file in self.train)

    @property
    def validation_bytes(self) -> int:
        return sum(len(file) for file in self.validation)

    def __str__(self) -> str:
        return (
            f"{self.source}: {_amount(self.train, self.train_bytes)} to train on; "
            f"{_amount(self.validation, self.validation_bytes)} to validate on"
        )


def _amount(files: tuple[Tensor, ...], size: int) -> str:
    text = f"{size / 1e6:.1f} MB" if size >= 1e6 else f"{size / 1e3:.1f} kB"
    return f"{len(files)} file{'s' if len(files) != 1 else ''}, {text}"


def load_corpus(path: str | Path | None = None, *, validation: float = 0.05) -> Corpus:
    """Read the text under ``path`` (default: the Python standard library found on this machine) and split it.

    A file's side is decided by the hash of its contents: copies of one text cannot stand on both sides, and adding a
    file moves no other (but in a folder so small that its share rounds to nothing: there the smallest hash is held
    out). A single file is cut instead, its last ``validation`` share being held out.
    """
    if not 0 < validation < 1:
        raise ValueError(f"validation: {validation} is not a share; give a number between 0 and 1")
    root = standard_library() if path is None else Path(path)
    files = find_files(root)
    contents = [content for content in (file.read_bytes() for file in files) if content]
    if not contents:
        raise ValueError(f"data: {root} holds no text; looked for files that end in {' '.join(SUFFIXES)}")
    if len(contents) == 1:
        cut = int(len(contents[0]) * (1 - validation))
        sides = [(contents[0][:cut], False), (contents[0][cut:], True)]
    else:
        hashes = [int.from_bytes(hashlib.sha256(content).digest()[:8], "big") for content in contents]
        limit = max(int(validation * 2**64), min(hashes))
        sides = [(content, number <= limit) for content, number in zip(contents, hashes)]
    train = tuple(as_tensor(content) for content, held_out in sides if content and not held_out)
    held = tuple(as_tensor(content) for content, held_out in sides if content and held_out)
    if not train or not held:
        raise ValueError(f"data: {root} holds too little text to split; {len(contents)} files gave an empty side")
    total = hashlib.sha256()
    for content, held_out in sides:
        total.update(hashlib.sha256(content).digest() + bytes([held_out]))
    return Corpus(train, held, str(root), total.hexdigest()[:16])


def as_tensor(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


@dataclass(frozen=True)
class Batch:
    """``tokens`` bytes of whole and cut documents, laid end to end.

    tokens, targets, positions: (T,) int64; cu_seqlens: (documents + 1,) int32; lengths: the same on the host.
    """

    tokens: Tensor
    targets: Tensor
    positions: Tensor
    cu_seqlens: Tensor
    lengths: tuple[int, ...]

    def to(self, device: torch.device | str) -> Batch:
        tensors = (self.tokens, self.targets, self.positions, self.cu_seqlens)
        tokens, targets, positions, cu_seqlens = (x.to(device, non_blocking=True) for x in tensors)
        return Batch(tokens, targets, positions, cu_seqlens, self.lengths)


def pack(documents: list[Tensor]) -> Batch:
    """Lay documents (uint8, none empty) end to end; positions restart and nothing is predicted across an end."""
    lengths = tuple(len(document) for document in documents)
    tokens = torch.cat(documents).long()
    ends = torch.tensor(lengths).cumsum(0)
    targets = tokens.roll(-1)
    targets[ends - 1] = IGNORED
    positions = torch.cat([torch.arange(length) for length in lengths])
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int64), ends]).to(torch.int32)
    return Batch(tokens, targets, positions, cu_seqlens, lengths)


class PackedStream:
    """An endless, seeded sequence of batches of exactly ``tokens`` tokens.

    Each epoch visits every piece of every file once, in a fresh order. The state is where the stream stands: epoch,
    place in the epoch's order, and how much of the piece there has been given out.
    """

    def __init__(self, files: tuple[Tensor, ...], *, tokens: int, context: int, seed: int) -> None:
        if tokens < 2 or context < 2:
            raise ValueError(f"tokens = {tokens} and context = {context} must both be at least 2")
        self.pieces = [piece for file in files for piece in file.split(context)]
        self.tokens, self.seed = tokens, seed
        self.epoch = self.place = self.offset = 0
        self._order = self._shuffled()

    def _shuffled(self) -> list[int]:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        return torch.randperm(len(self.pieces), generator=generator).tolist()

    def next(self) -> Batch:
        documents, room = [], self.tokens
        while room:
            if self.place == len(self.pieces):
                self.epoch, self.place = self.epoch + 1, 0
                self._order = self._shuffled()
            rest = self.pieces[self._order[self.place]][self.offset :]
            taken = rest[:room]
            documents.append(taken)
            room -= len(taken)
            if len(taken) < len(rest):
                self.offset += len(taken)
            else:
                self.place, self.offset = self.place + 1, 0
        return pack(documents)

    def state(self) -> dict[str, int]:
        return {"seed": self.seed, "epoch": self.epoch, "place": self.place, "offset": self.offset}

    def restore(self, state: dict[str, int]) -> None:
        self.seed, self.epoch = state["seed"], state["epoch"]
        self.place, self.offset = state["place"], state["offset"]
        self._order = self._shuffled()
