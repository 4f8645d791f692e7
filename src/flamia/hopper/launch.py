"""From tensors to kernels: layouts, descriptors, grids. Nothing here waits for the device or reads an offset.

`forward` and `backward` are the two calls every backend answers (reference/ has the same). `forward_saving` also hands
out what it encoded, in one buffer (flamia/saved.py); `backward` takes it back as `saved`, and encodes again when it gets
none. Both only read it, so a second backward over the same forward gives the same bits.

The host's time is part of every call that the card does not hide: a view of a tensor costs it a microsecond or two, so
parts of a buffer are cut out by one `split_with_sizes` (`split` takes twice as long).
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from flamia.packing import Documents
from flamia.recipe import SAFETIES, Recipe
from flamia.saved import nbytes, sections
from flamia.validation import UnsupportedError

from .compat import HOLD_Q_OF_128, TensorDescriptor, descriptor
from .dkv import dkv_kernel
from .dq import dq_kernel
from .forward import forward_kernel
from .quantize import ROWS, encode_gradient_kernel, encode_kernel
from .schedule import BLOCK, OPEN, Plan, lay_out, tables

LOG2E = math.log2(math.e)
HEAD_DIMS = (64, 128)
TUNING = {
    # per kernel and head size. ST: stages of the pipeline, at least 3, since a step awaits the next one's tiles before it
    # gives up those of the one before. HOLD: keep the resident codes in registers, not in shared memory. BM, BN: a step.
    ("forward", 64): {"ST": 4, "HOLD": True},
    ("forward", 128): {"ST": 4, "HOLD": HOLD_Q_OF_128},
    ("dkv", 64): {"ST": 4, "BM": 64},
    ("dkv", 128): {"ST": 3, "BM": 64},
    ("dq", 64): {"ST": 4, "BN": 64, "HOLD": True},
    ("dq", 128): {"ST": 4, "BN": 64, "HOLD": HOLD_Q_OF_128},
}
OPTIONS = {"num_warps": 4, "enable_fp_fusion": True}  # releases of Triton differ in whether they fuse unasked
SHARED = 32  # numbers of k_groups in one load, 128 bytes: stages lie no closer; a step reads the first two or four
SMALLEST_SCALE = 1e-30  # stands for a softmax scale of zero, so that -inf * scale stays -inf
PLAIN = Recipe.strict("mxfp8_scores")
EDGE = Recipe.strict("mxfp8_scores", frontier_scores="bf16")
# scales of one token: the route's three presets are one
RECIPES = frozenset(
    replace(recipe, delta=delta)
    for recipe in (EDGE, *(Recipe.parse(f"mxfp8_scores/{name}") for name in SAFETIES))
    for delta in ("output", "compensated")
)


class Encoded(NamedTuple):
    """The parts of what a forward saves: codes (quantize.py), the factors of the scores, and the lists of work."""

    q_codes: Tensor
    k_codes: Tensor
    v_codes: Tensor
    q_factor: Tensor
    k_factor: Tensor
    v_factor: Tensor
    k_groups: Tensor
    plan: Plan


def parts(saved: Tensor, q: Tensor, k: Tensor, documents: Documents) -> Encoded:
    """Cut the buffer of a call with these shapes."""
    (tq, hq, d), (tk, hk, _) = q.shape, k.shape
    codes, factors, words = sections(tq, tk, documents.cu_q.numel() - 1, hq, hk, d)
    bytes_of = (sum(codes), 4 * sum(factors), 4 * sum(words))
    if saved.numel() != sum(bytes_of):
        raise ValueError(
            f"saved holds {saved.numel()} bytes, but a call of q {tuple(q.shape)}, k {tuple(k.shape)} and "
            f"{documents.cu_q.numel() - 1} documents keeps {sum(bytes_of)}: give the backward what its own forward saved"
        )
    if saved.data_ptr() % 16:  # somebody has moved it, and TMA cannot read it there
        saved = saved.clone()
    c, f, w = saved.split_with_sizes(bytes_of)
    return Encoded(
        *c.view(torch.float8_e4m3fn).split_with_sizes(codes),
        *f.view(torch.float32).split_with_sizes(factors),
        tables(w.view(torch.int32), words),
    )


@cache
def multiprocessors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def generation(device: int) -> int:
    return torch.cuda.get_device_capability(device)[0]


def tiles(x: Tensor, rows: int, width: int) -> TensorDescriptor:
    """TMA descriptor of a matrix of any number of rows in tiles of `rows` x all of its `width` columns."""
    return descriptor(x, [x.numel() // width, width], [width, 1], [rows, width])


def packed_tiles(x: Tensor, rows: int) -> TensorDescriptor:
    """TMA descriptor of (tokens, heads, D) in tiles of `rows` tokens of one head; rows past the end read as zero."""
    t, h, d = x.shape
    return descriptor(x, [t, h * d], [x.stride(0), 1], [rows, d])


def vectors(x: Tensor, rows: int) -> TensorDescriptor:
    return descriptor(x, [x.numel()], [1], [rows])


def packed(x: Tensor) -> Tensor:
    """x in a layout that the kernels read: heads and features dense, rows on 16 bytes. Copies only if it must."""
    _, heads, d = x.shape
    dense = x.stride(2) == 1 and x.stride(1) == d
    good = dense and x.stride(0) % 8 == 0 and x.stride(0) >= heads * d and x.data_ptr() % 16 == 0
    return x if good else x.clone(memory_format=torch.contiguous_format)


def encode(
    q: Tensor, k: Tensor, v: Tensor, documents: Documents, scale: float, o: Tensor, lse: Tensor
) -> tuple[Tensor, Encoded, Tensor]:
    """Lay out the call and encode q, k and v: two kernels. Also sets o and lse of the rows outside all documents.
    Returns what the backward wants, in one buffer and in parts, and V decoded in BF16, which only the forward reads."""
    q, k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (q, k, v))
    (tq, hq, d), (tk, hk, _) = q.shape, k.shape
    saved = empty_saved(q, k, documents)
    e = parts(saved, q, k, documents)
    lay_out(e.plan, documents, tq, tk)
    q_pad, k_pad = e.plan.q_capacity * BLOCK, e.plan.k_capacity * BLOCK
    v_decoded = torch.empty(hk * k_pad * d, dtype=torch.bfloat16, device=q.device)
    encode_kernel[(max(q_pad, k_pad) // ROWS, hq + hk + 1)](
        q, k, v, e.q_codes, e.k_codes, e.v_codes, v_decoded, e.q_factor, e.k_factor, e.v_factor, e.k_groups,
        o, lse, e.plan.q_blocks, e.plan.k_blocks, e.plan.counts, q.stride(0), q.stride(1), k.stride(0),
        k.stride(1), v.stride(0), v.stride(1), q_pad, k_pad, exponent_of(scale),
        math.copysign(1.0, scale), hq, hk, tq, tk, D=d, ROWS=ROWS, num_warps=4,
    )  # fmt: skip
    return saved, e, v_decoded


def empty_saved(q: Tensor, k: Tensor, documents: Documents) -> Tensor:
    """Memory for what a forward of these shapes saves."""
    (tq, hq, d), (tk, hk, _) = q.shape, k.shape
    size = nbytes(tq, tk, documents.cu_q.numel() - 1, hq, hk, d)
    return torch.empty(size, dtype=torch.uint8, device=q.device)


def sides(documents: Documents) -> tuple[int, int]:
    left = OPEN if documents.left is None else min(documents.left, OPEN)
    right = OPEN if documents.right is None else min(documents.right, OPEN)
    return left, right


def need_the_same_tokens(recipe: Recipe, documents: Documents) -> None:
    """Where blocks of queries must lie on blocks of keys: they do if both are the same tokens, or somebody vouches for it."""
    if documents.cu_q.data_ptr() != documents.cu_k.data_ptr() and not documents.aligned:
        raise UnsupportedError(
            f"recipe {str(recipe)!r}: the kernels compute it where queries and keys are the same tokens, not with offsets of "
            f"their own for the keys (cu_seqlens_k, or another length). Leave those out, take {str(PLAIN)!r}, or ask for "
            f"backend='reference'"
        )


def has_edge(recipe: Recipe, documents: Documents) -> bool:
    """Whether a block of queries has its scores with its own block of keys from Q and K as given.

    Which pairs of blocks straddle the mask's right edge is a matter of positions, so blocks of queries must lie on blocks of
    keys: a document's last query is its last key, wherever it ends, only if it has as many of the one as of the other. And
    the kernels are made for one such pair, which there is where the mask is causal; without a mask there is none.
    """
    left, right = sides(documents)
    if recipe.full == recipe.frontier or min(left, right) == OPEN:
        return False
    need_the_same_tokens(recipe, documents)
    if right != 0:
        raise UnsupportedError(
            f"recipe {str(recipe)!r}: the kernels compute it under a causal mask, with or without a window to the left, "
            f"not under left = {documents.left}, right = {documents.right}. Take {str(PLAIN)!r}, or ask for backend='reference'"
        )
    return True


def exponent_of(scale: float) -> float:
    """What makes a score an exponent of two, without its sign."""
    return max(abs(scale), SMALLEST_SCALE) * LOG2E


def grid(items: int, device: torch.device) -> tuple[int]:
    """Persistent CTAs, one per multiprocessor."""
    return (min(items, multiprocessors(device.index or 0)),)


def heads_together(blocks: int, device: torch.device) -> int:
    """How many heads to work on at a time: as few as give nearly every multiprocessor something to do."""
    return max(1, -(-3 * multiprocessors(device.index or 0) // (4 * blocks)))


def forward_saving(
    q: Tensor, k: Tensor, v: Tensor, documents: Documents, recipe: Recipe, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(o, lse, residual, saved). Shapes as in reference/: q (Tq, Hq, D), k, v (Tk, Hk, D), lse (Hq, Tq) natural log."""
    (tq, hq, d), (tk, hk, _) = q.shape, k.shape
    none, compensated = q.new_empty(0), recipe.delta == "compensated"
    if tq == 0 or tk == 0 or documents.cu_q.numel() < 2:
        o = torch.zeros(tq, hq, d, dtype=q.dtype, device=q.device)
        rest = torch.zeros_like(o) if compensated else none
        return o, q.new_full((hq, tq), -math.inf, dtype=torch.float32), rest, empty_saved(q, k, documents)
    edge = has_edge(recipe, documents)
    o = torch.empty(tq, hq, d, dtype=q.dtype, device=q.device)
    lse = torch.empty(hq, tq, dtype=torch.float32, device=q.device)
    rest = torch.zeros_like(o) if compensated else none
    saved, e, v_decoded = encode(q, k, v, documents, scale, o, lse)
    left, right = sides(documents)
    q_given, k_given = (packed(q), packed(k)) if edge else (o, o)  # not read
    q_pad, k_pad = e.plan.q_capacity * BLOCK, e.plan.k_capacity * BLOCK
    forward_kernel[grid(e.plan.q_capacity * hq, q.device)](
        tiles(e.q_codes, 64, d), vectors(e.q_factor, 64), tiles(e.k_codes, 128, d), tiles(v_decoded, 128, d),
        vectors(e.k_factor, 128), vectors(e.k_groups, SHARED), packed_tiles(q_given, 64), packed_tiles(k_given, 128), o,
        rest, lse, e.plan.q_items, e.plan.counts, q_pad, k_pad, o.stride(0), lse.stride(0), left, right, exponent_of(scale), hq,
        hq // hk, heads_together(e.plan.q_capacity, q.device), D=d, BN=128, LEFT=left < OPEN,
        FRONTIER=edge, REMAINDER=compensated, **TUNING["forward", d], **OPTIONS,
    )  # fmt: skip
    return o, lse, rest, saved


