"""2^x, exactly or as inference kernels approximate it.

With x = n + f, f in [0, 1): 2^x = 2^n * 2^f, and the approximations replace 2^f. They serve the forward and the backward
alike: a model trained with one of them approximated and the other exact diverges.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_MEAN_RATIO = 1.0 / (2.0 * math.log(2.0) ** 2)
"""The mean over f of the secant's ratio (1 + f) / 2^f."""


def exp2(x: Tensor, variant: str) -> Tensor:
    """2^x in float64; -inf gives 0 and NaN stays.

    exact; polynomial: degree 3, exact at both ends, relative error up to 1.03e-4 (the degree that kernels run on
    multiply-add units); mitchell: the secant 1 + f, up to 6.15% too large at f = 0.4427; schraudolph: the secant over its
    mean ratio, so that the error averages to zero over f.
    """
    if variant == "exact":
        return torch.exp2(x)
    n = torch.floor(x)
    f = torch.where(x.isinf(), 0.0, x - n)
    if variant == "polynomial":
        mantissa = 1 + f + f * (1 - f) * (-0.30457565371739026 - 0.07826796480365411 * f)
    else:
        mantissa = (1 + f) / (_MEAN_RATIO if variant == "schraudolph" else 1.0)
    return mantissa * torch.exp2(n)
