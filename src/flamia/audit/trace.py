"""Looking into a model while it runs, and reaching into it.

*Looking*: hooks on every module write down, for each call, a digest of what came in and what went out at every
position. Two runs whose tokens agree up to a cut must agree in all these digests up to the cut; the first module that
was given what it had before and answers otherwise is where a leak enters. Digests (a random linear form of the bits,
modulo 2^64) instead of the tensors themselves: eight bytes for each position and module, whatever the model's width.

*Reaching in*: tokens are a poor probe of shared scales, because normalisation layers make all of them about equally
loud, and under a power-of-two rule a scale that is twice as large often rounds the same. So outputs of modules are
also disturbed directly: multiplied, at the later positions of one sequence, by a power of two. A causal model that is
interfered with at later positions still owes earlier ones all their bits. ``plant`` puts a known leak into a healthy
module, which shows whether an audit would have seen one there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .controls import shared_scale

PLANTED_GROUP = 32


def by_position(x: Tensor, batch: int, tokens: int) -> Tensor | None:
    """A view of ``x`` as (batch, tokens, ...), or None where that cannot be read off the shape."""
    if x.dim() == 0:
        return None
    if x.dim() >= 2 and x.shape[0] == batch and tokens in x.shape[1:]:
        return x.movedim(1 + list(x.shape[1:]).index(tokens), 1)
    if x.shape[0] == batch * tokens:
        return x.unflatten(0, (batch, tokens))
    return None


def tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in what a module takes or gives: alone, or in tuples, lists and dictionaries."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from (t for v in value.values() for t in tensors(v))
    elif isinstance(value, (tuple, list)):
        yield from (t for v in value for t in tensors(v))


def digest(x: Tensor, batch: int, tokens: int, cut: int) -> Tensor | None:
    """(batch, tokens) int64: equal where all entries of a position are equal, NaN and signed zeros included."""
    y = by_position(x.detach(), batch, tokens)
    if y is None:
        return None
    for axis in range(2, y.dim()):
        if y.shape[axis] == tokens:  # scores: what stands behind the cut may move before it is masked
            y = y.narrow(axis, 0, cut)
    if y.is_floating_point() and y.element_size() > 1:
        whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[y.element_size()]
        y = torch.where(y.isnan(), torch.nan, y + 0.0).to(y.dtype).contiguous().view(whole)
    elif y.is_floating_point():
        y = y.contiguous().view(torch.uint8)
    bits = y.reshape(batch, tokens, -1).long()
    rng = torch.Generator().manual_seed(bits.shape[-1])
    odd = torch.randint(-(2**62), 2**62, (bits.shape[-1],), generator=rng) * 2 + 1
    return (bits * odd.to(bits.device)).sum(-1).cpu()


@dataclass
class Event:
    """One call of one module; digests of tensors whose positions can be told."""

    module: str
    kind: str
    call: int
    entered: list[Tensor]
    left: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True)
class Move:
    """A module that was seen to move at positions that should not."""

    module: str
    kind: str
    positions: tuple[int, ...]  # of the disturbed sequence, before the cut
    elsewhere: int  # positions of other sequences

    @property
    def name(self) -> str:
        return f"{self.module or 'the model itself, between its modules'} ({self.kind})"


class Trace:
    """``with Trace(model, batch, tokens, cut) as trace: model(x)``; then ``trace.events`` in order of completion."""

    def __init__(self, model: nn.Module, batch: int, tokens: int, cut: int) -> None:
        self.model, self.batch, self.tokens, self.cut = model, batch, tokens, cut
        self.events: list[Event] = []
        self._open: dict[str, list[list[Tensor]]] = {}
        self._calls: dict[str, int] = {}

    def _digests(self, value: Any) -> list[Tensor]:
        found = (digest(t, self.batch, self.tokens, self.cut) for t in tensors(value))
        return [d for d in found if d is not None]

    def __enter__(self) -> Trace:
        self._stack = ExitStack()
        for name, module in self.model.named_modules():

            def before(m: nn.Module, args: Any, kwargs: Any, name: str = name) -> None:
                self._open.setdefault(name, []).append(self._digests((args, kwargs)))

            def after(m: nn.Module, args: Any, kwargs: Any, out: Any, name: str = name) -> None:
                entered = self._open[name].pop()
                self._calls[name] = call = self._calls.get(name, 0) + 1
                self.events.append(Event(name, type(m).__name__, call, entered, self._digests(out)))

            self._stack.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
            self._stack.callback(module.register_forward_hook(after, with_kwargs=True).remove)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def _moved(x: list[Tensor], y: list[Tensor], row: int, cut: int) -> Tensor:
    """(batch, tokens) bool: what moved and should not have; empty if that cannot be told."""
    if len(x) != len(y) or not x:
        return torch.zeros(0, 0, dtype=torch.bool)
    differ = torch.stack([a != b for a, b in zip(x, y)]).any(0)
    differ[row, cut:] = False
    return differ


def _move(event: Event, other: Event, row: int, cut: int) -> Move | None:
    differ = _moved(event.left, other.left, row, cut)
    if not bool(differ.any()):
        return None
    mine = tuple(differ[row].nonzero().flatten().tolist())
    return Move(event.module, event.kind, mine, int(differ.sum()) - len(mine))


def first_moves(base: Trace, changed: Trace, row: int, cut: int) -> tuple[Move | None, Move | None]:
    """(the first module whose output moved, the first that was given what it had before and whose output moved).

    Modules complete from the inside outwards, so the second is the innermost one around the leak. The two differ where
    a leak happens in a parent's own code: then the first to show it is the next child, which was handed it.
    """
    again = {(e.module, e.call): e for e in changed.events}
    shown: Move | None = None
    for event in base.events:
        other = again.get((event.module, event.call))
        if other is None:
            continue
        move = _move(event, other, row, cut)
        if move is None:
            continue
        shown = shown or move
        if event.entered and not bool(_moved(event.entered, other.entered, row, cut).any()):
            return shown, move
    return shown, None


@contextmanager
def altered(
    model: nn.Module, names: Sequence[str], change: Callable[[Tensor], Tensor | None], given: bool = False
) -> Iterator[None]:
    """Pass the tensors that the named modules give (or are given) through ``change``; None leaves them as they are."""

    def changed(x: Any) -> Any:
        new = change(x) if isinstance(x, Tensor) and x.is_floating_point() else None
        return x if new is None else new

    def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return tuple(changed(x) for x in args), {name: changed(x) for name, x in kwargs.items()}

    def after(module: nn.Module, args: Any, out: Any) -> Any:
        return changed(out)

    with ExitStack() as stack:
        for name in names:
            module = model.get_submodule(name)
            if given:
                stack.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
            else:
                stack.callback(module.register_forward_hook(after).remove)
        yield


def times(factor: float, batch: int, tokens: int, row: int, start: int, stop: int) -> Callable[[Tensor], Tensor | None]:
    """Multiply positions start..stop-1 of one sequence."""

    def change(x: Tensor) -> Tensor | None:
        x = x.clone()
        view = by_position(x, batch, tokens)
        if view is None:
            return None
        view[row, start:stop] *= factor
        return x

    return change


def nudged(eps: float, seed: int) -> Callable[[Tensor], Tensor]:
    """Move every entry by about one unit in the last place, up or down."""

    def change(x: Tensor) -> Tensor:
        sign = torch.randint(2, x.shape, generator=torch.Generator().manual_seed(seed)).to(x.device) * 2 - 1
        return (x.double() * (1 + eps * sign)).to(x.dtype)

    return change


def planted(batch: int, tokens: int) -> Callable[[Tensor], Tensor | None]:
    """A known leak: E4M3 under one scale for each 32 positions of a sequence."""

    def change(x: Tensor) -> Tensor | None:
        view = by_position(x, batch, tokens)
        if view is None:
            return None
        x = x.clone()
        view = by_position(x, batch, tokens)
        assert view is not None
        for sequence in view:
            for g in range(0, tokens, PLANTED_GROUP):
                part = sequence[g : g + PLANTED_GROUP]
                part.copy_(shared_scale(part.reshape(len(part), 1, -1)).reshape(part.shape))
        return x

    return change


def groups_of(trace: Trace) -> dict[str, list[str]]:
    """Modules without children that gave one tensor with positions, by the last part of their name: what a disturbance
    can take hold of, in all layers at once.
    """
    out: dict[str, list[str]] = {}
    for event in trace.events:
        module = trace.model.get_submodule(event.module)
        if len(event.left) == 1 and event.module and not any(True for _ in module.children()):
            parts = [p for p in event.module.split(".") if not p.isdigit()]
            members = out.setdefault(parts[-1] if parts else event.module, [])
            if event.module not in members:
                members.append(event.module)
    return out
