"""Which kernels answer a call: those of the route `mxfp8_scores` (launch.py), or those of `mxfp8` (mxfp8/).

`forward` and `backward` are the two calls every backend answers (reference/ has the same). `supports` says, before any
work, why a call is none that kernels compute.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flamia.packing import Documents
from flamia.recipe import Recipe

from . import launch, mxfp8

HEAD_DIMS = launch.HEAD_DIMS


def supports(
    q: Tensor, k: Tensor, v: Tensor, recipe: Recipe, window: tuple[int | None, int | None] | None
) -> str | None:
    """None if kernels compute this call; else the reason why not."""
    d = q.shape[-1]
    if q.device.type != "cuda" or launch.generation(q.device.index or 0) != 9:
        return f"the kernels need a Hopper GPU (compute capability 9.x); the tensors are on {q.device}"
    if recipe not in launch.RECIPES and recipe not in mxfp8.RECIPES:
        if recipe.route not in ("mxfp8_scores", "mxfp8"):
            return f"route {recipe.route!r} has no Hopper kernel; 'mxfp8_scores' and 'mxfp8' have"
        return (
            f"recipe {str(recipe)!r}: the kernels compute {str(launch.PLAIN)!r}, with frontier_scores=bf16 and "
            f"delta=compensated or without, {str(mxfp8.STRICT)!r} and {str(mxfp8.FAST)!r}"
        )
    if q.dtype != torch.bfloat16:
        return f"dtype {q.dtype}: the kernels take bfloat16"
    if d not in HEAD_DIMS or v.shape[-1] != d:
        sizes = " or ".join(map(str, HEAD_DIMS))
        return f"head sizes {d} (q, k) and {v.shape[-1]} (v): the kernels take {sizes}, the same for both"
    return None


def forward(
    q: Tensor, k: Tensor, v: Tensor, documents: Documents, recipe: Recipe, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    return (mxfp8 if recipe in mxfp8.RECIPES else launch).forward(q, k, v, documents, recipe, scale)


def forward_saving(
    q: Tensor, k: Tensor, v: Tensor, documents: Documents, recipe: Recipe, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`forward`, and what it encoded, for recipes that keep it (flamia/saved.py, `keeps`)."""
    return launch.forward_saving(q, k, v, documents, recipe, scale)


def backward(
    do: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor | None, o: Tensor, lse: Tensor, residual: Tensor,
    documents: Documents, recipe: Recipe, scale: float, saved: Tensor | None = None, wanted: tuple[bool, bool, bool] =
    (True, True, True),
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    if recipe in mxfp8.RECIPES:
        if v is None:
            raise ValueError(f"v is None: {str(recipe)!r} keeps nothing of the forward, so its backward needs v")
        return mxfp8.backward(do, dlse, q, k, v, o, lse, residual, documents, recipe, scale, wanted)
    return launch.backward(do, dlse, q, k, v, o, lse, residual, documents, recipe, scale, saved, wanted)
