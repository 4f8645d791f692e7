"""What the tests on a card share: cases, calls of the kernels, and comparisons."""

from __future__ import annotations

import math
from contextlib import contextmanager

import torch
from torch import Tensor

from flamia import hopper
from flamia.packing import Documents
from flamia.recipe import Recipe

RECIPE = Recipe.strict("mxfp8_scores")
NAMES = ("o", "lse", "dq", "dk", "dv")

# lengths of queries (and of keys, where they differ), heads, D, (left, right)
CASES = {
    "one": ([300], None, (2, 2), 128, (None, 0)),
    "short": ([1, 0, 5, 64, 127, 0, 128, 129, 3], None, (2, 1), 128, (None, 0)),
    "long": ([1111, 900], None, (2, 2), 128, (None, 0)),
    "open": ([300, 77, 513], None, (2, 2), 128, (None, None)),
    "grouped": ([257, 400], None, (8, 2), 128, (None, 0)),
    "many heads on one": ([257, 130], None, (4, 1), 64, (None, 0)),
    "small heads": ([700, 31, 200], None, (4, 4), 64, (None, 0)),
    "window": ([900, 50, 300], None, (2, 1), 128, (200, 0)),
    "two-sided window": ([700, 300], None, (2, 2), 128, (130, 40)),
    "narrow window": ([500], None, (2, 2), 64, (3, 0)),
    "future window": ([500, 20], None, (2, 2), 128, (None, 100)),
    "more keys": ([100, 1, 300], [500, 129, 300], (2, 1), 128, (None, 0)),
    "more queries": ([500, 129], [100, 129], (2, 1), 128, (None, 0)),
    "more queries, window": ([500, 129, 40], [100, 0, 333], (2, 2), 64, (60, 20)),
}


def offsets(lengths) -> Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0).to(torch.int32).cuda()


def draw(queries: int, keys: int, heads: tuple[int, int], d: int, seed: int = 0) -> tuple[Tensor, ...]:
    """q, k, v, dO and dLSE. V is off its mean of zero: sums that lose something show then."""
    generator = torch.Generator("cuda").manual_seed(seed)
    (hq, hk), device = heads, {"device": "cuda", "generator": generator}
    shapes = ((queries, hq, d), (keys, hk, d), (keys, hk, d), (queries, hq, d))
    q, k, v, do = (torch.randn(shape, dtype=torch.bfloat16, **device) for shape in shapes)
    return q, k, v + 0.5, do, torch.randn(hq, queries, **device)


def make(case: str, tail: int = 13, seed: int = 0):
    lq, lk, heads, d, window = CASES[case]
    documents = Documents(offsets(lq), offsets(lk or lq), *window)
    return *draw(sum(lq) + tail, sum(lk or lq) + tail, heads, d, seed), documents


def run(q, k, v, do, dlse, documents, scale=None, recipe=RECIPE):
    """o, lse, dq, dk, dv by the kernels."""
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    o, lse, residual, saved = hopper.forward_saving(q, k, v, documents, recipe, scale)
    grads = hopper.backward(do, dlse, q, k, None, o, lse, residual, documents, recipe, scale, saved=saved)
    return o, lse, *grads


def error(got: Tensor, want: Tensor) -> float:
    """Relative L2."""
    return ((got.double() - want).norm() / want.norm().clamp_min(1e-30)).item()


def same(xs, ys) -> bool:
    return all(torch.equal(x, y) for x, y in zip(xs, ys, strict=True))


def bits(x: Tensor) -> Tensor:
    """For comparisons in which NaN equals NaN of the same bits."""
    return x.contiguous().view({2: torch.int16, 4: torch.int32}[x.element_size()])


def of_document(results, span) -> tuple[Tensor, ...]:
    """The rows of one document in o, lse, dq, dk, dv."""
    o, lse, dq, dk, dv = results
    q0, q1, k0, k1 = span
    return o[q0:q1], lse[:, q0:q1], dq[q0:q1], dk[k0:k1], dv[k0:k1]


def run_alone(q, k, v, do, dlse, documents, span):
    """One document of a pack, alone at offset zero."""
    q0, q1, k0, k1 = span
    alone = Documents(offsets([q1 - q0]), offsets([k1 - k0]), documents.left, documents.right)
    return run(q[q0:q1], k[k0:k1], v[k0:k1], do[q0:q1], None if dlse is None else dlse[:, q0:q1], alone)


@contextmanager
def no_waiting():
    """Any wait of the host for the device that torch knows of is an error here."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
