"""Context parallel: the tokens of packed documents lie on several ranks, and attention has the bits of one device.

Every rank computes whole rows: O and dQ of its queries against all keys that those see, dK and dV of its keys against all
queries that see them. So nothing is merged and no partial sums are added across ranks: blocks, scales and the order of
every sum are those of a call on one device, and O, LSE, dQ, dK and dV equal its bits on the same backend. Every contract of the
recipe holds because it held there. (The other way, partial dK and dV reduced in FP32, moves fewer bytes where many query
heads share a key head, and changes bits with the number of ranks.)

What crosses the wire, once in the forward and once in the backward, of documents that several ranks share:

    forward     K and V
    backward    K and V for dQ;  Q, dO, O and LSE for dK and dV

Operands that every product reads as E4M3 codes with a scale per token travel as these: K and V in the forward of
`mxfp8_scores`, V and dO in its backward. Decoded, they encode to the same codes and scales (codes.py). The others have 16
bits: dQ reads K and dK reads Q as they are. Other recipes' operands, whose scales cover several tokens, have 16 bits too.

Documents that lie whole on a rank cross nothing: they are an ordinary call, which runs while the rows of shared ones are on
their way. Calls for those are made of what the operators know already. A piece of queries is a document whose queries are its
last rows. A piece of keys start .. end is one whose right side is open as far as the queries reach behind it; its queries are
padded to whole blocks with rows of zeros, which add zeros. Under a window the keys just behind the piece are taken along.

Memory: between forward and backward a rank keeps its own tokens. For the time of a call it holds the gathered bytes and 16-bit
copies of what one operator reads: K and V once for each of its pieces, with two pieces about 1 + 1 / (2 ranks) times those of a
long document, and in the backward Q, dO and O of the queries behind one piece at a time. That bounds a context here.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from flamia import ops, validation
from flamia.integrations.parallel_plan import Piece, Plan
from flamia.integrations.parallel_wire import Field, coded, gather
from flamia.recipe import Recipe
from flamia.validation import OPEN, UnsupportedError
from flamia.words import amount

Item = tuple[Piece, tuple[int, int], tuple[int, int]]
"""A piece, and the positions of the queries and of the keys that its part of a call reads."""


@dataclass(frozen=True)
class Call:
    """One call of an operator: which gathered rows it reads, and where its results belong."""

    queries: Tensor
    keys: Tensor
    cu_q: Tensor
    cu_k: Tensor
    window: tuple[int, int]
    results: Tensor  # of dK and dV: rows of the call
    owned: Tensor  # and which of the rank's rows of shared documents they are


class ContextParallel:
    """One packing on the ranks of a process group: make it once, use it for every layer.

    Args:
        cu_seqlens: (documents + 1,) int32 offsets of the whole packed buffer, the same on every rank; read by the host.
        group: a torch.distributed process group, by default all ranks.
        recipe: as in `flamia.attention`; it must promise truncate and offset.
        window: None or (left, right) as in `flamia.attention`. Attention is causal.
        device: of the tensors, by default that of cu_seqlens.
        token_pairs: how many visible pairs the rest of the model's work on a token is worth. 0 balances attention alone,
            which may give one rank few tokens with many pairs each and another many tokens with few.
    """

    def __init__(
        self,
        cu_seqlens: Tensor,
        *,
        group: dist.ProcessGroup | None = None,
        recipe: Recipe | str | None = None,
        window: tuple[int | None, int | None] | None = None,
        causal: bool = True,
        device: torch.device | str | None = None,
        token_pairs: float = 0.0,
    ) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise ValueError(
                "context parallel needs torch.distributed: start with torchrun and call init_process_group first"
            )
        self.recipe = validation.parse_recipe(validation.recipe_text(recipe))
        if not causal:
            raise UnsupportedError(
                "context parallel attention is causal; for other masks, give whole documents to a rank"
            )
        if not {"truncate", "offset"} <= self.recipe.claims:
            raise UnsupportedError(
                f"recipe {str(self.recipe)!r} does not promise 'truncate' and 'offset': what it computes for a token depends "
                f"on how documents are cut and packed, so pieces of them would differ from the whole; take a 'strict' recipe"
            )
        if self.recipe.delta == "centered":
            raise UnsupportedError(
                "delta='centered' reads whole rows in the dK/dV pass, where a rank has a part of them"
            )
        self.group = group if group is not None else dist.group.WORLD
        self.rank, self.ranks = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.left = validation.window_sides(True, window)[0]
        self.device = torch.empty(0, device=cu_seqlens.device if device is None else device).device
        validation.check_offsets_given(cu_seqlens, cu_seqlens, cu_seqlens, None, ("cu_seqlens", ""))
        offsets = cu_seqlens.tolist()
        validation.check_offset_values("cu_seqlens", cu_seqlens, offsets[-1])
        self.starts = offsets[:-1]
        self.plan = Plan.of(
            [b - a for a, b in itertools.pairwise(offsets)],
            self.ranks,
            left=None if self.left == OPEN else self.left,
            block=self.recipe.frontier_block,
            token_pairs=token_pairs,
        )
        self._agree(offsets)
        self._place()
        self.rows_call = self._rows_call()
        self.columns_calls = self._columns_calls()

    # ------------------------------------------------------------------------------------------------------- tokens

    @property
    def tokens(self) -> int:
        """How many this rank holds."""
        return len(self.rows)

    def shard(self, x: Tensor) -> Tensor:
        """This rank's rows of x (total tokens, ...), in the order in which `attention` wants them."""
        if x.dim() < 1 or len(x) < sum(self.plan.lengths):
            raise ValueError(
                f"shard takes the whole buffer, {sum(self.plan.lengths)} rows or more, got {tuple(x.shape)}"
            )
        return x[self.rows.to(x.device)]

    @torch.no_grad()
    def unshard(self, x: Tensor, total: int | None = None) -> Tensor:
        """The whole buffer on every rank, from each rank's rows; without gradient. total: its rows, those behind the last
        document being zero."""
        self._check_rows("x", x)
        most = max(self.plan.tokens)
        gathered = self._gather(x if x.dim() > 1 else x[:, None], most)()
        out = gathered.new_zeros(sum(self.plan.lengths) if total is None else total, *gathered.shape[1:])
        for rank in range(self.ranks):
            at = rank * most
            for piece in self.plan.of_rank(rank):
                size, start = piece.end - piece.start, self.starts[piece.document] + piece.start
                out[start : start + size] = gathered[at : at + size]
                at += size
        return out.view(-1, *x.shape[1:])

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        softmax_scale: float | None = None,
        return_lse: bool = False,
        backend: str = "auto",
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Causal attention of this rank's tokens; all ranks must call it, in the same order, forward and backward.

        q: (this rank's tokens, heads, dim), k, v: the same of the key heads. Returns what `flamia.attention_varlen` returns
        of these rows, and has its gradients.
        """
        validation.check_inputs(q, k, v, "packed")
        validation.check_flag("return_lse", return_lse)
        ops.check_backend(backend)
        for name, x in (("q", q), ("k", k), ("v", v)):
            self._check_rows(name, x)
        scale = validation.scale_or_default(softmax_scale, q.shape[-1])
        o, lse = _Attention.apply(q, k, v, self, scale, backend, return_lse)
        return (o, lse) if return_lse else o

    def _check_rows(self, name: str, x: Tensor) -> None:
        if len(x) != self.tokens or x.device != self.device:
            raise ValueError(
                f"{name} must have the {self.tokens} rows that rank {self.rank} holds, on {self.device}; got {len(x)} on "
                f"{x.device}. ContextParallel.shard takes them out of a whole buffer"
            )

    # ------------------------------------------------------------------------------------------------------- layout

    def _agree(self, offsets: list[int]) -> None:
        """All ranks must have made the same plan: other offsets on one of them would be wrong answers on all."""
        mine = f"{offsets} {self.recipe} {self.left} {self.plan.pieces}"
        digest = torch.tensor([list(hashlib.sha256(mine.encode()).digest())], dtype=torch.uint8, device=self.device)
        others = (self._gather(digest, 1)()[:-1] != digest).any(1).nonzero()[:, 0].tolist()
        if others:
            raise ValueError(
                f"rank {self.rank} was given other cu_seqlens, recipe or window than ranks {others}; all must be given "
                f"those of the whole packed buffer. Here: {amount(len(offsets) - 1, 'document')}, "
                f"{amount(int(offsets[-1]), 'token')}, {self.recipe}"
            )

    def _place(self) -> None:
        """Where tokens lie. A rank's rows are those of its whole documents, `whole` of them, and then those of its pieces of
        shared documents. `where`: the row of what is gathered that holds a token of a shared document."""
        shared = self.plan.shared
        parts = [[p for p in self.plan.of_rank(rank) if p.document in shared] for rank in range(self.ranks)]
        self.most = max(sum(p.end - p.start for p in pieces) for pieces in parts)
        mine = self.plan.of_rank(self.rank)
        rows = [_span(self.starts[p.document] + p.start, p.end - p.start) for p in mine]
        self.rows = torch.cat([_span(0, 0), *rows]).to(self.device)
        self.pieces = parts[self.rank]
        ends = [0, *itertools.accumulate(p.end - p.start for p in mine if p.document not in shared)]
        self.whole = ends[-1]
        self.cu_whole = torch.tensor(ends, dtype=torch.int32, device=self.device)
        sizes = (p.end - p.start for p in self.pieces)
        self.first = dict(zip(self.pieces, itertools.accumulate(sizes, initial=0)))
        self.where = torch.full((sum(self.plan.lengths),), -1, dtype=torch.int64)
        for rank, pieces in enumerate(parts):
            at = rank * self.most
            for piece in pieces:
                start, size = self.starts[piece.document] + piece.start, piece.end - piece.start
                self.where[start : start + size] = _span(at, size)
                at += size
        self.zero = self.ranks * self.most

    def _gathered_rows(self, document: int, start: int, end: int) -> Tensor:
        """Positions of a document as rows of what is gathered; those behind its end are the row of zeros."""
        first, length = self.starts[document], self.plan.lengths[document]
        rows = self.where[first + start : first + min(end, length)]
        return torch.cat([rows, torch.full((max(0, end - length),), self.zero)])

    def _call(self, items: list[Item], window: tuple[int, int]) -> Call:
        """Results are the pieces' own rows of keys."""
        queries = [self._gathered_rows(piece.document, *span) for piece, span, _ in items]
        keys = [self._gathered_rows(piece.document, *span) for piece, _, span in items]
        cu_q, cu_k = (
            torch.tensor([0, *itertools.accumulate(map(len, rows))], dtype=torch.int32, device=self.device)
            for rows in (queries, keys)
        )
        results, owned = [], []
        for (piece, _, span), at in zip(items, cu_k.tolist()):
            size = piece.end - piece.start
            results.append(_span(at + piece.start - span[0], size))
            owned.append(_span(self.first[piece], size))
        none = _span(0, 0)
        q_rows, k_rows, result_rows, owned_rows = (
            torch.cat([*rows, none]).to(self.device) for rows in (queries, keys, results, owned)
        )
        return Call(q_rows, k_rows, cu_q, cu_k, window, result_rows, owned_rows)

    def _rows_call(self) -> Call:
        """This rank's queries of shared documents: O, LSE and dQ."""
        items = []
        for piece in self.pieces:
            low = 0 if self.left == OPEN else max(0, piece.start - self.left) // self.plan.block * self.plan.block
            items.append((piece, (piece.start, piece.end), (low, piece.end)))
        return self._call(items, (self.left, 0))

    def _columns_calls(self) -> list[Call]:
        """This rank's keys of shared documents: dK and dV. Pieces that are as far from their document's end share a call."""
        together: list[Item] = []
        apart: dict[int, list[Item]] = {}
        block = self.plan.block
        for piece in self.pieces:
            length = self.plan.lengths[piece.document]
            padded = -(-length // block) * block
            # whether a block of queries has any full pair decides how it reads dO: let it have the one that it has
            first = piece.start - (block if piece.start and self.recipe.splits == "both" else 0)
            if piece.end == length:
                together.append((piece, (piece.start, length), (first, length)))
            elif self.left != OPEN and self.left < padded:
                end = min(length, -(-(piece.end + self.left) // block) * block)
                together.append((piece, (piece.start, end), (first, end)))
            else:
                apart.setdefault(padded - piece.end, []).append((piece, (piece.start, padded), (first, piece.end)))
        calls = [self._call(items, (OPEN, right)) for right, items in apart.items()]
        return [self._call(together, (self.left, 0)), *calls] if together else calls

    # --------------------------------------------------------------------------------------------------------- wire

    def _gather(self, data: Tensor, most: int) -> Callable[[], Tensor]:
        return gather(data, most, self.ranks, self.group)

    def send(self, fields: dict[str, Field], tensors: dict[str, Tensor]) -> Callable[[], dict[str, tuple[Tensor, ...]]]:
        """Start to gather the fields of this rank's rows of shared documents; call what is returned to have everybody's."""
        under_way = {name: [self._gather(x, self.most) for x in f.pack(tensors[name])] for name, f in fields.items()}
        return lambda: {name: tuple(arrived() for arrived in parts) for name, parts in under_way.items()}


def _span(start: int, count: int) -> Tensor:
    """Row numbers; on the host, where layouts are made."""
    return torch.arange(start, start + count)


class _Attention(torch.autograd.Function):
    """Whole documents are an ordinary call; it runs while the rows of the shared ones are on their way."""

    @staticmethod
    def forward(
        ctx, q: Tensor, k: Tensor, v: Tensor, here: ContextParallel, scale: float, backend: str, with_lse: bool
    ):
        n, common = here.whole, (scale, str(here.recipe), backend, "aligned", -1, -1)
        fields = {"k": Field.of(k, coded(here.recipe, "s_k")), "v": Field.of(v, coded(here.recipe, "o_v"))}
        arrive = here.send(fields, {"k": k[n:], "v": v[n:]}) if here.plan.shared else None
        answers, saved = [], q.new_empty(0, dtype=torch.uint8)
        if n or arrive is None:
            cu = here.cu_whole
            *answer, saved = ops.attention_forward(q[:n], k[:n], v[:n], cu, cu, here.left, 0, *common, save=True)
            answers.append(answer)
        if arrive is not None:
            pool, call = arrive(), here.rows_call
            keys, values = (fields[name].read(pool[name], call.keys) for name in "kv")
            *answer, _ = ops.attention_forward(
                q[n:], keys, values, call.cu_q, call.cu_k, *call.window, *common, save=False
            )
            answers.append(answer)
        o, lse, residual = (joined(parts, dim) for parts, dim in zip(zip(*answers), (0, 1, 0)))
        ctx.save_for_backward(q, k, v, o, lse, residual, saved)
        ctx.options = here, scale, backend, with_lse
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    def backward(ctx, do: Tensor | None, dlse: Tensor | None):
        q, k, v, o, lse, residual, saved = ctx.saved_tensors
        here, scale, backend, with_lse = ctx.options
        recipe, n, wanted = here.recipe, here.whole, ctx.needs_input_grad[:3]
        common = (scale, str(recipe), backend, "aligned")
        do = torch.zeros_like(o) if do is None else do.contiguous()
        if with_lse:  # the same on every rank, whatever reached it
            dlse = torch.zeros_like(lse) if dlse is None else dlse
        fields = {
            "k": Field.of(k, coded(recipe, "s_k", "dq_k")),
            "v": Field.of(v, coded(recipe, "o_v", "e_v")),
            "q": Field.of(q, coded(recipe, "s_q", "dk_q")),
            "g": Field.of(o, coded(recipe, "e_g", "dv_g")),
            "o": Field.of(o),
            "lse": Field.of(lse),
        }
        tensors = {"k": k, "v": v, "q": q, "g": do, "o": o, "lse": lse.t()}
        if len(residual):
            tensors["residual"], fields["residual"] = residual, fields["o"]
        if dlse is not None:
            tensors["dlse"], fields["dlse"] = dlse.t(), fields["lse"]
        arrive = here.send(fields, {name: x[n:] for name, x in tensors.items()}) if here.plan.shared else None
        gradients: list[list[Tensor]] = [[], [], []]
        if n or arrive is None:
            kept = saved.numel() > 0
            found = ops.attention_backward(
                do[:n], None if dlse is None else dlse[:, :n], q[:n], k[:n], None if kept else v[:n], o[:n], lse[:, :n],
                residual[:n], here.cu_whole, here.cu_whole, here.left, 0, *common, *wanted, saved if kept else None,
            )  # fmt: skip
            for parts, x in zip(gradients, found):
                parts.append(x)
        if arrive is not None:
            pool = arrive()

            def read(name: str, rows: Tensor) -> Tensor:
                return fields[name].read(pool[name], rows)

            def solve(call: Call, queries: list, wanted: tuple[bool, bool, bool]) -> list[Tensor]:
                g, given_dlse, q, *outputs = queries
                return ops.attention_backward(
                    g, given_dlse, q, read("k", call.keys), read("v", call.keys), *outputs, call.cu_q, call.cu_k,
                    *call.window, *common, *wanted,
                )  # fmt: skip

            if wanted[0]:
                mine = [do[n:], None if dlse is None else dlse[:, n:], q[n:], o[n:], lse[:, n:], residual[n:]]
                gradients[0].append(solve(here.rows_call, mine, (True, False, False))[0])
            if wanted[1] or wanted[2]:
                sums = [torch.zeros_like(x[n:]) if want else None for x, want in zip((k, v), wanted[1:])]
                for call in here.columns_calls:
                    rows = call.queries
                    theirs = [read("g", rows), read("dlse", rows).t() if dlse is not None else None, read("q", rows)]
                    theirs += [read("o", rows), read("lse", rows).t().contiguous()]
                    theirs += [read("residual", rows) if len(residual) else residual]
                    _, *found = solve(call, theirs, (False, *wanted[1:]))
                    for whole, part in zip(sums, found):
                        if whole is not None:
                            whole[call.owned] = part if len(call.results) == len(part) else part[call.results]
                for parts, whole in zip(gradients[1:], sums):
                    if whole is not None:
                        parts.append(whole)
        made = [joined(parts, 0) if want else None for parts, want in zip(gradients, wanted)]
        return *made, None, None, None, None


def joined(parts: Sequence[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim)
