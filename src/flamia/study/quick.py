"""The reference's arithmetic with fewer passes over memory, for documents that fill whole blocks.

The reference is written to be read: it pads every block with zeros, groups tokens by an index, and rounds in six
operations. On a card in float64 each of these is a pass over memory, and memory is all that its time is. Where every
document starts at row 0 and fills whole blocks, padding copies nothing that is needed, groups are slices, and rounding is
one kernel. `quick` puts those in place while it is open, and nothing else changes: the same sums of the same numbers.
Tests compare bits on a CPU, and `compare` does so on whatever device a study runs on, before it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

from flamia import formats, quantize
from flamia.formats import E2M1, E4M3, Format, exp2_int, scale_exponent
from flamia.packing import Documents
from flamia.quantize import NVFP4_LARGEST, Quantized
from flamia.recipe import Recipe
from flamia.reference import problem, weights
from flamia.reference.problem import Block, Problem

Rounding = Callable[[Tensor, Format], Tensor]


class OneDocument(Documents):
    """Causal, one document of whole blocks from row 0; the host knows its length and asks no device."""

    length: int

    @classmethod
    @cache  # a CUDA graph that is being captured cannot copy from the host
    def of(cls, length: int, device: torch.device) -> OneDocument:
        offsets = torch.tensor([0, length], dtype=torch.int32, device=device)
        made = cls(offsets, offsets, None, 0)
        object.__setattr__(made, "length", length)
        return made

    def spans(self) -> list[tuple[int, int, int, int]]:
        return [(0, self.length, 0, self.length)]


class Shared(Problem):
    """A problem of the backward that reads what the forward of the same call has encoded."""

    def __init__(self, forward: Problem, g: Tensor, recipe: Recipe) -> None:
        self.__dict__.update(forward.__dict__)
        self.recipe = recipe
        self.bad = {**forward.bad, "q": forward.bad["q"] | problem._not_finite(g)}
        self.tensors = {**forward.tensors, "g": problem._clean(g, len(g))}
        self._encoded = dict(forward._encoded)


def _queries(block: Block, x: Tensor) -> Tensor:
    return x[block.rows].unflatten(1, (block.problem.key_heads, -1)).movedim(0, 2)


def _key_side(block: Block, x: Tensor) -> Tensor:
    return x[block.key_rows].movedim(0, 1)


def _over_tokens(magnitude: Tensor, size: int, documents: Documents, side: str) -> Tensor:
    return magnitude.unflatten(0, (-1, size)).amax(1).repeat_interleave(size, 0)


def _nvfp4(x: Tensor, geometry: str, documents: Documents, side: str, block: int) -> Quantized:
    """`quantize._nvfp4` with one scale for sixteen elements in place of sixteen copies of it."""
    features = geometry.startswith("feature")
    groups = x.unflatten(-1, (-1, 16)) if features else x.unflatten(0, (-1, 16))
    axis = -1 if features else 1
    amax = groups.abs().amax(axis, keepdim=True)
    if features:
        common = amax.amax(-2, keepdim=True)
    else:
        common = amax.unflatten(0, (-1, block // 16)).amax((1, 2, 4), keepdim=True).squeeze(1)
        common = common.repeat_interleave(block // 16, 0)
    power = exp2_int(scale_exponent(common, E2M1, "ceil", NVFP4_LARGEST))
    local = quantize.round_to(amax / 6.0 / power, E4M3)
    scale = local * power
    units = quantize.round_to(groups / torch.where(local > 0, scale, torch.inf), E2M1)
    found = (units * scale).view_as(x)
    return Quantized(found, found.new_ones(()), bits=E2M1.bits)


def _kernel() -> Rounding | None:
    if not torch.cuda.is_available():
        return None
    try:
        from flamia.study.rounding import rounded
    except ImportError:  # no Triton
        return None
    return lambda x, fmt: rounded(x, fmt) if x.is_cuda else formats.round_to(x, fmt)


@contextmanager
def patched(*changes: tuple[Any, str, Any]) -> Iterator[None]:
    """(owner, name, value): attributes replaced while the context is open."""
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in changes]
    for owner, name, value in changes:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in reversed(before):
            setattr(owner, name, value)


_ROUNDED: list[Rounding | None] = []


def has_kernel() -> bool:
    return bool(_ROUNDED) and _ROUNDED[0] is not None


def without_kernel() -> None:
    """From now on round in several passes, as the reference does."""
    _ROUNDED[:] = [None]


@contextmanager
def quick() -> Iterator[None]:
    """While open, the reference takes documents of one length from row 0, in whole blocks, and no others."""
    if not _ROUNDED:
        _ROUNDED.append(_kernel())
    changes: list[tuple[Any, str, Any]] = [
        (Block, "queries", _queries),
        (Block, "key_side", _key_side),
        (quantize, "_over_tokens", _over_tokens),
        (quantize, "_nvfp4", _nvfp4),
    ]
    if _ROUNDED[0] is not None:
        changes += [(module, "round_to", _ROUNDED[0]) for module in (quantize, weights)]
    with patched(*changes):
        yield


def check_shape(tokens: int, length: int, recipe: Recipe) -> None:
    if length % recipe.frontier_block or tokens % length:
        raise ValueError(
            f"{tokens} tokens in documents of {length}: here all documents have one length, a multiple of the recipe's "
            f"blocks of {recipe.frontier_block}; take flamia.attention_varlen for others"
        )
    if any(cell.endswith(":tensor") for _, cell in recipe.cells) or recipe.center_k == "call":
        raise ValueError(f"{recipe}: a statistic over the whole call does not survive folding documents into heads")
