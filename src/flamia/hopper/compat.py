"""The one place that knows how Triton's releases differ.

The kernels are written once, in Gluon, and run under Triton 3.6 (the release that torch 2.11 brings) to 3.9. Between the
two some names moved and one helper appeared; whatever else imports Gluon takes those names from here.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

# `async_load` since 3.9; its older name still works there but warns.
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared

__all__ = [
    "TensorDescriptor",
    "fence_async_shared",
    "gl",
    "gluon",
    "mbarrier",
    "tma_load",
    "warpgroup_mma",
    "warpgroup_mma_wait",
]
