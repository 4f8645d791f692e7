"""How close, at the sizes that train: packed documents on any device, recipes beside other people's kernels.

    python -m flamia.closeness --device cuda --heads 16 --seconds 60 --out out/closeness
    python -m flamia.closeness --device cuda --activations captured.pt --out out/closeness

`accuracy.py` measures recipes on one short document, on a CPU, and is what the command `flamia accuracy` runs. This is the
same measure (errors and cosines of O, dQ, dK, dV against float64; signed residuals of U's rows; what rounding zeroes or
clips) on 4 documents of 4,096 tokens, and on activations captured from a model in training; on a card the reference
takes about a second for a recipe. Peers, and our own kernels, answer on the same tensors; their U is their own secret, so
they have errors and cosines only.

Three kinds of row:

gaussian             every recipe
outlier_channels:20  scores alone in 8 and 4 bits, with and without rotation: what a Hadamard matrix does where some
                     features of K are 20 times as large
captured:LAYER       every recipe, on what a layer of a trained model really feeds its attention

A file of activations is what `python -m flamia.study.run` leaves, {"layers": {layer: {"q", "k", "v", "do"}}, "cu_seqlens"}, or,
where layers have documents of their own, {layer: {"q", "k", "v", "do", "cu_seqlens"}}: packed tensors of (tokens, heads, D).
As many whole documents from its start are used as `--tokens` allows.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flamia import accuracy
from flamia.accuracy import INPUTS, SHARES, TENSORS, Inputs, quantiles
from flamia.packing import Documents
from flamia.recipe import Recipe

RECIPES = (
    "bf16", "mxfp8_scores/strict", "mxfp8/strict", "mxfp8/fold", "mxfp8/fast", "nvfp4_fp8/strict", "nvfp4_fp8/fold",
    "nvfp4_fp8/fast", "nvfp4/strict", "nvfp4/fold", "nvfp4/fast",
)  # fmt: skip
SCORES = {"MXFP8": "e4m3:feature32", "NVFP4": "nvfp4:feature16", "MXFP4": "e2m1:feature32"}
ROTATIONS = tuple(
    f"bf16/strict{rotate},s_q={cell},s_k={cell}" for cell in SCORES.values() for rotate in ("", ",rotate=True")
)
"""Nothing but the scores has low bits, with one scale for 32 (or 16) features of a token."""
DRAWN = "gaussian,outlier_channels:10,outlier_channels:20,outlier_channels:40"
PEERS = ("flamia", "flamia-frontier", "flash-attn-4", "torch-varlen", "cudnn-fp8")


@dataclass(frozen=True)
class Sample:
    """One set of inputs: q, k, v, dO packed, bfloat16, and the documents' lengths."""

    name: str
    tensors: Inputs
    lengths: tuple[int, ...]

    def offsets(self) -> Tensor:
        cu = torch.tensor([0, *self.lengths]).cumsum(0).to(torch.int32)
        return cu.to(self.tensors[0].device)


