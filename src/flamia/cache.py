"""A key/value cache in a recipe's own formats, and decoding that gives the bits of training.

A model that is served in another arithmetic than it was trained in is another model. Here they are one: a recipe that
promises *truncate* computes a position from the tokens up to it, in blocks that lie on positions, so what training
computed for position t in the middle of a document is what decoding computes when t is the newest token there is.

What a future query can still read decides what is kept of a key:

* K and V whose scales belong to one token (all of `mxfp8_scores`, the default) are encoded when they arrive.
* Where a scale covers several tokens (`mxfp8`, `nvfp4_fp8`), queries of the same frontier block read 16 bits and those of
  later blocks read codes. So the open block is kept in 16 bits, and becomes codes once no query can come that lies in it.
* Under a window such a block turns into a frontier block again on its way out, so there it keeps its 16 bits, and is
  encoded on the fly. Whole blocks that no window can reach any more are dropped, for every recipe.

`rollback` is how far `truncate` can go back from the longest length a sequence had (speculative decoding): blocks close,
and leave, that much later. Where K and V are codes from the start and no window drops any, it can always go anywhere.
"""

from __future__ import annotations

import contextlib
import itertools

import torch
from torch import Tensor

from flamia import ops, validation
from flamia.api import attention_varlen
from flamia.cached import Operand, Remembered, future_blocks, operands_of
from flamia.packing import Documents
from flamia.recipe import Recipe
from flamia.reference.forward import solve
from flamia.validation import UnsupportedError


