"""Does a trained model's prediction depend on text that it has not seen yet?

The audit probes attention with inputs made to cross a scale's edge. This probe is the other end of it: a trained model,
a piece of ordinary text, and the question that a reader would ask. Replace the text from some position on by other
text, predict again, and look at the predictions *before* that position. They were made from the same bytes; if one bit
of one logit moved, attention told the model something about what comes later.

The document lies behind another one in the buffer, so that its groups do not start at an aligned address, and the other
one's predictions are watched too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flamia.train.data import Corpus, pack
from flamia.train.evaluate import attention_for
from flamia.train.model import Decoder

BEFORE, LENGTH = 45, 288
"""Bytes of the document in front, and of the one whose ending is replaced."""

CUTS = tuple(range(5, LENGTH, 9))
"""Where the text is replaced from; strides of 9 fall on every residue, so on the inside of every group."""


@dataclass(frozen=True)
class TextMap:
    """change[c, i]: largest change of a logit of row i when the document's bytes from cuts[c] on are replaced.

    Rows count through the buffer: ``before`` rows of the other document, then the document. Rows at or after the cut
    are NaN: those may change.
    """

    recipe: str
    cuts: tuple[int, ...]
    before: int
    change: Tensor

    @property
    def watched(self) -> int:
        return int((~self.change.isnan()).sum())

    @property
    def moved(self) -> int:
        return int((self.change > 0).sum())

    @property
    def largest(self) -> float:
        return float(self.change.nan_to_num(0.0).max())

    @property
    def crosses_documents(self) -> bool:
        return bool((self.change[:, : self.before] > 0).any())


def passages(corpus: Corpus) -> tuple[Tensor, Tensor, Tensor]:
    """(the document in front, the document, the text that replaces its ending), all from held-out files."""
    needed = BEFORE + 2 * LENGTH
    long_enough = [file for file in corpus.validation if len(file) >= needed]
    if not long_enough:
        raise ValueError(f"data: no validation file of {corpus.source} has {needed} bytes, which the text probe needs")
    file = long_enough[0]
    # The file's beginning, then two passages from its middle: prose, code, whatever the corpus is made of.
    middle = (len(file) - 2 * LENGTH) // 2 if len(file) >= needed + 2 * BEFORE else BEFORE
    return file[:BEFORE], file[middle : middle + LENGTH], file[middle + LENGTH : middle + 2 * LENGTH]


@torch.no_grad()
def read_ahead(model: Decoder, corpus: Corpus, recipe: str, cuts: Sequence[int] = CUTS) -> TextMap:
    """Replace the ending of a document at each cut and record which earlier predictions move under ``recipe``."""
    attend = attention_for(recipe)
    front, document, other = passages(corpus)
    start = len(front)
    baseline = model(pack([front, document]), attend)
    rows = []
    for cut in cuts:
        changed = model(pack([front, torch.cat([document[:cut], other[cut:]])]), attend)
        row = (changed - baseline).abs().amax(-1)
        row[start + cut :] = torch.nan
        rows.append(row)
    return TextMap(recipe, tuple(cuts), start, torch.stack(rows))
