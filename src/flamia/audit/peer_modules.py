"""The peers that are more than a function, our own recipes among them, and the list of all.

torchao patches ``F.scaled_dot_product_attention`` while a module runs; Transformer Engine is a module under an autocast
that names a recipe; the cuDNN frontend is a graph that is built for one shape (``peer_cudnn``). Each gets the fewest
lines that reach it. The first two could not be run where they were written, and their ``caution`` says so: until
somebody does, a verdict about them is also a verdict about these lines.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

from .peer_calls import HALVES, NEVER, by_name, flex, function, interpreted, parts, sdpa
from .peer_cudnn import cudnn_fp8
from .peer_report import PeerAudit, audit_peers
from .peers import Axes, Call, Offsets, Options, Peer, choose


def torchao() -> tuple[Call, Axes]:
    """FP8 through ``apply_low_precision_attention`` around a module that does nothing but attend."""
    api = importlib.import_module("torchao.prototype.attention.api")

    class Attend(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, grouped: bool) -> Tensor:
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)

    @functools.lru_cache(maxsize=1)
    def module() -> torch.nn.Module:
        applied: torch.nn.Module = api.apply_low_precision_attention(Attend())
        return applied

    def call(q: Tensor, k: Tensor, v: Tensor, cu: Tensor | None, options: Options) -> Any:
        def one(*operands: Tensor) -> Tensor:
            heads_first = (x.transpose(1, 2) for x in operands)
            out: Tensor = module()(*heads_first, options.causal, options.grouped)
            return out.transpose(1, 2)

        if cu is None:
            return one(q, k, v)
        return torch.cat([one(*(x[None, a:b] for x in (q, k, v)))[0] for a, b in parts(cu)])

    return call, Axes(packing=("batched", "loop"), windowed=(False,), dtype=HALVES)


def transformer_engine(recipe: str | None) -> Callable[[], tuple[Call, Axes]]:
    """``DotProductAttention`` under one FP8 recipe with ``fp8_dpa``, or without any in 16 bits."""

    def build() -> tuple[Call, Axes]:
        te = importlib.import_module("transformer_engine.pytorch")
        recipes = importlib.import_module("transformer_engine.common.recipe")
        chosen = getattr(recipes, recipe)(fp8_dpa=True) if recipe else None

        @functools.lru_cache(maxsize=64)
        def module(options: Options, dim: int) -> Any:
            mask = "causal" if options.causal else "no_mask"
            if options.layout == "packed":
                mask = "padding_causal" if options.causal else "padding"
            left, right = options.reach
            return te.DotProductAttention(
                options.heads[0], dim, num_gqa_groups=options.heads[1], attention_dropout=0.0, attn_mask_type=mask,
                qkv_format="thd" if options.layout == "packed" else "bshd",
                window_size=(-1 if left is None else left, -1 if right is None else right),
            )  # fmt: skip

        def autocast() -> Any:
            if hasattr(te, "autocast"):
                return te.autocast(enabled=chosen is not None, recipe=chosen)
            return te.fp8_autocast(enabled=chosen is not None, fp8_recipe=chosen)

        def call(q: Tensor, k: Tensor, v: Tensor, cu: Tensor | None, options: Options) -> Any:
            given: dict[str, Any] = {}
            if cu is not None:
                longest = max(b - a for a, b in parts(cu))
                given = {
                    "cu_seqlens_q": cu, "cu_seqlens_kv": cu, "max_seqlen_q": longest, "max_seqlen_kv": longest,
                }  # fmt: skip
            with autocast():
                out = module(options, q.shape[-1])(q.contiguous(), k.contiguous(), v.contiguous(), **given)
            return out.reshape(*q.shape[:-1], v.shape[-1])

        return call, Axes(dtype=HALVES)

    return build


def own(recipe: str) -> Peer:
    """One of this library's recipes, held to what that recipe promises."""
    from flamia.recipe import Recipe

    parsed = Recipe.parse(recipe)

    def build() -> tuple[Call, Axes]:
        import flamia

        def call(q: Tensor, k: Tensor, v: Tensor, cu: Offsets, options: Options) -> Any:
            given: dict[str, Any] = {
                "causal": options.causal, "window": options.window, "recipe": parsed, "return_lse": options.lse,
            }  # fmt: skip
            if cu is None:
                return flamia.attention(q, k, v, **given)
            of_queries, of_keys = cu if isinstance(cu, tuple) else (cu, None)
            return flamia.attention_varlen(q, k, v, of_queries, cu_seqlens_k=of_keys, **given)

        return call, Axes(cross=(False, True), lse=(False, True))

    def promises(options: Options) -> frozenset[str]:
        return frozenset(parsed.claims) | ({"nonfinite"} if "mask" in parsed.claims else set())

    return Peer(f"flamia:{recipe}", "this library", build, distribution="flamia", promises=promises)


