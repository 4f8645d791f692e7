"""What can be wrong with low-bit attention, one thing at a time, and the control that goes with each.

Each fault is a context manager that changes one step of the reference while it is open. Faults that are two recipes at
odds (an exponential approximated in the forward only, blocks of 256 in the forward and 128 in the backward, O from
another V than E) need none of this: see `plan.py`.

exact_delta     D reads the gradient of O as it was given, while E and dV read its 8-bit (or 4-bit) code
coarse_u n      U's scales are 2^n larger, so that more of U is rounded to zero, and the rest more coarsely
random_u n      as many entries of U are zeroed as coarse_u n would zero, but chosen by chance among those below four
                times its threshold; what is left is rounded as without a fault
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from flamia.formats import Format
from flamia.reference import accumulate, weights
from flamia.reference.problem import Block
from flamia.study.quick import patched

U_CELLS = ("dq_u", "dk_u")
WIDER = 2
"""random_u chooses among entries below 2^WIDER times the threshold."""


@contextmanager
def exact_delta(_: float) -> Iterator[None]:
    def delta(block: Block, p: Tensor, e: Tensor, o: Tensor, residual: Tensor) -> Tensor:
        given = block.queries(block.problem.tensors["g"]).to(torch.float64)
        return (given * block.queries(o).to(torch.float64)).sum(-1, keepdim=True)

    module = importlib.import_module("flamia.reference.backward")  # the package's own name for it is the function
    with patched((module, "delta", delta)):
        yield


def _enlarged(powers: float) -> AbstractContextManager[None]:
    """Scales of weights 2^powers larger than they would be."""
    round_to, factor = weights.round_to, 2.0**powers

    def coarse(x: Tensor, fmt: Format) -> Tensor:
        return round_to(x / factor, fmt) * factor

    return patched((weights, "round_to", coarse))


@contextmanager
def coarse_u(powers: float) -> Iterator[None]:
    plain = accumulate.Gradients._round

    def _round(self: Any, block: Any, segment: Any, cell: str, x: Tensor, before: Any = None) -> Any:
        if cell not in U_CELLS:
            return plain(self, block, segment, cell, x, before)
        with _enlarged(powers):
            return plain(self, block, segment, cell, x, before)

    with patched((accumulate.Gradients, "_round", _round)):
        yield


@contextmanager
def random_u(powers: float) -> Iterator[None]:
    plain = accumulate.Gradients._round

    def _round(self: Any, block: Any, segment: Any, cell: str, x: Tensor, before: Any = None) -> Any:
        rounded, carry = plain(self, block, segment, cell, x, before)
        if cell not in U_CELLS:
            return rounded, carry
        lost = []
        for wider in (0, WIDER):
            with _enlarged(powers + wider):
                lost.append((plain(self, block, segment, cell, x, before)[0] == 0) & (rounded != 0))
        count, candidates = (mask.sum() for mask in lost)
        chance = count / candidates.clamp(min=1)
        return torch.where(lost[1] & (torch.rand_like(rounded) < chance), 0.0, rounded), carry

    with patched((accumulate.Gradients, "_round", _round)):
        yield


FAULTS: dict[str, Callable[[float], AbstractContextManager[None]]] = {
    "exact_delta": exact_delta,
    "coarse_u": coarse_u,
    "random_u": random_u,
}
