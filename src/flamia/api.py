"""The public functions: check the arguments, write them in the one form the operator takes, call it.

A padded batch is a pack of equally long documents, so there is one operator and one semantics. Three conventions hold
everywhere:

* A window is (left, right), counted in tokens, both ends inclusive: query i sees the keys i - left .. i + right. -1 or
  None is an open side. `causal=True` closes the right side at the query itself, whatever the window says there.
* Where a document has other numbers of queries and keys, i means i + Lk - Lq (bottom-right, as in flash-attention).
* A query that sees no key has output 0, LSE -inf and no gradient. So have the rows of a packed buffer after the last
  offset: outputs and gradients there are exactly zero, and what the rows contain is never used, NaN included.

Autocast changes nothing here: inputs of one 16-bit dtype run as they are, and a float32 or mixed set of them, which
autocast regions tend to produce, is refused by name rather than cast behind the caller's back.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from flamia import ops, validation
from flamia.recipe import Recipe

T = TypeVar("T")
Window = tuple[int | None, int | None] | None


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window: Window = None,
    softmax_scale: float | None = None,
    recipe: Recipe | str | None = None,
    return_lse: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention over a batch of equally long sequences.

    Args:
        q: (batch, queries, heads, dim), bfloat16 or float16.
        k: (batch, keys, key heads, dim), same dtype; the number of query heads is a multiple of the key heads.
        v: (batch, keys, key heads, value dim), same dtype. Both head dimensions lie in 1..256 and may differ.
        causal: query i sees no key after i.
        window: None or (left, right) in tokens, both ends inclusive; -1 or None is an open side.
        softmax_scale: factor on q.k before the softmax; 1/sqrt(dim) if None.
        recipe: a `Recipe`, its string ("mxfp8/fast"), or None for `Recipe.strict()`, "mxfp8_scores/strict".
        return_lse: also return the log of each row's sum of exponentials.
        backend: "auto" (the kernels of a GPU that has them, the reference on the CPU), "reference" or "hopper".

    Returns:
        o (batch, queries, heads, value dim) in the dtype of q, contiguous; with `return_lse` the pair (o, lse), where
        lse is (batch, heads, queries), float32, natural logarithm, and differentiable.

    Raises:
        ValueError: an argument breaks a rule; the message names it, its value and the rule.
        UnsupportedError: the call is well formed, but the library, or the backend asked for, does not do it.
    """
    validation.check_inputs(q, k, v, "batched")
    validation.check_flag("return_lse", return_lse)
    batch, queries, heads, _ = q.shape
    keys = k.shape[1]
    offsets = _even_offsets(batch, queries, q.device)
    o, lse = _call(
        q.reshape(batch * queries, *q.shape[2:]),
        k.reshape(batch * keys, *k.shape[2:]),
        v.reshape(batch * keys, *v.shape[2:]),
        offsets,
        offsets if keys == queries else _even_offsets(batch, keys, q.device),
        validation.window_sides(causal, window),
        softmax_scale,
        recipe,
        backend,
        "trusted",
    )
    o = o.view(batch, queries, heads, v.shape[-1])
    if not return_lse:
        return o
    return o, lse.view(heads, batch, queries).transpose(0, 1).contiguous()


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    *,
    cu_seqlens_k: Tensor | None = None,
    causal: bool = False,
    window: Window = None,
    softmax_scale: float | None = None,
    recipe: Recipe | str | None = None,
    return_lse: bool = False,
    backend: str = "auto",
    check_offsets: bool | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention over documents packed one after another into one buffer; no document sees another.

    Args:
        q: (total queries, heads, dim), bfloat16 or float16.
        k: (total keys, key heads, dim), same dtype; the number of query heads is a multiple of the key heads.
        v: (total keys, key heads, value dim), same dtype. Both head dimensions lie in 1..256 and may differ.
        cu_seqlens: (documents + 1,), int32, on the device of q: document i holds the rows cu_seqlens[i] up to, not
            including, cu_seqlens[i + 1]. Starts at 0. Repeats are empty documents, allowed anywhere. Rows after the
            last entry belong to no document: their outputs and gradients are zero.
        cu_seqlens_k: the same for keys, where a document has another number of them; None: as the queries.
        causal, window, softmax_scale, recipe, return_lse, backend: as in `attention`.
        check_offsets: read the values of the offsets and refuse bad ones. None: on the CPU only, since on a device the
            host would wait; unread offsets are clamped, so that a bad one cannot reach outside a buffer.

    Returns:
        o (total queries, heads, value dim) in the dtype of q, contiguous; with `return_lse` the pair (o, lse), where
        lse is (heads, total queries), float32, natural logarithm, and differentiable.

    Raises:
        ValueError: an argument breaks a rule; the message names it, its value and the rule.
        UnsupportedError: the call is well formed, but the library, or the backend asked for, does not do it.
    """
    validation.check_inputs(q, k, v, "packed")
    validation.check_offsets_given(q, k, cu_seqlens, cu_seqlens_k, ("cu_seqlens", "cu_seqlens_k"))
    validation.check_flag("return_lse", return_lse)
    o, lse = _call(
        q,
        k,
        v,
        cu_seqlens,
        cu_seqlens if cu_seqlens_k is None else cu_seqlens_k,
        validation.window_sides(causal, window),
        softmax_scale,
        recipe,
        backend,
        _offsets_mode(q, check_offsets),
    )
    return (o, lse) if return_lse else o


def _told_apart(function: Callable[..., T]) -> Callable[..., T]:
    """Refuse a lone number in fourth place: a scale in one version of flash-attention, a dropout in another. The fifth
    place tells them apart, `causal` (a bool) behind a scale, a scale (None or a number) behind a dropout.
    """

    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> T:
        fourth, fifth = (*arguments[3:5], None, None)[:2]
        if fourth is not None and not isinstance(fifth, bool):
            raise ValueError(
                f"{fourth!r} in fourth place is softmax_scale to flash-attention 3 and dropout_p to version 2, and nothing "
                "here tells which: write softmax_scale= (there is no dropout)"
            )
        return function(*arguments, **named)

    return call


@_told_apart
def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    *,
    recipe: Recipe | str | None = None,
    return_lse: bool = False,
    return_attn_probs: bool = False,
    backend: str = "auto",
    **flash_arguments: object,
) -> Tensor | tuple[Tensor, Tensor]:
    """`attention` under flash-attention's names: q, k, v are (batch, tokens, heads, dim).

    Positional up to `window_size`, in the order of flash-attention 3; what follows differs between its versions and is
    taken by name only. Version 2 has dropout_p in fourth place. A number there is a scale only if `causal` follows it, as
    version 3 has it; alone, or before another number, it is refused.

    Further arguments of flash-attention: what may change only its speed (`deterministic`, `num_splits`, `pack_gqa`,
    `sm_margin`, ...) is a hint that changes no bit, and results are always deterministic; what would change the result
    (`dropout_p`, `softcap`, `alibi_slopes`, `learnable_sink`, `qv`, `q_descale`, ...) must be switched off, else
    UnsupportedError names it. `return_lse`, or `return_attn_probs` as version 3 has it, returns the pair (o, lse).
    """
    validation.check_flash_arguments("flash_attn_func", flash_arguments)
    validation.check_flag("return_attn_probs", return_attn_probs)
    validation.check_flag("return_lse", return_lse)
    validation.window_sides(causal, window_size, "window_size")
    return attention(
        q,
        k,
        v,
        causal=causal,
        window=window_size,
        softmax_scale=softmax_scale,
        recipe=recipe,
        return_lse=return_lse or return_attn_probs,
        backend=backend,
    )


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor | None,
    max_seqlen_k: int | Tensor | None,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    recipe: Recipe | str | None = None,
    return_lse: bool = False,
    return_attn_probs: bool = False,
    backend: str = "auto",
    check_offsets: bool | None = None,
    **flash_arguments: object,
) -> Tensor | tuple[Tensor, Tensor]:
    """`attention_varlen` under flash-attention's names: q, k, v are (total tokens, heads, dim).

    Both offset vectors are needed, int32, as in `attention_varlen`. `max_seqlen_q` and `max_seqlen_k` are hints and
    change no bit; where offsets are checked (on the CPU, or with check_offsets=True), a document longer than an int
    given there is an error. Positional up to `max_seqlen_k`: what follows differs between flash-attention's versions
    and is taken by name, with the rules of `flash_attn_func`.
    """
    validation.check_flash_arguments("flash_attn_varlen_func", flash_arguments)
    validation.check_inputs(q, k, v, "packed")
    if cu_seqlens_k is None:
        raise ValueError("cu_seqlens_k is missing: flash_attn_varlen_func takes cu_seqlens_q and cu_seqlens_k together")
    validation.check_offsets_given(q, k, cu_seqlens_q, cu_seqlens_k, ("cu_seqlens_q", "cu_seqlens_k"))
    longest = (
        validation.check_longest("max_seqlen_q", max_seqlen_q),
        validation.check_longest("max_seqlen_k", max_seqlen_k),
    )
    validation.check_flag("return_attn_probs", return_attn_probs)
    validation.check_flag("return_lse", return_lse)
    o, lse = _call(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        validation.window_sides(causal, window_size, "window_size"),
        softmax_scale,
        recipe,
        backend,
        _offsets_mode(q, check_offsets),
        longest,
    )
    return (o, lse) if return_lse or return_attn_probs else o


def _call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    window: tuple[int, int],
    softmax_scale: float | None,
    recipe: Recipe | str | None,
    backend: str,
    offsets: str,
    longest: tuple[int, int] = (-1, -1),
) -> tuple[Tensor, Tensor]:
    scale = validation.scale_or_default(softmax_scale, q.shape[-1])
    text = validation.recipe_text(recipe)
    ops.check_backend(backend)
    save = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    o, lse, _, _ = ops.attention_forward(q, k, v, cu_q, cu_k, *window, scale, text, backend, offsets, *longest, save)
    return o, lse


def _offsets_mode(q: Tensor, check_offsets: bool | None) -> str:
    if check_offsets is None:
        check_offsets = q.device.type == "cpu"
    validation.check_flag("check_offsets", check_offsets)
    return "checked" if check_offsets else "clamped"


def _even_offsets(documents: int, length: int, device: torch.device) -> Tensor:
    return torch.arange(documents + 1, dtype=torch.int32, device=device) * length
