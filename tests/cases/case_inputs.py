"""What the case files share: recipes by promise, and one call that returns all five tensors."""

from typing import NamedTuple

import torch
from helpers import documents, exact_attention, inputs, offsets, same_bits

import flamia
from flamia import Recipe

RECIPES = [f"{route}/{safety}" for route in ("mxfp8", "nvfp4_fp8", "nvfp4") for safety in ("strict", "fold", "fast")]
RECIPES += ["mxfp8_scores/strict", "bf16/strict", "mxfp8/strict,rotate=True", "mxfp8/strict,u_range=running"]


def claiming(*claims: str) -> list[str]:
    """The recipes that promise all of `claims`. Guards against an empty list, which would test nothing."""
    names = [name for name in RECIPES if Recipe.parse(name).claims >= set(claims)]
    assert len(names) >= 4
    return names


def by_route(recipe: str, **bounds: float) -> float:
    """The bound for a recipe's route: what its formats can do. `mxfp8` serves `mxfp8_scores` too."""
    return bounds[recipe.split("/")[0].removesuffix("_scores")]


class Result(NamedTuple):
    o: torch.Tensor
    lse: torch.Tensor
    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor


def at(*values: int) -> torch.Tensor:
    """cu_seqlens with these entries."""
    return torch.tensor(values, dtype=torch.int32)


def tensors(queries: int, keys: int | None = None, heads=(4, 2), dims=(16, 16), seed=0, dtype=torch.bfloat16):
    """q, k, v and a gradient for o."""
    return list(inputs(queries, heads, dims[0], dims[1], seed, keys, dtype))


def run(q, k, v, do, cu=None, dlse=None, **options) -> Result:
    """Forward and backward of packed attention, causal unless told; tensors may be views. cu None: one document."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    if cu is None:
        cu = offsets([q.shape[0]])
        if k.shape[0] != q.shape[0]:
            options["cu_seqlens_k"] = offsets([k.shape[0]])
    options.setdefault("causal", True)
    o, lse = flamia.attention_varlen(*leaves, cu, return_lse=True, **options)
    outputs, seeds = ([o], [do]) if dlse is None else ([o, lse], [do, dlse])
    return Result(o.detach(), lse.detach(), *torch.autograd.grad(outputs, leaves, seeds))


def all_same(xs, ys) -> bool:
    """Equal bits, tensor by tensor, NaN matched by position."""
    return len(xs) == len(ys) and all(same_bits(x.contiguous(), y.contiguous()) for x, y in zip(xs, ys))


def rows(result: Result, queries: slice, keys: slice | None = None) -> Result:
    """The part of a result that belongs to some queries and keys."""
    keys = queries if keys is None else keys
    return Result(result.o[queries], result.lse[:, queries], result.dq[queries], result.dk[keys], result.dv[keys])


def exact(q, k, v, do, dlse=None, left=None, right=0) -> Result:
    """One document by the textbook, in float64."""
    docs = documents([q.shape[0]], left, right, [k.shape[0]])
    return Result(*exact_attention(q, k, v, do, None if dlse is None else dlse.double(), docs, q.shape[-1] ** -0.5))
