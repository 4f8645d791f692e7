"""From tensors to kernels. Nothing here waits for the device or reads an offset; what is encoded lives for one call."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from flamia.packing import Documents
from flamia.quantize import GROUP
from flamia.recipe import Recipe
from flamia.saved import BLOCK, sections

from ..launch import LOG2E, need_the_same_tokens, sides
from ..schedule import OPEN, Plan, lay_out, tables
from .backward import dkv_kernel, dq_kernel
from .encode import encode_gradient_kernel, encode_kernel
from .forward import forward_kernel

STRICT = Recipe.strict("mxfp8")
FAST = Recipe.fast("mxfp8", dq_accumulator="fp32")
RECIPES = (STRICT, FAST)
FUSE = {"enable_fp_fusion": True}  # releases of Triton differ in whether they fuse unasked
FORWARD = {"BM": 128, "num_warps": 8, "num_stages": 2} | FUSE
DQ = {"BM": 64, "num_warps": 4, "num_stages": 2} | FUSE
DKV = {"BN": 32, "num_warps": 4, "num_stages": 2} | FUSE


class Operand(NamedTuple):
    """What encode.py writes of a tensor, rows padded by documents: (heads, rows, D) twice, (heads, rows) twice. Where nothing
    reads the tensor as given, `given` is `rounded`."""

    rounded: Tensor
    given: Tensor
    factor: Tensor
    mark: Tensor


def plan_of(q: Tensor, k: Tensor, documents: Documents) -> Plan:
    (tq, hq, d), (tk, hk, _) = q.shape, k.shape
    sizes = sections(tq, tk, documents.cu_q.numel() - 1, hq, hk, d)[2]
    plan = tables(torch.empty(sum(sizes), dtype=torch.int32, device=q.device), sizes)
    lay_out(plan, documents, tq, tk)
    return plan


def empty_operand(x: Tensor, rows: int, twice: bool) -> Operand:
    heads, d, device = x.shape[1], x.shape[2], x.device
    rounded = torch.empty(heads, rows, d, dtype=torch.bfloat16, device=device)
    factor, mark = torch.empty(2, heads, rows, dtype=torch.float32, device=device).unbind(0)
    return Operand(rounded, torch.empty_like(rounded) if twice else rounded, factor, mark)


def encode(x: Tensor, plan: Plan, side: int, block: bool, strict: bool) -> Operand:
    """side: 0 for queries, 1 for keys. block: one scale for 32 tokens, else for one."""
    records, blocks = (plan.q_blocks, plan.q_capacity) if side == 0 else (plan.k_blocks, plan.k_capacity)
    out = empty_operand(x, blocks * BLOCK, strict)
    encode_kernel[(blocks * (BLOCK // GROUP), x.shape[1])](
        x, *out, records, plan.counts, side, x.stride(0), x.stride(1), blocks * BLOCK,
        BLOCK=block, STRICT=strict, D=x.shape[2], num_warps=4, **FUSE,
    )  # fmt: skip
    return out


class Call(NamedTuple):
    """What both directions need to know."""

    plan: Plan
    q: Operand
    k: Operand
    v: Operand
    left: int
    right: int
    options: dict


def prepare(q: Tensor, k: Tensor, v: Tensor, documents: Documents, recipe: Recipe) -> Call:
    left, right = sides(documents)
    strict = recipe.safety == "strict"
    plan = plan_of(q, k, documents)
    keys, values = encode(k, plan, 1, True, strict), encode(v, plan, 1, True, strict)
    keys.mark.mul_(values.mark)  # a row that sees a token is as finite as its key and its value
    return Call(
        plan, encode(q, plan, 0, not strict, strict), keys, values, left, right,
        {"STRICT": strict, "LEFT": left < OPEN, "RIGHT": right < OPEN, "D": q.shape[2]},
    )  # fmt: skip


def forward(
    q: Tensor, k: Tensor, v: Tensor, documents: Documents, recipe: Recipe, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(o, lse, residual) as in reference/: o (Tq, Hq, D), lse (Hq, Tq) float32, an empty residual."""
    need_the_same_tokens(recipe, documents)
    (tq, hq, d), hk = q.shape, k.shape[1]
    q, k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (q, k, v))
    o = torch.zeros(tq, hq, d, dtype=q.dtype, device=q.device)
    lse = q.new_full((hq, tq), -math.inf, dtype=torch.float32)
    if tq and k.shape[0] and documents.cu_q.numel() > 1:
        call = prepare(q, k, v, documents, recipe)
        plan = call.plan
        forward_kernel[(plan.q_capacity * hq, BLOCK // FORWARD["BM"])](
            call.q.rounded, call.q.given, call.q.mark, call.k.rounded, call.k.given, call.k.mark, call.v.rounded, call.v.given,
            call.v.factor, o, lse, plan.q_items, plan.counts, plan.q_capacity * BLOCK,
            plan.k_capacity * BLOCK, o.stride(0), lse.stride(0), call.left, call.right, scale * LOG2E, hq, hq // hk,
            **call.options, **FORWARD,
        )  # fmt: skip
    return o, lse, q.new_empty(0)


def backward(
    do: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, residual: Tensor,
    documents: Documents, recipe: Recipe, scale: float, wanted: tuple[bool, bool, bool] = (True, True, True),
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(dq, dk, dv), in the shapes of q, k and v; those not wanted stay zero."""
    need_the_same_tokens(recipe, documents)
    (tq, hq, _), hk = q.shape, k.shape[1]
    dq, dk, dv = (torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    if not (tq and k.shape[0] and documents.cu_q.numel() > 1):
        return dq, dk, dv
    q, k, v, do, o = (x if x.stride(2) == 1 else x.contiguous() for x in (q, k, v, do, o))
    call = prepare(q, k, v, documents, recipe)
    plan = call.plan
    g = empty_operand(do, plan.q_capacity * BLOCK, False)
    lse2, delta = torch.empty(2, hq, plan.q_capacity * BLOCK, dtype=torch.float32, device=q.device).unbind(0)
    lse = lse if lse.stride(1) == 1 else lse.contiguous()
    q_pad, k_pad = plan.q_capacity * BLOCK, plan.k_capacity * BLOCK
    encode_gradient_kernel[(plan.q_capacity * (BLOCK // GROUP), hq)](
        do, o, lse, lse if dlse is None else dlse, g.rounded, g.factor, g.mark, lse2, delta, plan.q_blocks, plan.counts,
        do.stride(0), do.stride(1), o.stride(0), o.stride(1), lse.stride(0),
        *((0, 0) if dlse is None else dlse.stride()), q_pad, call.left, call.right,
        BLOCK=recipe.safety == "fast", HAS_DLSE=dlse is not None, num_warps=4, **call.options, **FUSE,
    )  # fmt: skip
    rows = (*call.q, g.rounded, g.factor, g.mark, lse2, delta)
    keys = (*call.k, call.v.rounded, call.v.given)
    if wanted[0]:
        dq_kernel[(plan.q_capacity * hq, BLOCK // DQ["BM"])](
            *rows, *keys, dq, plan.q_items, plan.counts, q_pad, k_pad, dq.stride(0), call.left, call.right, scale * LOG2E,
            scale, hq, hq // hk, **call.options, **DQ,
        )  # fmt: skip
    if wanted[1] or wanted[2]:
        dkv_kernel[(plan.k_capacity * hk, BLOCK // DKV["BN"])](
            *rows, *keys, dk, dv, plan.k_items, plan.counts, q_pad, k_pad, dk.stride(0), call.left, call.right,
            scale * LOG2E, scale, hk, hq // hk, **call.options, **DKV,
        )  # fmt: skip
    return dq, dk, dv
