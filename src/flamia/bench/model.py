"""A whole model's training step, packed against padded: real tokens a second.

The model is the one of the training studies (six layers, width 1,024, bytes); a step is forward, backward, clipping and
AdamW, under autocast, fed by the host as a training loop feeds it. Every contender trains on the same documents. Packed,
they lie end to end; padded, each has the rows of the longest, as in a batch without packing, and the rows that stand for
nothing cost what the others do, in every layer. Only real tokens are counted.

Before anything is timed the gradients of all weights are compared with those of torch's attention on the padded batch:
their relative L2 distance is reported, and whoever is further off than a tenth is not timed.

What this is not: a claim about the best that padding can do. Sorting documents by length, or cutting them to one length,
pads less and changes what is trained on.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flamia.train.config import PRESETS
from flamia.train.data import IGNORED, Batch
from flamia.train.model import Attend, Decoder, Shape

from . import timing
from .peers import imported
from .workloads import log_uniform

LENGTHS = log_uniform(32768, 64, 4096, seed=0)
LIMIT = 0.1
BASE = "torch padded"


def batch_of(lengths: tuple[int, ...], rows: int | None, seed: int = 0) -> Batch:
    """Random bytes in documents of these lengths, end to end, or each padded to `rows`."""
    generator = torch.Generator().manual_seed(seed)
    tokens, targets, positions = [], [], []
    for n in lengths:
        text = torch.randint(256, (n,), generator=generator)
        pad = (0, (rows or n) - n)
        tokens.append(F.pad(text, pad))
        targets.append(F.pad(text[1:], (0, 1 + pad[1]), value=IGNORED))
        positions.append(torch.arange(rows or n))
    sizes = tuple(len(x) for x in tokens)
    cu = torch.tensor([0, *sizes]).cumsum(0).to(torch.int32)
    return Batch(torch.cat(tokens), torch.cat(targets), torch.cat(positions), cu, sizes)


def torch_batched(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor) -> Tensor:
    """torch's own attention over documents of one length."""
    documents = cu_seqlens.numel() - 1
    q, k, v = (x.unflatten(0, (documents, -1)).transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(0, 1)


def ours(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor) -> Tensor:
    import flamia

    out = flamia.attention_varlen(q, k, v, cu_seqlens, causal=True)
    assert isinstance(out, Tensor)
    return out


def flash_attention_4(longest: int) -> Attend:
    function = imported("flash_attn.cute.interface").flash_attn_varlen_func

    def attend(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor) -> Tensor:
        cu = cu_seqlens
        out = function(
            q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=longest, max_seqlen_k=longest, causal=True
        )
        return out[0] if isinstance(out, (tuple, list)) else out

    return attend


@dataclass(frozen=True)
class Variant:
    name: str
    padded: bool
    attend: Callable[[int], Attend]
    """Given the longest document."""


VARIANTS = (
    Variant(BASE, True, lambda longest: torch_batched),
    Variant("flamia packed", False, lambda longest: ours),
    Variant("flamia padded", True, lambda longest: ours),
    Variant("flash-attn-4 packed", False, flash_attention_4),
    Variant("flash-attn-4 padded", True, flash_attention_4),
)


def measure(
    rounds: int, seconds: float, device: str = "cuda", shape: Shape | None = None, lengths: tuple[int, ...] = LENGTHS
) -> dict[str, Any]:
    shape = shape or PRESETS["study"].shape
    model = Decoder(shape).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    longest, real = -(-max(lengths) // 128) * 128, sum(lengths)
    batches = {padded: batch_of(lengths, longest if padded else None).to(device) for padded in (False, True)}
    found: dict[str, Any] = {
        "layers": shape.layers, "width": shape.width, "heads": shape.heads, "head_dim": shape.head_dim,
        "parameters": model.size, "tokens": real, "documents": len(lengths), "longest": max(lengths),
        "padded_rows": longest * len(lengths), "variants": {}, "refused": {},
    }  # fmt: skip

    def gradients(attend: Attend, batch: Batch) -> None:
        with torch.autocast(torch.device(device).type, dtype=torch.bfloat16):
            loss = model.loss(batch, attend)
        loss.backward()

    def step(attend: Attend, batch: Batch) -> None:
        gradients(attend, batch)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    timed: dict[str, timing.Timed] = {}
    truth: Tensor | None = None
    for variant in VARIANTS:
        try:
            attend, batch = variant.attend(longest if variant.padded else max(lengths)), batches[variant.padded]
            gradients(attend, batch)
            got = torch.cat([x.grad.flatten() for x in model.parameters() if x.grad is not None])
            optimizer.zero_grad()
            truth = got if truth is None else truth
            off = float((got - truth).norm() / truth.norm())
            entry: dict[str, Any] = {"padded": variant.padded, "gradient_error": off}
            if not off < LIMIT:
                found["refused"][variant.name] = f"gradients are {off:.3f} from those of {BASE}"
                continue
            entry["peak_bytes"] = timing.peak(lambda a=attend, b=batch: gradients(a, b))  # type: ignore[misc]
            optimizer.zero_grad()
        except Exception as error:
            optimizer.zero_grad()
            found["refused"][variant.name] = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
            continue
        found["variants"][variant.name] = entry
        timed[variant.name] = timing.Timed(lambda a=attend, b=batch: step(a, b), "calls")  # type: ignore[misc]
    found["rounds"] = timing.interleave(list(timed.values()), rounds, seconds, least_ms=1.0)
    for name, call in timed.items():
        found["variants"][name] |= {"ms": call.median, "tokens_per_s": 1e3 * real / call.median, "samples": call.ms}
    own = timed.get("flamia packed")
    if own:
        for name, call in timed.items():
            ratios = [a / b for a, b in zip(call.ms, own.ms)]
            found["variants"][name]["ratio"] = [min(ratios), statistics.median(ratios), max(ratios)]
    return found


def lines(found: dict[str, Any]) -> str:
    out = [
        f"model of {found['parameters']:,} parameters, {found['tokens']:,} tokens in {found['documents']} documents, padded "
        f"to {found['padded_rows']:,} rows; {found['rounds']} rounds"
    ]
    for name, v in found["variants"].items():
        out.append(
            f"  {name}: {v['ms']:.1f} ms, {v['tokens_per_s']:,.0f} tokens/s, {v['peak_bytes'] / 1e9:.1f} GB; gradients "
            f"{v['gradient_error']:.3f} from {BASE}'s"
        )
    return "\n".join([*out, *(f"  {name}: {why}" for name, why in found["refused"].items())])
