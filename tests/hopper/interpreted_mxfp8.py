"""The kernels of the route `mxfp8` against the reference without a GPU, by Triton's interpreter. Its casts between float32 and
BF16 and its BF16 products are wrong, so they are replaced here; the kernels have no others (codes are made by float32
arithmetic). What a card does besides, layouts, registers and tensor cores, is tests/gpu/test_mxfp8.py's.

A program of its own, since the interpreter is chosen before Triton is imported. Prints a line for each check that holds.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

import sys

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

from flamia import reference
from flamia.hopper import mxfp8
from flamia.packing import Documents

torch.set_num_threads(1)
np.seterr(all="ignore")
STRICT, FAST = mxfp8.RECIPES
NAMES = ("o", "lse", "dq", "dk", "dv")
# lengths, heads, window
CASES = (((150, 0, 3), (2, 1), (None, 0)), ((200,), (1, 1), (60, 20)), ((140,), (1, 1), (None, None)))


def widened(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def narrowed(x: np.ndarray) -> np.ndarray:
    x = torch.from_numpy(np.ascontiguousarray(x, dtype=np.float32).copy())
    return x.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)


def repair(builder) -> None:
    """Casts and products of the interpreter, where BF16 takes part."""
    theirs = builder.cast_impl

    def cast(self, source, kind, *_):
        before, after = source.dtype.scalar, kind.scalar
        if before == tl.bfloat16 and after == tl.float32:
            return interpreter.TensorHandle(widened(source.data), after)
        if before == tl.float32 and after == tl.bfloat16:
            return interpreter.TensorHandle(narrowed(source.data), after)
        return theirs(self, source, kind)

    def dot(self, a, b, c, *_):
        a, b = (widened(x.data) if x.dtype.scalar == tl.bfloat16 else x.data for x in (a, b))
        return interpreter.TensorHandle((np.matmul(a, b) + c.data).astype(np.float32), c.dtype.scalar)

    builder.cast_impl = cast
    builder.create_fp_ext = builder.create_fp_trunc = builder.create_fp_to_fp = cast
    builder.create_dot = dot


repair(interpreter.InterpreterBuilder)


def offsets(*lengths: int) -> torch.Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0).to(torch.int32)


def draw(tokens: int, heads: tuple[int, int] = (1, 1), d: int = 64, seed: int = 0) -> list[torch.Tensor]:
    """q, k, v, dO."""
    torch.manual_seed(seed)
    hq, hk = heads
    return [torch.randn(tokens, h, d).to(torch.bfloat16) for h in (hq, hk, hk, hq)]


def run(room, q, k, v, do, dlse, documents, recipe):
    scale = q.shape[-1] ** -0.5
    o, lse, rest = room.forward(q, k, v, documents, recipe, scale)
    return o, lse, *room.backward(do, dlse, q, k, v, o, lse, rest, documents, recipe, scale)


def both(given, documents, recipe, dlse=None):
    return [run(room, *given, dlse, documents, recipe) for room in (mxfp8, reference)]


def close(got, want, limit: float = 2e-3) -> None:
    for name, g, w in zip(NAMES, got, want):
        assert torch.equal(g.isfinite(), w.isfinite()), name
        alive = w.isfinite()
        difference = (g[alive].double() - w[alive].double()).norm()
        assert difference <= limit * w[alive].double().norm() + 1e-30, (name, difference)


def check_masks_heads_and_short_documents():
    for recipe in (STRICT, FAST):
        for lengths, heads, window in CASES:
            cu = offsets(*lengths)
            given = draw(sum(lengths) + 5, heads)
            dlse = torch.randn(heads[0], sum(lengths) + 5)
            close(*both(given, Documents(cu, cu, *window), recipe, dlse))


def check_a_token_that_is_not_finite():
    cu = offsets(180)
    documents = Documents(cu, cu, None, 0)
    for which in range(4):
        given = draw(180)
        given[which][100, 0, 7] = torch.nan
        got, want = both(given, documents, STRICT)
        assert any(x.isnan().any() for x in want)
        for name, g, w in zip(NAMES, got, want):
            assert torch.equal(g.isnan(), w.isnan()), (which, name)


def check_the_largest_finite_numbers_cross_no_mask():
    cu = offsets(300)
    documents = Documents(cu, cu, None, 0)
    given = draw(300)
    whole = run(mxfp8, *given, None, documents, STRICT)
    given[3][140, 0, 3] = 3.35e38
    changed = run(mxfp8, *given, None, documents, STRICT)
    assert torch.equal(changed[4][141:], whole[4][141:])  # of keys that row 140 does not see


def check_full_pairs_beyond_the_end():
    for length, window in ((130, (None, 130)), (260, (300, 300))):
        given = draw(length)
        given[0][..., 0], given[1][..., 0] = 16, -10
        cu = offsets(length)
        for recipe in (STRICT, FAST):
            close(*both(given, Documents(cu, cu, *window), recipe), limit=5e-3)


def check_scales_that_lie_far_apart():
    cu = offsets(300)
    documents = Documents(cu, cu, None, 0)
    q, k, v, do = draw(300)
    far = v.clone()
    far[:32] *= 2.0**-16
    far[40] *= 2.0**122
    got, want = both((q, k, far, do), documents, STRICT)
    assert want[0].isfinite().all() and got[0].isfinite().all()
    k[:32] *= 2.0**-60
    k[32:64] *= 2.0**30
    got, want = both((q * 2.0**-30, k, v, do * 2.0**60), documents, STRICT)
    assert want[2].isfinite().all() and got[2].isfinite().all()


if __name__ == "__main__":
    for name, check in list(globals().items()):
        if name.startswith("check_"):
            check()
            print(name)
    sys.stdout.flush()