def forward(
    q: Tensor, k: Tensor, v: Tensor, documents: Documents, recipe: Recipe, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    return forward_saving(q, k, v, documents, recipe, scale)[:3]


def backward(
    do: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor | None, o: Tensor, lse: Tensor, residual: Tensor,
    documents: Documents, recipe: Recipe, scale: float, saved: Tensor | None = None, wanted: tuple[bool, bool, bool] =
    (True, True, True),
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(dq, dk, dv). saved: what `forward_saving` gave for the same q, k, v, documents and scale; v is not read then, and
    may be None. wanted: a pass whose gradients nobody wants is not run, and what is returned for them means nothing."""
    (tq, hq, d), (tk, hk, _) = q.shape, k.shape
    if tq == 0 or tk == 0 or documents.cu_q.numel() < 2:
        return tuple(torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, k))
    if saved is not None:
        e = parts(saved, q, k, documents)
    else:
        _, e, _ = encode(q, k, v, documents, scale, torch.empty_like(o), torch.empty_like(lse))
    q, k, residual = packed(q), packed(k), residual.contiguous()
    do, o = (x if x.stride(2) == 1 else x.contiguous() for x in (do, o))
    lse = lse if lse.stride(1) == 1 else lse.contiguous()
    layout = e.plan
    device = q.device
    q_pad, k_pad = layout.q_capacity * BLOCK, layout.k_capacity * BLOCK
    g_codes = torch.empty(hq, q_pad, d, dtype=torch.float8_e4m3fn, device=device)
    g_wide = torch.empty(hq, q_pad, d, dtype=torch.bfloat16, device=device)
    rows = hq * q_pad
    wide = torch.empty(2 * rows + 16, dtype=torch.float32, device=device)
    lse2, delta, turns = wide.split_with_sizes((rows, rows, 16))
    turns = turns.view(torch.int32)  # the counts, and what the two passes have given out
    q_clean, k_clean = (torch.empty(x.shape, dtype=x.dtype, device=device) for x in (q, k))
    dq = torch.empty(tq, hq, d, dtype=q.dtype, device=device)
    dk, dv = (torch.empty(tk, hk, d, dtype=k.dtype, device=device) for _ in range(2))
    dlse_strides = (0, 0) if dlse is None else (dlse.stride(1), dlse.stride(0))
    encode_gradient_kernel[(max(layout.q_capacity, layout.k_capacity) * (BLOCK // ROWS), hq + 1)](
        do, o, residual, lse, lse if dlse is None else dlse, g_codes, g_wide, lse2, delta, q, k, q_clean, k_clean, dq, dk, dv,
        layout.q_blocks, layout.counts, turns, do.stride(0), do.stride(1), o.stride(0), o.stride(1), q.stride(0),
        q.stride(1), k.stride(0), k.stride(1), lse.stride(0), *dlse_strides, q_pad, tq, tk, hq, hk,
        HAS_DLSE=dlse is not None, REMAINDER=recipe.delta == "compensated", D=d, ROWS=ROWS, num_warps=4,
    )  # fmt: skip
    left, right = sides(documents)
    window, edge = left < OPEN, has_edge(recipe, documents)
    kv_tuning, q_tuning = TUNING["dkv", d], TUNING["dq", d]
    bm, bn = kv_tuning["BM"], q_tuning["BN"]
    if wanted[1] or wanted[2]:
        dkv_kernel[grid(layout.k_capacity * hk, device)](
            tiles(e.k_codes, 64, d), tiles(e.v_codes, 64, d), vectors(e.k_factor, 64), vectors(e.v_factor, 64),
            tiles(e.q_codes, bm, d), tiles(g_codes, bm, d), packed_tiles(q, bm), packed_tiles(q_clean, bm),
            tiles(g_wide, bm, d), vectors(e.q_factor, bm), vectors(lse2, bm), vectors(delta, bm), packed_tiles(k, 64), dk,
            dv, layout.k_items, turns, q_pad, k_pad, scale, exponent_of(scale), left, right, hk, hq // hk,
            heads_together(layout.k_capacity, device), D=d, LEFT=window, FRONTIER=edge, **kv_tuning, **OPTIONS,
        )  # fmt: skip
    if wanted[0]:
        dq_kernel[grid(layout.q_capacity * hq, device)](
            tiles(e.q_codes, 64, d), tiles(g_codes, 64, d), vectors(e.q_factor, 64), vectors(lse2, 64),
            vectors(delta, 64), tiles(e.k_codes, bn, d), tiles(e.v_codes, bn, d), packed_tiles(k, bn),
            packed_tiles(k_clean, bn), vectors(e.k_factor, bn), vectors(e.v_factor, bn), vectors(e.k_groups, SHARED),
            packed_tiles(q, 64), dq, layout.q_items, turns, q_pad, k_pad, scale, exponent_of(scale), left, right, hq,
            hq // hk, heads_together(layout.q_capacity, device), D=d, LEFT=window, FRONTIER=edge, **q_tuning,
            **OPTIONS,
        )  # fmt: skip
    return dq, dk, dv
