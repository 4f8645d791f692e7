"""A small byte-level transformer on packed text: what low-bit attention is for, and how a leak in it is found.

>>> from flamia.train import load_corpus, preset, train
>>> run = train(preset("tiny", recipe="mxfp8/strict"), load_corpus())      # doctest: +SKIP
>>> print(run.gap)                                                          # doctest: +SKIP
"""

from flamia.train.config import PRESETS, TrainConfig, preset
from flamia.train.data import Batch, Corpus, PackedStream, load_corpus
from flamia.train.evaluate import Gap, attention_for, gap, validation_batches
from flamia.train.loop import Run, Trainer, train
from flamia.train.model import Attend, Decoder, Shape

__all__ = [
    "PRESETS",
    "Attend",
    "Batch",
    "Corpus",
    "Decoder",
    "Gap",
    "PackedStream",
    "Run",
    "Shape",
    "TrainConfig",
    "Trainer",
    "attention_for",
    "gap",
    "load_corpus",
    "preset",
    "train",
    "validation_batches",
]
