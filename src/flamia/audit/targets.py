"""How a callable is run: forward, backward, and what may go wrong on the way.

The auditor knows nothing of what it audits. It hands fresh copies of q, k, v to a callable, takes O, and asks
autograd (or a backward that the callable brings) for the gradients under a dO of its own choosing: dO is an
*input* of the experiment, because a suffix of dO may leak into earlier rows of dQ through a shared scale exactly
as a suffix of V leaks into earlier rows of O.

Two layouts. ``packed``: ``fn(q, k, v, cu_seqlens) -> O`` on (total, H, D) with int32 offsets. ``batched``: ``fn(q,
k, v) -> O`` on (B, T, H, D), where the rows of the batch play the documents. A tuple's first entry is O.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .contract import OPERANDS, Packing


@dataclass(frozen=True, eq=False)
class Inputs:
    """One call's operands on the packed layout: q, do (T, Hq, D); k, v (T, Hk, D)."""

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    packing: Packing

    def with_rows(self, operand: str, rows: Tensor, values: Tensor) -> Inputs:
        """A copy in which ``rows`` of one operand read ``values``."""
        out = getattr(self, operand).clone()
        out[rows] = values.to(out.dtype)
        return replace(self, **{operand: out})

    def take(self, rows: Tensor, packing: Packing) -> Inputs:
        """The same tokens gathered into another packing."""
        return Inputs(self.q[rows], self.k[rows], self.v[rows], self.do[rows], packing)


Outputs = dict[str, Tensor]  # "O" always; "dQ", "dK", "dV" where gradients exist; packed layout, on the CPU


class Refused(Exception):
    """The callable raised. Not a verdict: a length, an option or a non-finite value that it does not take."""


class Target:
    """A callable under audit, with everything needed to run it on packed inputs."""

    def __init__(
        self,
        fn: Callable[..., Any],
        *,
        layout: str = "packed",
        backward: str | Callable[..., Any] | None = "autograd",
        heads: tuple[int, int] = (4, 2),
        head_dim: int = 32,
        dtype: torch.dtype = torch.bfloat16,
        device: str | torch.device = "cpu",
    ) -> None:
        if layout not in ("packed", "batched"):
            raise ValueError(
                f"layout={layout!r}: allowed are 'packed' (fn(q, k, v, cu_seqlens)) and 'batched' (fn(q, k, v))"
            )
        if heads[1] < 1 or heads[0] % heads[1]:
            raise ValueError(f"heads={heads}: (query heads, key heads), and the second must divide the first")
        if not (backward is None or backward == "autograd" or callable(backward)):
            raise ValueError(
                f"backward={backward!r}: 'autograd', None (audit O only) or a callable(q, k, v, cu_seqlens, dO) -> "
                "(dq, dk, dv)"
            )
        self.fn, self.layout, self.heads, self.head_dim = fn, layout, heads, head_dim
        self.dtype, self.device = dtype, torch.device(device)
        own = getattr(fn, "backward", None)
        self.backward = (
            own if backward == "autograd" and callable(own) and not isinstance(fn, torch.nn.Module) else backward
        )
        self.calls = 0
        self.notes: set[str] = set()

    @property
    def has_gradients(self) -> bool:
        return self.backward is not None

    def run(self, inputs: Inputs) -> Outputs:
        """One call, forward and (where there is one) backward; raises ``Refused`` with the callable's own message."""
        self.calls += 1
        try:
            return self._run(inputs)
        except (ValueError, RuntimeError, NotImplementedError, AssertionError, TypeError, IndexError) as error:
            raise Refused(
                f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}"
            ) from error

    def _run(self, inputs: Inputs) -> Outputs:
        shape = self._shape(inputs.packing)
        # Fresh copies: a callable that writes into its operands must not spoil the next experiment.
        q, k, v, do = (self._lay(getattr(inputs, name), shape) for name in OPERANDS)
        extra: tuple[Tensor, ...] = ()
        if self.layout == "packed":
            extra = (torch.tensor(inputs.packing.offsets, dtype=torch.int32, device=self.device),)
        by_autograd = self.backward == "autograd"
        with torch.enable_grad() if by_autograd else torch.no_grad():
            if by_autograd:
                q, k, v = (x.requires_grad_() for x in (q, k, v))
            out = self.fn(q, k, v, *extra)
        if isinstance(out, (tuple, list)):
            self.notes.add("the callable returns more than O (perhaps its LSE): only the first tensor is judged")
            out = out[0]
        if not isinstance(out, Tensor):
            raise TypeError(
                f"the callable returned {type(out).__name__}; the audit needs O as a tensor, or a tuple that "
                "begins with it"
            )
        if out.shape != q.shape[:-1] + v.shape[-1:]:
            raise ValueError(
                f"the callable returned O of shape {tuple(out.shape)}; expected "
                f"{tuple(q.shape[:-1] + v.shape[-1:])} (layout={self.layout!r})"
            )
        grads = self._gradients(out, q, k, v, do, extra)
        with torch.no_grad():
            for name, kept in (("q", q), ("k", k), ("v", v)):
                if not torch.equal(
                    torch.nan_to_num(kept.detach().flatten(0, -3).cpu()), torch.nan_to_num(getattr(inputs, name))
                ):
                    self.notes.add(f"the callable writes into the caller's {name}")
        named = {"O": out, **grads}
        return {name: x.detach().reshape(inputs.packing.total, -1, x.shape[-1]).cpu() for name, x in named.items()}

    def _gradients(
        self, out: Tensor, q: Tensor, k: Tensor, v: Tensor, do: Tensor, extra: tuple[Tensor, ...]
    ) -> Outputs:
        if self.backward is None:
            return {}
        if callable(self.backward):
            with torch.no_grad():
                grads = self.backward(q, k, v, *extra, do)
        else:
            if not out.requires_grad:
                self.lose_gradients("O does not require grad: the callable has no backward under autograd")
                return {}
            try:
                grads = torch.autograd.grad(out, (q, k, v), do.to(out.dtype), allow_unused=True)
            except (RuntimeError, NotImplementedError) as error:
                if self.calls > 1:  # it worked before, so this is about these inputs
                    raise
                self.lose_gradients(f"the backward raised {type(error).__name__}: {str(error).splitlines()[0]}")
                return {}
        zeros = (torch.zeros_like(x) if g is None else g for g, x in zip(grads, (q, k, v), strict=True))
        return dict(zip(("dQ", "dK", "dV"), zeros, strict=True))

    def lose_gradients(self, why: str) -> None:
        self.backward = None
        self.notes.add(f"gradients: {why}; only O was audited")

    def _shape(self, packing: Packing) -> tuple[int, ...]:
        if self.layout == "packed":
            return (packing.total,)
        if len(set(packing.lengths)) != 1:
            raise ValueError(f"a batched callable needs equal lengths, not {packing.lengths}")
        return (len(packing.lengths), packing.lengths[0])

    def _lay(self, x: Tensor, shape: tuple[int, ...]) -> Tensor:
        return x.to(device=self.device, copy=True).reshape(*shape, *x.shape[1:])
