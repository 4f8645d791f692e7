"""How a whole language model is run: full calls, and calls through its cache.

A model is any callable ``tokens (B, T) -> logits (B, T, V)``. Modules of PyTorch and models of Hugging Face are
callables too; an output with ``logits`` is unpacked, and a cache that a Hugging Face model takes is used. For other
models ``step(tokens, cache) -> (logits, cache)``, with ``None`` as the first cache, says how they are served.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .targets import Refused

# The name that a Hugging Face model gives to its cache, in calls and in outputs alike, newest first.
CACHES = ("cache", "past_key_values", "cache_params")
MODES = ("eval", "as_is")


def parameters_of(model: nn.Module | None) -> dict[str, Any]:
    """Names in the signature of a module's forward."""
    if model is None:
        return {}
    try:
        return dict(inspect.signature(model.forward).parameters)
    except (TypeError, ValueError):
        return {}


class ModelTarget:
    """A model under audit. ``calls`` counts, ``notes`` collects what should be said."""

    def __init__(
        self,
        model: Callable[..., Any],
        *,
        module: nn.Module | None,
        step: str | Callable[..., Any] | None,
        vocabulary: int | None,
        device: str | torch.device | None,
    ) -> None:
        if not callable(model):
            raise ValueError(
                f"model is a {type(model).__name__}, which cannot be called; give a callable tokens (B, T) -> logits "
                "(B, T, V), or a torch.nn.Module"
            )
        if not (step is None or step == "auto" or callable(step)):
            raise ValueError(
                f"step={step!r}: 'auto' (the cache of a Hugging Face model, if it is one), None (serving is not "
                "audited) or a callable (tokens, cache) -> (logits, cache)"
            )
        self.model, self.module = model, module
        first = next(self.module.parameters(), None) if self.module is not None else None
        self.device = torch.device(device) if device is not None else first.device if first is not None else "cpu"
        takes = parameters_of(model if isinstance(model, nn.Module) else None)
        self.cache = next((name for name in CACHES if name in takes), None) if "use_cache" in takes else None
        self.full = {"use_cache": False} if "use_cache" in takes else {}
        self.step = self._step if step == "auto" and self.cache else step if callable(step) else None
        self.calls = 0
        self.notes: set[str] = set()
        self.vocabulary = vocabulary or self._vocabulary()

    def _vocabulary(self) -> int:
        """How many tokens there are: the model's own word for it, or as many as it has logits."""
        size = getattr(getattr(self.model, "config", None), "vocab_size", None)
        if isinstance(size, int) and size > 1:
            return size
        try:
            found = self.logits(torch.zeros(1, 2, dtype=torch.long)).shape[-1]
        except Refused as refusal:
            raise ValueError(f"vocabulary= is needed: a call with two tokens 0 was refused: {refusal}") from None
        return int(found)

    @property
    def longest(self) -> int | None:
        """As many positions as the model says it has."""
        for name in ("max_position_embeddings", "n_positions"):
            size = getattr(getattr(self.model, "config", None), name, None)
            if isinstance(size, int):
                return size
        return None

    @staticmethod
    @contextmanager
    def modes(module: nn.Module | None, mode: str) -> Iterator[None]:
        """In evaluation mode, so that dropout does not throw dice; every module gets its own mode back."""
        if mode not in MODES:
            raise ValueError(f"mode={mode!r}: 'eval' (dropout off, restored afterwards) or 'as_is'")
        was = [(m, m.training) for m in module.modules()] if module is not None and mode == "eval" else []
        try:
            for m, _ in was:
                m.training = False
            yield
        finally:
            for m, training in was:
                m.training = training

    def logits(self, tokens: Tensor) -> Tensor:
        """One full call."""
        self.calls += 1
        # A copy: a model that writes into its tokens must not spoil the next comparison.
        given = tokens.to(self.device, copy=True)
        out = self._guarded(lambda: self._unpack(self.model(given, **self.full), given))
        if not torch.equal(given.cpu(), tokens.cpu()):
            self.notes.add("the model writes into the caller's tokens")
        return out

    def served(self, tokens: Tensor, sizes: list[int]) -> Tensor:
        """The same tokens in pieces of the given sizes, through the cache."""
        step = self.step
        assert step is not None
        cache: Any = None
        parts = []
        for piece in tokens.to(self.device, copy=True).split(sizes, 1):
            self.calls += 1
            out, cache = self._guarded(partial(step, piece, cache))
            parts.append(self._guarded(partial(self._unpack, out, piece)))
        return torch.cat(parts, 1)

    def _step(self, tokens: Tensor, cache: Any) -> tuple[Any, Any]:
        """Hugging Face's way."""
        assert self.cache is not None
        out = self.model(tokens, use_cache=True, **({} if cache is None else {self.cache: cache}))
        found = next((c for c in (getattr(out, name, None) for name in CACHES) if c is not None), None)
        if found is None:
            raise ValueError(f"the model takes {self.cache} and gave none back under use_cache=True")
        return out, found

    @staticmethod
    def _guarded(fn: Callable[[], Any]) -> Any:
        try:
            with torch.no_grad():
                return fn()
        except (ValueError, RuntimeError, NotImplementedError, AssertionError, TypeError, IndexError) as error:
            said = str(error).strip().splitlines()
            raise Refused(f"{type(error).__name__}: {said[0] if said else 'no message'}") from error

    @staticmethod
    def _unpack(out: Any, tokens: Tensor) -> Tensor:
        if hasattr(out, "logits"):
            out = out.logits
        elif isinstance(out, dict) and "logits" in out:
            out = out["logits"]
        elif isinstance(out, (tuple, list)) and out:
            out = out[0]
        if not isinstance(out, Tensor) or out.dim() != 3 or out.shape[:2] != tokens.shape:
            what = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
            raise ValueError(
                f"the model returned {what} for tokens of shape {tuple(tokens.shape)}; logits (B, T, V) are needed, "
                "as a tensor, as .logits, or first in a tuple"
            )
        return out.detach()
