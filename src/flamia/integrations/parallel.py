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

Calls are made of what the operators know already. A piece of queries is a document whose queries are its last rows. A
piece of keys start .. end is one whose right side is open as far as the queries reach behind it; its queries are padded to whole
blocks with rows of zeros, which add zeros. Under a window the keys just behind the piece are taken along instead.

Memory: between forward and backward a rank keeps its own tokens. For the time of a call it holds the gathered bytes and 16-bit
copies of what one operator reads: K and V once for each of its pieces, with two pieces about 1 + 1 / (2 ranks) times those of a
long document, and in the backward Q, dO and O of the queries behind one piece at a time. That bounds a context here.
"""

from __future__ import annotations

import hashlib
import itertools
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
    """One call of an operator: which rows of the pool it reads, and where its results belong."""

    queries: Tensor
    keys: Tensor
    cu_q: Tensor
    cu_k: Tensor
    window: tuple[int, int]
    results: Tensor  # of dK and dV: rows of the call
    owned: Tensor  # and the local rows that they are


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
        data = x.contiguous().flatten(1).view(torch.uint8) if x.dim() > 1 else x.contiguous()[:, None].view(torch.uint8)
        most = max(self.plan.tokens)
        gathered = self._gather(data, most)
        at = {rank: rank * most for rank in range(self.ranks)}
        out = data.new_zeros(sum(self.plan.lengths) if total is None else total, data.shape[1])
        for piece in self.plan.pieces:
            size, start = piece.end - piece.start, self.starts[piece.document] + piece.start
            out[start : start + size] = gathered[at[piece.rank] : at[piece.rank] + size]
            at[piece.rank] += size
        return out.view(x.dtype).view(-1, *x.shape[1:])

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
        others = (self._gather(digest, 1) != digest).any(1).nonzero()[:, 0].tolist()
        if others:
            raise ValueError(
                f"rank {self.rank} was given other cu_seqlens, recipe or window than ranks {others}; all must be given "
                f"those of the whole packed buffer. Here: {amount(len(offsets) - 1, 'document')}, "
                f"{amount(int(offsets[-1]), 'token')}, {self.recipe}"
            )

    def _place(self) -> None:
        """`where`: the row of the pool that holds each token of the buffer, as far as this rank can know it. The pool is
        what a call reads: this rank's rows, everybody's rows of shared documents, and a row of zeros at the end."""
        shared = self.plan.shared
        counts = [sum(p.end - p.start for p in self.plan.of_rank(r) if p.document in shared) for r in range(self.ranks)]
        self.most = max(counts)
        mine = self.plan.of_rank(self.rank)
        self.first = dict(zip(mine, itertools.accumulate((p.end - p.start for p in mine), initial=0)))  # local rows
        rows = torch.cat([_span(0, 0), *(_span(self.starts[p.document] + p.start, p.end - p.start) for p in mine)])
        self.where = torch.full((sum(self.plan.lengths),), -1, dtype=torch.int64)
        self.where[rows] = _span(0, len(rows))
        needed = [_span(self.first[p], p.end - p.start) for p in mine if p.document in shared]
        self.sent = torch.cat([_span(0, 0), *needed]).to(self.device)  # local rows that others need
        self.rows = rows.to(self.device)
        for rank in range(self.ranks):
            at = len(self.rows) + rank * self.most
            for piece in self.plan.of_rank(rank):
                if piece.document in shared:
                    start, size = self.starts[piece.document] + piece.start, piece.end - piece.start
                    self.where[start : start + size] = _span(at, size)
                    at += size
        self.zero = len(self.rows) + (self.ranks * self.most if shared else 0)

    def _pool_rows(self, document: int, start: int, end: int) -> Tensor:
        """Positions of a document as rows of the pool; those behind its end are the row of zeros."""
        first, length = self.starts[document], self.plan.lengths[document]
        rows = self.where[first + start : first + min(end, length)]
        return torch.cat([rows, torch.full((max(0, end - length),), self.zero)])

    def _call(self, items: list[Item], window: tuple[int, int]) -> Call:
        """Results are the pieces' own rows of keys."""
        queries = [self._pool_rows(piece.document, *span) for piece, span, _ in items]
        keys = [self._pool_rows(piece.document, *span) for piece, _, span in items]
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
        joined = [torch.cat([*rows, none]).to(self.device) for rows in (queries, keys, results, owned)]
        return Call(joined[0], joined[1], cu_q, cu_k, window, joined[2], joined[3])

    def _rows_call(self) -> Call:
        """All of this rank's queries: O, LSE and dQ."""
        items = []
        for piece in self.plan.of_rank(self.rank):
            low = 0 if self.left == OPEN else max(0, piece.start - self.left) // self.plan.block * self.plan.block
            items.append((piece, (piece.start, piece.end), (low, piece.end)))
        return self._call(items, (self.left, 0))

    def _columns_calls(self) -> list[Call]:
        """All of this rank's keys: dK and dV. Pieces that are as far from their document's end share a call."""
        together: list[Item] = []
        apart: dict[int, list[Item]] = {}
        block = self.plan.block
        for piece in self.plan.of_rank(self.rank):
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

    def _gather(self, data: Tensor, most: int) -> Tensor:
        return gather(data, most, self.ranks, self.group)

    def pool(self, fields: dict[str, Field], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Bytes of each field for all rows of the pool."""
        data = torch.cat([field.pack(tensors[name]) for name, field in fields.items()], 1)
        parts = [data, data.new_zeros(1, data.shape[1])]
        if self.plan.shared:
            parts.insert(1, self._gather(data[self.sent], self.most))
        widths = [field.nbytes for field in fields.values()]
        return dict(zip(fields, torch.cat(parts).split(widths, 1)))


def _span(start: int, count: int) -> Tensor:
    """Row numbers; on the host, where layouts are made."""
    return torch.arange(start, start + count)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, q: Tensor, k: Tensor, v: Tensor, here: ContextParallel, scale: float, backend: str, with_lse: bool
    ):
        fields = {
            "k": Field.of(k, coded(here.recipe, "s_k")),
            "v": Field.of(v, coded(here.recipe, "o_v")),
        }
        pool, call = here.pool(fields, {"k": k, "v": v}), here.rows_call
        keys, values = (fields[name].unpack(pool[name][call.keys]) for name in "kv")
        o, lse, residual, *_ = ops.attention_forward(
            q, keys, values, call.cu_q, call.cu_k, *call.window, scale, str(here.recipe), backend, "trusted", -1, -1,
            save=False,
        )  # fmt: skip
        ctx.save_for_backward(q, k, v, o, lse, residual)
        ctx.options = here, scale, backend, with_lse
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    def backward(ctx, do: Tensor | None, dlse: Tensor | None):
        q, k, v, o, lse, residual = ctx.saved_tensors
        here, scale, backend, with_lse = ctx.options
        recipe = here.recipe
        do = torch.zeros_like(o) if do is None else do.contiguous()
        tensors = {"k": k, "v": v, "q": q, "g": do, "o": o, "lse": lse.t()[..., None]}
        fields = {
            "k": Field.of(k, coded(recipe, "s_k", "dq_k")),
            "v": Field.of(v, coded(recipe, "o_v", "e_v")),
            "q": Field.of(q, coded(recipe, "s_q", "dk_q")),
            "g": Field.of(o, coded(recipe, "e_g", "dv_g")),
            "o": Field.of(o),
            "lse": Field(q.shape[1], 1, torch.float32, ""),
        }
        if len(residual):
            tensors["residual"], fields["residual"] = residual, fields["o"]
        if with_lse:  # the same on every rank, whatever reached it
            dlse = torch.zeros_like(lse) if dlse is None else dlse
            tensors["dlse"], fields["dlse"] = dlse.t()[..., None], fields["lse"]
        pool = here.pool(fields, tensors)

        def read(name: str, rows: Tensor) -> Tensor:
            return fields[name].unpack(pool[name][rows])

        def of_rows(name: str, rows: Tensor) -> Tensor | None:
            return read(name, rows)[..., 0].t().contiguous() if name in fields else None

        def gradients(call: Call, queries: list, wanted: tuple[bool, bool, bool]) -> tuple[Tensor, Tensor, Tensor]:
            g, given_dlse, q, *outputs = queries
            return ops.attention_backward(
                g, given_dlse, q, read("k", call.keys), read("v", call.keys), *outputs, call.cu_q, call.cu_k,
                *call.window, scale, str(recipe), backend, "trusted", *wanted,
            )  # fmt: skip

        dq, dk, dv = None, None, None
        wanted = ctx.needs_input_grad[:3]
        if wanted[0]:
            mine = [do, dlse, q, o, lse, residual]
            dq = gradients(here.rows_call, mine, (True, False, False))[0]
        if wanted[1] or wanted[2]:
            dk, dv = torch.zeros_like(k), torch.zeros_like(v)
            for call in here.columns_calls:
                theirs = [read("g", call.queries), of_rows("dlse", call.queries), read("q", call.queries)]
                theirs += [read("o", call.queries), of_rows("lse", call.queries)]
                theirs += [read("residual", call.queries) if len(residual) else residual]
                _, part_k, part_v = gradients(call, theirs, (False, wanted[1], wanted[2]))
                for whole, part, want in ((dk, part_k, wanted[1]), (dv, part_v, wanted[2])):
                    if want:
                        whole[call.owned] = part[call.results]
        return dq, dk if wanted[1] else None, dv if wanted[2] else None, None, None, None, None
