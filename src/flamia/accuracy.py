"""How far a recipe is from exact attention, and in which way.

A cosine near one hides what training notices: small entries of U (the gradient of the logits) that are all rounded to
zero cost a norm nothing and a model something, and a row of U whose sum is not zero pushes every key of that row in one
direction. So beside the errors of O, dQ, dK and dV against float64 attention, ``measure`` reports the signed residual of
U's rows, which is exactly zero in real arithmetic, and the shares of P and U that were rounded to zero or clipped.

Four kinds of input, after what breaks low-bit attention in practice:

gaussian          everything standard normal
peaked            queries three times as long: few keys per row carry the weight
sink              token 0's key is long and every query leans towards it, so that much weight rests on one key
outlier_channels  a few features of K are ten times as large, as in trained models
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from flamia.console import require
from flamia.packing import Documents
from flamia.recipe import Recipe

TENSORS = ("o", "dq", "dk", "dv")
SHARES = ("u_zeroed", "u_saturated", "p_zeroed", "p_saturated")
QUANTILES = (0.01, 0.5, 0.99)
RECIPES = ("bf16", "mxfp8/strict", "mxfp8/fold", "mxfp8/fast", "mxfp8_scores", "nvfp4_fp8/strict", "nvfp4_fp8/fast")

Inputs = tuple[Tensor, Tensor, Tensor, Tensor]
Draw = Callable[..., Tensor]


def gaussian(normal: Draw, tokens: int, heads: int, keys: int, dim: int) -> Inputs:
    return normal(tokens, heads, dim), normal(tokens, keys, dim), normal(tokens, keys, dim), normal(tokens, heads, dim)


def peaked(normal: Draw, tokens: int, heads: int, keys: int, dim: int) -> Inputs:
    q, k, v, do = gaussian(normal, tokens, heads, keys, dim)
    return 3 * q, k, v, do


def sink(normal: Draw, tokens: int, heads: int, keys: int, dim: int, *, lean: float = 0.2) -> Inputs:
    q, k, v, do = gaussian(normal, tokens, heads, keys, dim)
    direction = torch.sign(normal(keys, dim))
    k[0] = 4 * direction
    return q + lean * direction.repeat_interleave(heads // keys, 0), k, v, do


def outlier_channels(normal: Draw, tokens: int, heads: int, keys: int, dim: int, *, factor: float = 10.0) -> Inputs:
    q, k, v, do = gaussian(normal, tokens, heads, keys, dim)
    k[..., :: max(1, dim // 4)] *= factor
    return q, k, v, do


INPUTS: dict[str, Callable[..., Inputs]] = {
    "gaussian": gaussian,
    "peaked": peaked,
    "sink": sink,
    "outlier_channels": outlier_channels,
}


def draw(
    kind: str, *, tokens: int = 1024, heads: int = 2, kv_heads: int = 1, head_dim: int = 128, seed: int = 0
) -> Inputs:
    """q, do (tokens, heads, head_dim) and k, v (tokens, kv_heads, head_dim), bfloat16, of one of the ``INPUTS``."""
    if kind not in INPUTS:
        raise ValueError(f"inputs = {kind!r} are unknown; allowed: {', '.join(map(repr, INPUTS))}")
    if heads % kv_heads:
        raise ValueError(f"heads = {heads} is not a multiple of kv_heads = {kv_heads}")
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    q, k, v, do = INPUTS[kind](normal, tokens, heads, kv_heads, head_dim)
    return q.bfloat16(), k.bfloat16(), v.bfloat16(), do.bfloat16()


def exact(q: Tensor, k: Tensor, v: Tensor, do: Tensor, scale: float) -> Inputs:
    """o, dq, dk, dv of causal attention over one document in float64, written out and blocked by nothing."""
    tokens, heads, _ = q.shape
    group = heads // k.shape[1]
    qh, gh = (x.double().transpose(0, 1) for x in (q, do))
    kh, vh = (x.double().repeat_interleave(group, 1).transpose(0, 1) for x in (k, v))
    hidden = torch.ones(tokens, tokens, dtype=torch.bool, device=q.device).triu(1)
    p = (qh @ kh.mT * scale).masked_fill(hidden, -math.inf).softmax(-1)
    o = p @ vh
    u = p * (gh @ vh.mT - (gh * o).sum(-1, keepdim=True))
    dq = scale * u @ kh
    dk, dv = ((x.mT @ y).unflatten(0, (-1, group)).sum(1) for x, y in ((scale * u, qh), (p, gh)))
    return o.transpose(0, 1), dq.transpose(0, 1), dk.transpose(0, 1), dv.transpose(0, 1)


@dataclass(frozen=True)
class Accuracy:
    """One recipe on one kind of input.

    error, cosine: of o, dq, dk, dv against float64; error is the relative L2 norm of the difference.
    residual: quantiles of sum_j U_ij / sum_j |U_ij| over rows, signed, of U as computed; residual_rounded: after U was
    rounded for its products. zeroed and saturated: shares of visible entries of U and P.
    """

    recipe: str
    inputs: str
    error: dict[str, float]
    cosine: dict[str, float]
    residual: dict[str, float]
    residual_rounded: dict[str, float]
    shares: dict[str, float]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def measure(
    recipe: Recipe | str, kind: str, *, seed: int = 0, truth: tuple[Inputs, Inputs] | None = None, **sizes: int
) -> Accuracy:
    """Run the reference with ``recipe`` on inputs of ``kind``. ``truth`` is (inputs, exact results) where known."""
    from flamia import reference

    recipe = Recipe.parse(recipe) if isinstance(recipe, str) else recipe
    (q, k, v, do), expected = truth or solved(kind, seed=seed, **sizes)
    scale = q.shape[-1] ** -0.5
    offsets = torch.tensor([0, q.shape[0]], dtype=torch.int32)
    documents = Documents(offsets, offsets, None, 0)
    counters: dict[str, Any] = {}
    o, lse, residual = reference.forward(q, k, v, documents, recipe, scale)
    gradients = reference.backward(do, None, q, k, v, o, lse, residual, documents, recipe, scale, diagnostics=counters)
    pairs = {name: (got.double(), want) for name, got, want in zip(TENSORS, (o, *gradients), expected, strict=True)}
    return Accuracy(
        recipe=str(recipe),
        inputs=kind,
        error={name: ((got - want).norm() / want.norm()).item() for name, (got, want) in pairs.items()},
        cosine={
            name: (got.flatten() @ want.flatten() / (got.norm() * want.norm())).item()
            for name, (got, want) in pairs.items()
        },
        residual=quantiles(counters["row_residual"]),
        residual_rounded=quantiles(counters["row_residual_rounded"]),
        shares={name: float(counters[name]) for name in SHARES},
    )


def solved(kind: str, **options: int) -> tuple[Inputs, Inputs]:
    """Inputs of ``kind`` and their exact results."""
    inputs = draw(kind, **options)
    return inputs, exact(*inputs, inputs[0].shape[-1] ** -0.5)


def quantiles(values: Tensor) -> dict[str, float]:
    values = values.flatten().double()
    levels = torch.tensor(QUANTILES, dtype=torch.float64)
    found = torch.quantile(values, levels).tolist()
    return {"mean": values.mean().item()} | {
        f"q{level:g}": value for level, value in zip(QUANTILES, found, strict=True)
    }


def measure_all(
    recipes: Sequence[Recipe | str] = RECIPES, kinds: Sequence[str] = tuple(INPUTS), **options: int
) -> Iterator[Accuracy]:
    """Every recipe on every kind of input; exact attention is computed once for each kind."""
    for kind in kinds:
        truth = solved(kind, **options)
        for recipe in recipes:
            yield measure(recipe, kind, truth=truth)


def table(results: Sequence[Accuracy]) -> Any:
    """A rich table: errors, the residual of rows, shares of U and P lost."""
    rich = require("rich.table")
    grid = rich.Table(title="relative L2 error against float64; row residual of rounded U; shares in percent", box=None)
    for name, side in COLUMNS:
        grid.add_column(name, justify=side)
    for kind in dict.fromkeys(result.inputs for result in results):
        for result in results:
            if result.inputs == kind:
                grid.add_row(*cells(result))
        grid.add_section()
    return grid


COLUMNS = (
    ("inputs", "left"), ("recipe", "left"), ("O", "right"), ("dQ", "right"), ("dK", "right"), ("dV", "right"),
    ("cosine O", "right"), ("cosine dQ", "right"), ("residual 1%", "right"), ("median", "right"), ("99%", "right"),
    ("U zero", "right"), ("U clip", "right"), ("P zero", "right"), ("P clip", "right"),
)  # fmt: skip


def cells(result: Accuracy) -> list[str]:
    """One row of the table, as text in the order of ``COLUMNS``."""
    return [
        result.inputs,
        result.recipe,
        *(f"{result.error[name]:.4f}" for name in TENSORS),
        *(f"{result.cosine[name]:.5f}" for name in ("o", "dq")),
        *(f"{result.residual_rounded[f'q{level:g}']:+.1e}" for level in QUANTILES),
        *(f"{100 * result.shares[name]:.2f}" for name in SHARES),
    ]
