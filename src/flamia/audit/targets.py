"""How a callable is run: forward, backward, and what may go wrong on the way.

The auditor knows nothing of what it audits. It hands fresh copies of q, k, v to a callable, takes O, and asks
autograd (or a backward that the callable brings) for the gradients under a dO of its own choosing: dO is an
*input* of the experiment, because a suffix of dO may leak into earlier rows of dQ through a shared scale exactly
as a suffix of V leaks into earlier rows of O.

Two layouts. ``packed``: ``fn(q, k, v, cu_seqlens) -> O`` on (total, H, D) with int32 offsets, ``fn(q, k, v,
cu_seqlens_q, cu_seqlens_k) -> O`` where the numbers of queries and keys differ. ``batched``: ``fn(q, k, v) -> O`` on (B,
T, H, D), where the rows of the batch play the documents.

A tuple's first entry is O. Is the second one shaped as an LSE, (H, T) or (T, H), behind the batch if there is one, it is
judged too. Where a gradient flows through it, the dLSE of a row is the first entry of its dO, and so is disturbed with it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .contract import OPERANDS, SIDE, Packing, Rows


@dataclass(frozen=True, eq=False)
class Inputs:
    """One call's operands on the packed layout: q, do (queries, Hq, D); k, v (keys, Hk, D)."""

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

    def take(self, rows: Rows, packing: Packing) -> Inputs:
        """The same tokens gathered into another packing."""
        return Inputs(self.q[rows["q"]], self.k[rows["k"]], self.v[rows["k"]], self.do[rows["q"]], packing)


# "O" always; "LSE" (T, H, 1) if it is returned; "dQ", "dK", "dV" where gradients exist; packed layout, on the CPU
Outputs = dict[str, Tensor]


class Refused(Exception):
    """The callable raised. Not a verdict: a length, an option or a non-finite value that it does not take."""


class _NotThroughLse(Exception):
    """The backward raised when it was given a gradient of the LSE as well."""


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
        self.lse_gradient = True  # ask for the gradient through the LSE, where there is one
        self.through_lse = False  # whether the last call's gradients had a part of it
        self.notes: set[str] = set()

    @property
    def has_gradients(self) -> bool:
        return self.backward is not None

    def run(self, inputs: Inputs) -> Outputs:
        """One call, forward and (where there is one) backward; raises ``Refused`` with the callable's own message."""
        self.calls += 1
        try:
            try:
                return self._run(inputs)
            except _NotThroughLse as error:
                self.lse_gradient = False
                self.notes.add(f"no gradient through the LSE: {error}")
                return self._run(inputs)
        except (ValueError, RuntimeError, NotImplementedError, AssertionError, TypeError, IndexError) as error:
            raise Refused(
                f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}"
            ) from error

    def _run(self, inputs: Inputs) -> Outputs:
        p = inputs.packing
        shape = {side: self._shape(p, side) for side in "qk"}
        # Fresh copies: a callable that writes into its operands must not spoil the next experiment.
        q, k, v, do = (self._lay(getattr(inputs, name), shape[SIDE[name]]) for name in OPERANDS)
        extra: tuple[Tensor, ...] = ()
        if self.layout == "packed":
            sides = "k" if p.queries is None else "qk"
            extra = tuple(torch.tensor(p.offsets_of(s), dtype=torch.int32, device=self.device) for s in sides)
        by_autograd = self.backward == "autograd"
        with torch.enable_grad() if by_autograd else torch.no_grad():
            if by_autograd:
                q, k, v = (x.requires_grad_() for x in (q, k, v))
            out = self.fn(q, k, v, *extra)
        lse = None
        if isinstance(out, (tuple, list)) and out:
            lse = self._lse(out[1], q) if len(out) > 1 else None
            if lse is None and any(x is not None for x in out[1:]):
                self.notes.add(
                    "the callable returns more than O, and the second is no LSE by its shape: O alone is judged"
                )
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
        grads = self._gradients(out, lse, q, k, v, do, extra)
        with torch.no_grad():
            for name, kept in (("q", q), ("k", k), ("v", v)):
                if not torch.equal(
                    torch.nan_to_num(kept.detach().flatten(0, -3).cpu()), torch.nan_to_num(getattr(inputs, name))
                ):
                    self.notes.add(f"the callable writes into the caller's {name}")
        named = {"O": out, **({} if lse is None else {"LSE": lse}), **grads}
        return {name: x.detach().flatten(0, -3).cpu() for name, x in named.items()}

    def _lse(self, given: Any, q: Tensor) -> Tensor | None:
        """(..., T, H, 1) of a second output that has an LSE's shape, heads before rows or after them."""
        rows, heads = q.shape[:-1], (*q.shape[:-3], q.shape[-2], q.shape[-3])
        if not isinstance(given, Tensor) or not given.is_floating_point():
            return None
        x = given.squeeze(-1) if given.dim() == len(rows) + 1 and given.shape[-1] == 1 else given
        if x.shape == heads:
            return x.transpose(-1, -2)[..., None]
        return x[..., None] if x.shape == rows else None

    def _gradients(
        self, out: Tensor, lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, do: Tensor, extra: tuple[Tensor, ...]
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
            through, given = [out], [do.to(out.dtype)]
            self.through_lse = lse is not None and lse.requires_grad and self.lse_gradient
            if lse is not None and self.through_lse:
                through, given = [out, lse], [*given, do[..., :1].to(lse.dtype)]
            try:
                grads = torch.autograd.grad(through, (q, k, v), given, allow_unused=True)
            except (RuntimeError, NotImplementedError) as error:
                if self.calls > 1:  # it worked before, so this is about these inputs
                    raise
                if len(through) > 1:
                    raise _NotThroughLse(f"{type(error).__name__}: {str(error).splitlines()[0]}") from error
                self.lose_gradients(f"the backward raised {type(error).__name__}: {str(error).splitlines()[0]}")
                return {}
        zeros = (torch.zeros_like(x) if g is None else g for g, x in zip(grads, (q, k, v), strict=True))
        return dict(zip(("dQ", "dK", "dV"), zeros, strict=True))

    def lose_gradients(self, why: str) -> None:
        self.backward = None
        self.notes.add(f"gradients: {why}; only O was audited")

    def _shape(self, packing: Packing, side: str) -> tuple[int, ...]:
        counts = packing.counts(side)
        if self.layout == "packed":
            return (packing.total_of(side),)
        if len(set(counts)) != 1:
            raise ValueError(f"a batched callable needs equal lengths, not {counts}")
        return (len(counts), counts[0])

    def _lay(self, x: Tensor, shape: tuple[int, ...]) -> Tensor:
        return x.to(device=self.device, copy=True).reshape(*shape, *x.shape[1:])