class KVCache:
    """Keys and values of a batch of sequences, each of its own length.

    Args:
        sequences: how many; `decode` and `append` take new tokens of all of them, packed, none for some if you like.
        kv_heads, head_dim, value_dim: the shape of a token's K (kv_heads, head_dim) and V (value_dim, default head_dim).
        recipe: as in `flamia.attention`; it must promise "truncate" (`fast` does not and is refused).
        window: None or (left, right) as in `flamia.attention`; attention is causal, so only the left side matters.
        rollback: how many tokens `truncate` must be able to take back.
        dtype, device: of the tensors that will come.
    """

    def __init__(
        self, sequences: int, kv_heads: int, head_dim: int, *, value_dim: int | None = None,
        recipe: Recipe | str | None = None, window: tuple[int | None, int | None] | None = None, rollback: int = 0,
        dtype: torch.dtype = torch.bfloat16, device: torch.device | str = "cpu",
    ) -> None:  # fmt: skip
        sizes = {
            "sequences": sequences,
            "kv_heads": kv_heads,
            "head_dim": head_dim,
            "value_dim": head_dim if value_dim is None else value_dim,
        }
        for name, size in sizes.items():
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ValueError(f"{name} must be a positive int, got {size!r}")
        if isinstance(rollback, bool) or not isinstance(rollback, int) or rollback < 0:
            raise ValueError(f"rollback must be a number of tokens, 0 or more; got {rollback!r}")
        if max(head_dim, sizes["value_dim"]) > validation.MAX_HEAD_DIM:
            raise UnsupportedError(f"head_dim and value_dim must lie in 1..{validation.MAX_HEAD_DIM}")
        if dtype not in validation.DTYPES:
            raise ValueError(f"dtype must be torch.bfloat16 or torch.float16, got {dtype}")
        self.recipe = validation.parse_recipe(validation.recipe_text(recipe))
        if "truncate" not in self.recipe.claims:
            raise UnsupportedError(
                f"recipe {str(self.recipe)!r} does not promise 'truncate': what it computes for a token depends on tokens "
                f"that do not exist yet when it is decoded, so no cache gives the bits of training; take a 'strict' recipe"
            )
        self.window = validation.window_sides(True, window)
        self.sequences, self.kv_heads, self.head_dim, self.value_dim = sizes.values()
        self.rollback, self.dtype = rollback, dtype
        self.device = torch.empty(0, device=device).device  # "cuda" with its number
        self._left = None if self.window[0] == validation.OPEN else self.window[0]
        self._lengths = [0] * sequences
        self._dropped = [0] * sequences  # tokens at the front that no query can see any more: whole blocks
        self._specs = operands_of(self.recipe, self._left)
        widths = (self.head_dim, self.value_dim)
        self._stores = [
            [Operand(spec, kv_heads, width, dtype, self.device) for spec, width in zip(self._specs, widths)]
            for _ in range(sequences)
        ]

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each sequence so far, those that a window has dropped included."""
        return tuple(self._lengths)

    @property
    def bytes_per_token(self) -> float:
        """Bytes that a token takes once its block is closed, all key heads, scales included."""
        sizes = [spec.bytes_per_token(width) for spec, width in zip(self._specs, (self.head_dim, self.value_dim))]
        return self.kv_heads * sum(sizes)

    @property
    def bf16_bytes_per_token(self) -> int:
        """The same of a cache in 16 bits, for comparison."""
        return 2 * self.kv_heads * (self.head_dim + self.value_dim)

    @property
    def nbytes(self) -> int:
        """Bytes of everything held now, open blocks included; spare room in the buffers is not counted."""
        return sum(operand.nbytes for pair in self._stores for operand in pair)

    def __repr__(self) -> str:
        return (
            f"KVCache({str(self.recipe)!r}, lengths {self.lengths}, {self.nbytes:,} bytes; a token takes "
            f"{self.bytes_per_token:g} bytes, {self.bf16_bytes_per_token} in 16 bits)"
        )

    # ------------------------------------------------------------------------------------------------------ changes

    def append(self, k: Tensor, v: Tensor, cu_seqlens: Tensor | None = None) -> None:
        """Remember keys and values without attending, for instance after a prompt went through `attention_varlen`.

        k: (new tokens, key heads, head_dim), v: (new tokens, key heads, value_dim), sequence after sequence. cu_seqlens:
        (sequences + 1,) int32 offsets of each sequence's new tokens, read by the host; None: one token for each.
        """
        self._add(k, v, self._offsets(k, cu_seqlens))
        self._settle()

    def truncate(self, lengths: list[int] | tuple[int, ...]) -> None:
        """Take tokens back, so that sequence i has lengths[i]; what follows is as if they had never been."""
        if not isinstance(lengths, (list, tuple)) or len(lengths) != self.sequences:
            raise ValueError(f"lengths: one for each of the {self.sequences} sequences is needed, got {lengths!r}")
        for i, (new, old) in enumerate(zip(lengths, self._lengths)):
            if isinstance(new, bool) or not isinstance(new, int):
                raise ValueError(f"lengths[{i}] = {new!r}: must be an int, the tokens that sequence {i} keeps")
            if not 0 <= new <= old:
                raise ValueError(f"lengths[{i}] = {new}: sequence {i} has {old} tokens and can only become shorter")
            earliest = self._earliest(i)
            if 0 < new < min(old, earliest):
                raise ValueError(
                    f"lengths[{i}] = {new}: sequence {i} can go back to {earliest} (or to 0), since what a query before that "
                    f"would read is encoded or dropped. Give KVCache a larger rollback; this one has {self.rollback}"
                )
        for i, new in enumerate(lengths):
            if new:
                self._cut(i, new)
            else:
                self.reset([i])

    def reset(self, sequences: list[int] | None = None) -> None:
        """Forget the sequences of these numbers, or all."""
        for i in range(self.sequences) if sequences is None else sequences:
            if not 0 <= i < self.sequences:
                raise ValueError(f"sequence {i}: there are {self.sequences}, counted from 0")
            self._lengths[i] = self._dropped[i] = 0
            for operand in self._stores[i]:
                operand.clear()

    def _go_back(self, lengths: tuple[int, ...]) -> None:
        for i, length in enumerate(lengths):
            self._cut(i, length)

    def _cut(self, i: int, length: int) -> None:
        for operand in self._stores[i]:
            operand.keep(length - self._dropped[i])
        self._lengths[i] = length

    def _earliest(self, i: int) -> int:
        """The shortest length that leaves everything a query there reads in place."""
        block, dropped = self.recipe.frontier_block, self._dropped[i]
        closed = max(0 if each.spec.at_once else each.closed_rows for each in self._stores[i])
        reached = -(-(dropped + self._left) // block) * block if dropped and self._left is not None else 0
        return max(dropped + closed, reached)

    def _first_needed(self, position: int) -> int:
        return future_blocks(position, self.recipe.frontier_block, self._left)[0] * self.recipe.frontier_block

    def _offsets(self, x: Tensor, cu_seqlens: Tensor | None) -> list[int]:
        if cu_seqlens is None:
            if len(x) != self.sequences:
                raise ValueError(
                    f"{len(x)} new tokens for {self.sequences} sequences: without cu_seqlens each gets one; give "
                    f"cu_seqlens, int32 ({self.sequences + 1},), to say whose they are"
                )
            return list(range(self.sequences + 1))
        validation.check_offsets_given(x, x, cu_seqlens, None, ("cu_seqlens", ""))
        if cu_seqlens.numel() != self.sequences + 1:
            raise ValueError(
                f"cu_seqlens must have {self.sequences + 1} entries, one more than the cache has sequences, so that it "
                f"says how many new tokens each gets (0 is fine); got {cu_seqlens.numel()}"
            )
        validation.check_offset_values("cu_seqlens", cu_seqlens, len(x))
        offsets = cu_seqlens.tolist()
        if offsets[-1] != len(x):
            raise ValueError(f"cu_seqlens ends at {offsets[-1]}, but there are {len(x)} new tokens")
        return offsets

    def _add(self, k: Tensor, v: Tensor, offsets: list[int]) -> None:
        validation.check_inputs(k, k, v, "packed")
        for name, x, width in (("k", k, self.head_dim), ("v", v, self.value_dim)):
            if tuple(x.shape[1:]) != (self.kv_heads, width):
                raise ValueError(f"{name} must have shape (new tokens, {self.kv_heads}, {width}), got {tuple(x.shape)}")
            if x.dtype != self.dtype or x.device != self.device:
                raise ValueError(
                    f"{name} is {x.dtype} on {x.device}, the cache {self.dtype} on {self.device}; give KVCache the dtype "
                    f"and device of the model"
                )
        k, v = k.detach(), v.detach()
        bad = ~(k.isfinite().all(-1, keepdim=True) & v.isfinite().all(-1, keepdim=True))
        k = torch.where(bad, torch.nan, k)  # K carries the mark of both
        encoded = [spec.encode_arrivals(x, self.recipe) for spec, x in zip(self._specs, (k, v))]
        before = self.lengths
        try:
            for i, (start, end) in enumerate(itertools.pairwise(offsets)):
                for operand, x, codes in zip(self._stores[i], (k, v), encoded):
                    operand.add(x[start:end], [part[start:end] for part in codes])
                self._lengths[i] += end - start
        except BaseException:  # out of memory, an interrupt: some operands have the tokens and some do not
            self._go_back(before)
            raise

    def _settle(self) -> None:
        """Close and drop the blocks that no query can need otherwise any more. Where memory for that is short, what is still
        open stays open, which changes no bit, until the next call."""
        with contextlib.suppress(torch.OutOfMemoryError):
            self._close_and_drop()

    def _close_and_drop(self) -> None:
        block = self.recipe.frontier_block
        for i, pair in enumerate(self._stores):
            oldest = max(0, self._lengths[i] - self.rollback)
            for operand in pair:
                operand.close(oldest // block * block - self._dropped[i], self.recipe)
            gone = self._first_needed(oldest) - self._dropped[i]
            if gone > 0:
                for operand in pair:
                    operand.drop(gone)
                self._dropped[i] += gone

    # ----------------------------------------------------------------------------------------------------- attention

    def _attend(self, q: Tensor, offsets: list[int], scale: float, backend: str) -> tuple[Tensor, Tensor]:
        resident = [length - gone for length, gone in zip(self._lengths, self._dropped)]
        cu_q = torch.tensor(offsets, dtype=torch.int32, device=self.device)
        cu_k = torch.tensor([0, *resident], device=self.device).cumsum(0).to(torch.int32)
        documents = Documents(cu_q, cu_k, self._left, 0)
        if backend == "reference" or (backend == "auto" and self.device.type == "cpu"):
            stores = [[pair[n] for pair in self._stores] for n in (0, 1)]
            problem = Remembered(q, documents, self.recipe, scale, stores[0], stores[1])
            o, lse, _ = solve(problem)
            return o.to(q.dtype), lse.to(torch.float32)
        if any(spec.full != "e4m3:coarse" or not spec.at_once for spec in self._specs):
            raise UnsupportedError(
                f"backend={backend!r}: kernels decode recipes whose keys and values are codes per token, such as "
                f"'mxfp8_scores/strict', not {str(self.recipe)!r}; to run the slow readable twin, ask for backend='reference'"
            )
        k, v = (torch.cat([pair[n].decoded() for pair in self._stores]) for n in (0, 1))
        answer = attention_varlen(
            q,
            k,
            v,
            cu_q,
            cu_seqlens_k=cu_k,
            causal=True,
            window=self.window,
            softmax_scale=scale,
            recipe=self.recipe,
            return_lse=True,
            backend=backend,
        )
        return answer[0], answer[1]


def decode(
    q: Tensor, k: Tensor, v: Tensor, cache: KVCache, cu_seqlens: Tensor | None = None, *,
    softmax_scale: float | None = None, return_lse: bool = False, backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Append the new tokens' keys and values to the cache and attend from the new queries: one token, or any chunk.

    Args:
        q: (new tokens, heads, head_dim); k, v: as in `KVCache.append`, one key and value for each query.
        cache: is changed. If the call raises, it is as it was.
        cu_seqlens: (sequences + 1,) int32 offsets of each sequence's new tokens, read by the host; None: one for each.
        softmax_scale, return_lse, backend: as in `flamia.attention_varlen`.

    Returns:
        o (new tokens, heads, value_dim): what causal `attention_varlen` with the cache's recipe and window gives these
        positions in a call with the whole sequences, bit for bit. With `return_lse` the pair (o, lse), lse
        (heads, new tokens) float32. There is no gradient.
    """
    if not isinstance(cache, KVCache):
        raise ValueError(f"cache must be a flamia.KVCache, got {type(cache).__name__}")
    validation.check_inputs(q, k, v, "packed")
    validation.check_flag("return_lse", return_lse)
    ops.check_backend(backend)
    scale = validation.scale_or_default(softmax_scale, q.shape[-1])
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        raise ValueError("decode has no gradient; call it under torch.no_grad(), or train with attention_varlen")
    if len(q) != len(k):
        raise ValueError(f"q has {len(q)} new tokens and k has {len(k)}: decode takes a query for each new key")
    offsets = cache._offsets(q, cu_seqlens)
    before = cache.lengths
    cache._add(k, v, offsets)
    try:
        o, lse = cache._attend(q, offsets, scale, backend)
    except BaseException:
        cache._go_back(before)
        raise
    cache._settle()
    return (o, lse) if return_lse else o
