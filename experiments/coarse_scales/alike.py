"""How often all 32 tokens of a group have one exponent, scales as fine as they can be and coarse, and what decides it.

    python experiments/coarse_scales/alike.py [--activations captured.pt]

Gaussian tokens, each as loud as a power of two with a Gaussian exponent (`spread` is its standard deviation, in binades).
Fine exponents step where the largest element is 448 * 2^n, coarse ones at 28 * 2^(4 n). So how loud the whole tensor is decides
whether a step lies among its tokens: a column for the loudness 1, and the mean and the worst over 32 between 1 and 16.

With `--activations`, the file that `python -m flamia.study.run` writes: the share of each layer's q, k, v and dO, and the median
spread of a group, log2 of the largest of its tokens' largest elements over the smallest.
"""

from __future__ import annotations

import argparse
from itertools import pairwise

import torch
from torch import Tensor

from flamia.codes import encode_tokens

GROUP, TOKENS = 32, 16384


def alike(x: Tensor, cell: str) -> float:
    """The share of groups whose tokens have one exponent. x: (T, H, D), groups of one head."""
    _, scales = encode_tokens(x, cell)
    groups = scales[..., 0].unflatten(0, (-1, GROUP))
    return (groups == groups[:, :1]).all(1).double().mean().item()


def whole_groups(x: Tensor, cu_seqlens: Tensor) -> Tensor:
    """The documents' whole groups of tokens, one after another."""
    offsets = cu_seqlens.tolist()
    return torch.cat([x[a : a + (b - a) // GROUP * GROUP] for a, b in pairwise(offsets)])


def of_a_model(path: str) -> None:
    print("layer | tensor | head size | fine | coarse | median spread")
    found = torch.load(path, map_location="cpu", weights_only=True)
    for layer, held in found["layers"].items():
        for name in ("q", "k", "v", "do"):
            x = whole_groups(held[name].bfloat16(), found["cu_seqlens"])
            largest = x.float().abs().amax(-1).log2().unflatten(0, (-1, GROUP))
            spread = (largest.amax(1) - largest.amin(1)).median().item()
            shares = " | ".join(f"{alike(x, cell):.3f}" for cell in ("e4m3:token", "e4m3:coarse"))
            print(f"{layer} | {name} | {x.shape[-1]} | {shares} | {spread:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--activations")
    path = parser.parse_args().activations
    if path:
        return of_a_model(path)
    generator = torch.Generator().manual_seed(0)
    print("head size | spread | fine: at 1, mean, worst | coarse: at 1, mean, worst")
    for dim in (64, 128):
        for spread in (0.0, 0.25, 0.5, 1.0):
            x = torch.randn(TOKENS, 1, dim, generator=generator)
            x = x * torch.exp2(spread * torch.randn(TOKENS, 1, 1, generator=generator))
            row = []
            for cell in ("e4m3:token", "e4m3:coarse"):
                shares = [alike((x * 2.0 ** (i / 8)).bfloat16(), cell) for i in range(32)]
                row.append(f"{shares[0]:.3f} {sum(shares) / len(shares):.3f} {min(shares):.3f}")
            print(f"{dim} | {spread} | " + " | ".join(row), flush=True)


if __name__ == "__main__":
    main()