def peers() -> list[Peer]:
    """All that are known. A family is what stands before the colon."""
    backends = {
        "default": None, "math": SDPBackend.MATH, "flash": SDPBackend.FLASH_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION,
        "overrideable": SDPBackend.OVERRIDEABLE,
    }  # fmt: skip
    dense, varlen = "flash_attn_func", "flash_attn_varlen_func"
    return [
        *(Peer(f"sdpa:{name}", f"F.scaled_dot_product_attention, {name}", sdpa(b), square=name == "math")
          for name, b in backends.items()),
        Peer("varlen", "torch.nn.attention.varlen", by_name("torch.nn.attention.varlen", "varlen_attn", None, by_torch=True)),
        Peer("flex:eager", "flex_attention, eager", flex(False), square=True),
        Peer("flex:compiled", "flex_attention, compiled", flex(True), on_request=True, square=True,
             caution="every shape is compiled anew, which takes seconds to half a minute of a CPU"),
        Peer("flash:2", "flash-attn 2", by_name("flash_attn", varlen, dense), "flash-attn", 64, NEVER),
        Peer("flash:3", "flash-attn 3", by_name("flash_attn_interface", varlen, dense), "flash-attn-3", 64, NEVER),
        Peer("flash:4", "flash-attn 4", by_name("flash_attn.cute", varlen, dense), "flash-attn-4", 64),
        Peer("cudnn:fp8", "cuDNN frontend, dense E4M3, constant scales", cudnn_fp8(False), "nvidia-cudnn-frontend", 128),
        Peer("cudnn:fp8-current", "cuDNN frontend, dense E4M3, scales from each tensor's largest entry", cudnn_fp8(True),
             "nvidia-cudnn-frontend", 128),
        *(Peer(f"te:{name}", f"Transformer Engine, {recipe or '16 bits'}", transformer_engine(recipe),
               "transformer-engine", 64, NEVER)
          for name, recipe in (("delayed", "DelayedScaling"), ("current", "Float8CurrentScaling"),
                               ("mxfp8", "MXFP8BlockScaling"), ("16bit", None))),
        Peer("sage", "SageAttention", by_name("sageattention", "sageattn_varlen", "sageattn", wrap=interpreted,
                                              tensor_layout="NHD"), "sageattention", 64,
             "never run on a GPU; with TRITON_INTERPRET=1 its own kernels run on the CPU in Triton's interpreter"),
        Peer("torchao", "torchao apply_low_precision_attention (FP8)", torchao, "torchao", 64, NEVER),
        *(own(f"{route}/strict") for route in ("mxfp8_scores", "mxfp8", "nvfp4_fp8", "nvfp4", "bf16")),
    ]  # fmt: skip


def load(text: str, layout: str = "packed", causal: bool = True, find: Callable[[str], Any] | None = None) -> Peer:
    """``flamia:<recipe>`` or ``module:function``; ``find`` turns the latter into the function."""
    family, _, rest = text.partition(":")
    if family == "flamia" and "/" in rest:
        return own(rest)
    if find is None:
        raise ValueError(f"target = {text!r}: no such target; see flamia audit --list-targets")
    return function(text, find(text), layout, causal)


def sweep(
    targets: list[str], find: Callable[[str], Any], *, layout: str = "packed", causal: bool = True, **options: Any
) -> PeerAudit:
    """Audit targets by name, by family, "all", or as ``module:function``; ``options`` are those of ``audit_peers``."""
    return audit_peers(choose(targets, peers(), lambda text: load(text, layout, causal, find)), **options)
