"""The one place that knows how Triton's releases differ.

The kernels are written once, in Gluon, and run under Triton 3.6 (the release that torch 2.11 brings) to 3.9. Between the
two some names moved and one helper appeared; whatever else imports Gluon takes those names from here.
"""

from __future__ import annotations

from functools import cache

import triton
from torch import Tensor
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


def parse_version(text: str) -> tuple[int, int]:
    major, minor = text.split(".")[:2]
    return int(major), int(minor)


# What ptxas has registers for differs with the code each release gives it: 3.9's forward of 128 features spills inside the
# loop when it also holds Q's codes in registers, 3.6's does not and is 4% faster for it on 1024-token documents.
HOLD_Q_OF_128 = parse_version(triton.__version__) < (3, 7)

# `async_load` since 3.9; its older name still works there but warns.
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared


if hasattr(gl.shared_memory_descriptor, "reinterpret"):  # since 3.9

    @gluon.jit
    def as_bfloat16(tile, rows: gl.constexpr, columns: gl.constexpr):
        """A tile in shared memory, read and written as one of bfloat16 in the layout of a TMA descriptor."""
        return tile.reinterpret(gl.bfloat16, [rows, columns], gl.NVMMASharedLayout(128, 16, 2))

else:

    @gluon.jit
    def as_bfloat16(tile, rows: gl.constexpr, columns: gl.constexpr):
        """A tile in shared memory, read and written as one of bfloat16 in the layout of a TMA descriptor."""
        return tile._reinterpret(gl.bfloat16, [rows, columns], gl.NVMMASharedLayout(128, 16, 2))


@cache
def _shared_layout(row_bytes: int, bits: int, rank: int) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout(0 if rank == 1 else min(128, row_bytes), bits, rank)


def descriptor(x: Tensor, shape: list[int], strides: list[int], block: list[int]) -> TensorDescriptor:
    """A TMA descriptor of x's memory, swizzled as wgmma reads it. The constructor's checks take longer than the launch
    of a kernel, and the callers have made sure of what it checks: alignment, a dense last axis, no empty axis."""
    made = TensorDescriptor.__new__(TensorDescriptor)
    made.base, made.shape, made.strides, made.block_shape = x, shape, strides, block
    made.layout = _shared_layout(block[-1] * x.element_size(), x.element_size() * 8, len(block))
    made.padding = "zero"
    return made


__all__ = [
    "HOLD_Q_OF_128",
    "TensorDescriptor",
    "as_bfloat16",
    "descriptor",
    "fence_async_shared",
    "gl",
    "gluon",
    "mbarrier",
    "tma_load",
    "warpgroup_mma",
    "warpgroup_mma_wait",
]
