"""What exponents that are multiples of 4 cost: `mxfp8_scores` with scales per token as fine as they can be, and coarse.

    python experiments/coarse_scales/run.py [--tokens 1024]

A coarse scale is up to eight times larger than the smallest that fits, which an E4M3 number does not notice until it is
subnormal: an element that is 2^10.8 times smaller than the largest of its token, in place of 2^13.8. Gaussian tokens have
no such elements to speak of. Tokens in which one feature is `factor` times as large have them, once the factor is near
2^10. That feature would hide everything in a norm over all features, so errors over the *other* features are given too;
there the loss must show first.

Each case makes one operand's feature 5 large (of K, together with a feature of Q as much smaller, so that the scores are
what they were; and the other way round), or sets every token's largest element beside 28 units, where a coarse exponent
steps by four from one token to the next.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor

from flamia.accuracy import TENSORS, Inputs, draw, exact
from flamia.packing import Documents
from flamia.recipe import Recipe
from flamia.reference import backward, forward

FINE = Recipe.strict(cells=tuple((name, "e4m3:token") for name in ("s_q", "s_k", "o_v", "e_g", "e_v", "dv_g")))
COARSE = Recipe.strict()
FEATURE = 5
FACTORS = (20, 100, 1000, 10000)


def outlier(x: Tensor, factor: float) -> Tensor:
    x = x.clone()
    x[..., FEATURE] *= factor
    return x


def straddling(x: Tensor) -> Tensor:
    """Every token scaled, its largest element 28 units of 2^-4 (and so 448 of 2^-8, which fit) or 28.125 (which do not)."""
    largest = x.abs().amax(-1, keepdim=True)
    at = x.abs() == largest
    target = torch.where(torch.arange(len(x))[:, None, None] % 2 == 0, 28.0, 28.125) / 16
    scaled = (x.double() * target / largest.double()).bfloat16().clamp(-28 / 16, 28 / 16)
    return torch.where(at, (target * x.sign()).bfloat16(), scaled)


def cases(inputs: Inputs) -> dict[str, Inputs]:
    q, k, v, g = inputs
    found = {"gaussian": inputs, "largest at 28 units": (straddling(q), straddling(k), straddling(v), straddling(g))}
    for f in FACTORS:
        found |= {
            f"K x {f}, Q / {f}": (outlier(q, 1 / f), outlier(k, f), v, g),
            f"Q x {f}, K / {f}": (outlier(q, f), outlier(k, 1 / f), v, g),
            f"V x {f}": (q, k, outlier(v, f), g),
            f"dO x {f}": (q, k, v, outlier(g, f)),
        }
    return found


def solve(recipe: Recipe, inputs: Inputs) -> list[Tensor]:
    q, k, v, g = inputs
    offsets = torch.tensor([0, len(q)], dtype=torch.int32)
    documents, scale = Documents(offsets, offsets, None, 0), q.shape[-1] ** -0.5
    o, lse, residual = forward(q, k, v, documents, recipe, scale)
    return [o, *backward(g, None, q, k, v, o, lse, residual, documents, recipe, scale)]


def errors(got: list[Tensor], want: Inputs) -> str:
    """Relative L2 error over all features, and over all but FEATURE."""
    rest = [d for d in range(got[0].shape[-1]) if d != FEATURE]
    each = []
    for a, b in zip(got, want, strict=True):
        over = [((x.double() - y).norm() / y.norm()).item() for x, y in ((a, b), (a[..., rest], b[..., rest]))]
        each.append(" ".join(f"{x:.4f}" for x in over))
    return " | ".join(each)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=1024)
    tokens = parser.parse_args().tokens
    inputs = draw("gaussian", tokens=tokens, heads=1, kv_heads=1, head_dim=128)
    print("inputs | scales | " + " | ".join(f"{name}: all, others" for name in TENSORS))
    for name, each in cases(inputs).items():
        want = exact(*each, each[0].shape[-1] ** -0.5)
        for label, recipe in (("fine", FINE), ("coarse", COARSE)):
            print(f"{name} | {label} | {errors(solve(recipe, each), want)}", flush=True)


if __name__ == "__main__":
    main()