def drawn(kind: str, lengths: tuple[int, ...], heads: int, dim: int, device: str, seed: int = 0) -> Sample:
    """Documents of random numbers, the same on every device: drawn on the CPU, each by itself."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    name, _, factor = kind.partition(":")
    more = {"factor": float(factor)} if factor else {}
    each = [INPUTS[name](normal, n, heads, heads, dim, **more) for n in lengths]
    q, k, v, do = (torch.cat(parts).bfloat16().to(device) for parts in zip(*each))
    return Sample(kind, (q, k, v, do), lengths)


def captured(path: Path, tokens: int, device: str) -> Iterator[Sample]:
    """The layers of a file of activations, cut to whole documents of `tokens` altogether (one at least)."""
    layers, needed = torch.load(path, map_location="cpu", weights_only=True), ("q", "k", "v", "do", "cu_seqlens")
    shared: dict[str, Any] = {}
    if "layers" in layers:  # the study's: one packing for all of them
        shared = {name: layers[name] for name in ("cu_seqlens",) if name in layers}
        layers = layers["layers"]
    for layer, held in layers.items():
        held = shared | held if isinstance(held, dict) else {}
        if missing := [name for name in needed if not isinstance(held.get(name), Tensor)]:
            raise ValueError(
                f"{path}: layer {layer!r} lacks {', '.join(missing)}; a layer holds tensors q, k, v and do, and cu_seqlens "
                "stands there or beside 'layers'"
            )
        rows, end = len(held["q"]), int(held["cu_seqlens"][-1])
        if rows < end:
            raise ValueError(f"{path}: layer {layer!r} has {rows} tokens where its cu_seqlens end at {end}")
        lengths: list[int] = []
        for n in held["cu_seqlens"].diff().tolist():
            if lengths and sum(lengths) + n > tokens:
                break
            lengths.append(n)
        q, k, v, do = (held[name][: sum(lengths)].to(device, torch.bfloat16).contiguous() for name in needed[:4])
        yield Sample(f"captured:{layer}", (q, k, v, do), tuple(lengths))


def allowed(kind: str) -> bool:
    name, colon, factor = kind.partition(":")
    return name in INPUTS and (not colon or (name == "outlier_channels" and factor.isdecimal()))


def exact(sample: Sample, scale: float) -> Inputs:
    """o, dq, dk, dv of causal attention in float64, document by document and key head by key head: one square at a time."""
    q, k, v, do = sample.tensors
    group = q.shape[1] // k.shape[1]
    found = tuple(torch.zeros(x.shape, dtype=torch.float64, device=x.device) for x in (q, q, k, v))
    start = 0
    for n in sample.lengths:
        rows = slice(start, start + n)
        for h in range(k.shape[1]):
            own, many = slice(h, h + 1), slice(h * group, (h + 1) * group)
            parts = accuracy.exact(q[rows, many], k[rows, own], v[rows, own], do[rows, many], scale)
            for whole, heads, part in zip(found, (many, many, own, own), parts, strict=True):
                whole[rows, heads] = part
        start += n
    o, dq, dk, dv = found
    return o, dq, dk, dv


def compared(found: Sequence[Tensor], expected: Inputs) -> dict[str, dict[str, float]]:
    """Relative L2 errors and cosines of the four tensors."""
    error, cosine = {}, {}
    for name, got, want in zip(TENSORS, found, expected):
        got = got.reshape(want.shape).double()
        error[name] = float((got - want).norm() / want.norm())
        cosine[name] = float((got * want).sum() / (got.norm() * want.norm()))
    return {"error": error, "cosine": cosine}


def by_reference(recipe: Recipe, sample: Sample, expected: Inputs, scale: float) -> dict[str, Any]:
    from flamia import reference

    q, k, v, do = sample.tensors
    cu = sample.offsets()
    documents = Documents(cu, cu, None, 0)
    seen: dict[str, Any] = {}
    o, lse, rest = reference.forward(q, k, v, documents, recipe, scale)
    gradients = reference.backward(do, None, q, k, v, o, lse, rest, documents, recipe, scale, diagnostics=seen)
    return compared((o, *gradients), expected) | {
        "residual": quantiles(seen["row_residual"].cpu()),
        "residual_rounded": quantiles(seen["row_residual_rounded"].cpu()),
        "shares": {name: float(seen[name]) for name in SHARES},
    }


def by_peer(name: str, sample: Sample, expected: Inputs) -> dict[str, Any]:
    """A contender of the benchmark on these tensors: errors and cosines only."""
    from flamia.bench.peers import CONTENDERS
    from flamia.bench.workloads import Workload

    q, k = sample.tensors[:2]
    workload = Workload(sample.name, sample.lengths, q.shape[1], k.shape[1], q.shape[2])
    contender = CONTENDERS[name](workload, (*sample.tensors, sample.offsets()))
    contender.prepare()
    return compared(contender.read(contender.train()), expected) | {"inside": contender.inside}


def measure(
    samples: Sequence[Sample] | Iterator[Sample], seconds: float, peers: Sequence[str], recipes: Sequence[str] = ()
) -> Iterator[dict[str, Any]]:
    """A row for everybody on every sample, in the order of samples; {"not_run"} for what there was no time for.
    recipes: in place of the usual ones."""
    started = time.monotonic()
    for sample in samples:
        expected: Inputs | None = None
        scale = sample.tensors[0].shape[-1] ** -0.5
        usual = ROTATIONS if sample.name.startswith("outlier_channels") else RECIPES
        asked = [("reference", str(Recipe.parse(text))) for text in recipes or usual]
        asked += [("kernel", name) for name in peers]
        for backend, who in asked:
            begun = time.monotonic()
            row: dict[str, Any] = {"inputs": sample.name, "backend": backend, "who": who}
            row |= {"documents": len(sample.lengths), "tokens": sum(sample.lengths)}
            row |= {"heads": sample.tensors[0].shape[1], "head_dim": sample.tensors[0].shape[2]}
            if begun - started > seconds:
                yield row | {"not_run": "no time"}
                continue
            expected = expected or exact(sample, scale)
            try:
                if backend == "reference":
                    row |= by_reference(Recipe.parse(who), sample, expected, scale)
                else:
                    row |= by_peer(who, sample, expected)
            except Exception as error:  # a peer that is not here, or refuses, says so in its row
                if backend == "reference":
                    raise
                row["refused"] = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
            yield row | {"seconds": round(time.monotonic() - begun, 2)}


def said(row: dict[str, Any]) -> str:
    head = f"{row['inputs']:18s} {row['who']:50s}"
    if "error" not in row:
        return head + row.get("refused", row.get("not_run", ""))
    errors = " ".join(f"{row['error'][name]:.4f}" for name in TENSORS)
    cosines = " ".join(f"{row['cosine'][name]:.5f}" for name in TENSORS)
    return f"{head} error {errors}  cosine {cosines}  {row['seconds']:.1f} s"


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m flamia.closeness", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--device", default="cpu")
    made.add_argument("--documents", type=int, default=4)
    made.add_argument("--length", type=int, default=4096, help="of a document of random numbers")
    made.add_argument("--heads", type=int, default=16)
    made.add_argument("--head-dim", type=int, default=128)
    made.add_argument("--inputs", default=DRAWN, help=f"of {', '.join(INPUTS)}; or empty")
    made.add_argument("--activations", type=Path, help="a file of captured activations as well")
    made.add_argument("--tokens", type=int, default=16384, help="of each layer of that file")
    made.add_argument("--recipes", default="", help="separated by semicolons, in place of the usual ones")
    made.add_argument("--peers", default="", help=f"kernels to ask as well: {','.join(PEERS)}")
    made.add_argument("--seconds", type=float, default=600.0, help="nothing is begun after them")
    made.add_argument("--out", type=Path, default=Path("out/closeness"), help="writes OUT.json")
    made.add_argument("--commit", help="what to call this version, where git is not at hand")
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    from flamia.bench.report import surroundings

    options = parser().parse_args(arguments)
    kinds = [name for name in options.inputs.split(",") if name]
    unknown = [kind for kind in kinds if not allowed(kind)]
    if unknown:
        sys.exit(f"flamia.closeness: inputs {unknown[0]!r} are unknown: take {', '.join(INPUTS)}, outlier_channels:20")
    peers = [name for name in options.peers.split(",") if name]
    strange = [name for name in peers if name not in PEERS]
    if strange:
        sys.exit(f"flamia.closeness: peer {strange[0]!r} is unknown: take {', '.join(PEERS)}")
    if torch.device(options.device).type == "cuda" and not torch.cuda.is_available():
        sys.exit(f"flamia.closeness: --device {options.device}: torch finds no CUDA device here")

    def samples() -> Iterator[Sample]:
        for kind in kinds:
            lengths = (options.length,) * options.documents
            yield drawn(kind, lengths, options.heads, options.head_dim, options.device)
        if options.activations:
            yield from captured(options.activations, options.tokens, options.device)

    found: dict[str, Any] = surroundings(options.device, options.commit) | {"rows": []}
    path = options.out.with_name(options.out.name + ".json")
    path.parent.mkdir(parents=True, exist_ok=True)
    recipes = [text for text in options.recipes.split(";") if text]
    for row in measure(samples(), options.seconds, peers, recipes):
        found["rows"].append(row)
        print(said(row), flush=True)
        path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(path)


if __name__ == "__main__":
    main()
