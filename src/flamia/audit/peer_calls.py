"""Adapters: how each peer is called, found at run time.

Most attentions of the flash-attention family differ in nothing but names, so one adapter, ``by_name``, reads the
signature that is installed and fills it: offsets, maxima, mask, window, LSE, determinism. What a signature does not
name is not swept. Here stand those whose interface is another: torch's own attention, flex, torchao and cuDNN graphs
and Transformer Engine modules (``peer_modules``).

An adapter that nobody could run says so in its ``caution``; the signatures of those were read in the public source.
Nothing here makes a peer work that would not: what it refuses, it refuses in its own words.
"""

from __future__ import annotations

import importlib
import inspect
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import AuxRequest

from .peers import Axes, Call, Offsets, Options, Peer

HALVES = (torch.bfloat16, torch.float16)
NEVER = "never run: the adapter was written from the public source, on a machine that could not run it"

OFFSETS = ("cu_seqlens", "cu_seqlens_q", "cu_seq_q")  # of queries, and of keys where no other is named
KEY_OFFSETS = ("cu_seqlens_k", "cu_seqlens_kv", "cu_seq_k")
LONGEST = ("max_seqlen", "max_seqlen_q", "max_q")
KEY_LONGEST = ("max_seqlen_k", "max_seqlen_kv", "max_k")
CAUSAL = {"causal", "is_causal"}
WINDOW = {"window_size", "window"}
LSE = {"return_lse", "return_attn_probs", "return_softmax_lse", "return_aux"}


def allowed(total: int, cu: Tensor | None, reach: tuple[int | None, int | None], device: torch.device) -> Tensor:
    """(total, total) bool: the mask as a tensor."""
    at = torch.arange(total, device=device)
    ahead = at[None, :] - at[:, None]
    out = torch.ones_like(ahead, dtype=torch.bool)
    if reach[0] is not None:
        out &= ahead >= -reach[0]
    if reach[1] is not None:
        out &= ahead <= reach[1]
    if cu is not None:
        document = torch.bucketize(at, cu[1:].to(at.dtype), right=True)
        out &= document[:, None] == document[None, :]
    return out


def parts(cu: Tensor) -> list[tuple[int, int]]:
    """The documents that are not empty."""
    return [(a, b) for a, b in pairwise(cu.tolist()) if b > a]


# --- any function, by the names of its parameters -----------------------------------------------------------------


def names_of(fn: Callable[..., Any]) -> dict[str, Any]:
    """Parameter names with their defaults; nothing for a callable that has no signature."""
    try:
        return {name: p.default for name, p in inspect.signature(fn).parameters.items()}
    except (ValueError, TypeError):
        return {}


def named(fn: Callable[..., Any], names: dict[str, Any], by_torch: bool = False, **extra: Any) -> Call:
    """A call that fills whatever parameters ``fn`` names; what it is asked and does not name is refused. ``by_torch``:
    of determinism it is told by ``torch.use_deterministic_algorithms``, which the sweep has called.
    """
    extra = {key: value for key, value in extra.items() if key in names}

    def call(q: Tensor, k: Tensor, v: Tensor, cu: Offsets, options: Options) -> Any:
        given: dict[str, Any] = dict(extra)
        positional: tuple[Tensor, ...] = ()
        if cu is not None:
            of_queries, of_keys = cu if isinstance(cu, tuple) else (cu, cu)
            if isinstance(cu, tuple):
                one_of(set(KEY_OFFSETS), names, "the offsets of keys")
            for offsets, starts, longest in ((of_queries, OFFSETS, LONGEST), (of_keys, KEY_OFFSETS, KEY_LONGEST)):
                given |= {name: offsets for name in starts if name in names}
                given |= {name: max(b - a for a, b in parts(offsets)) for name in longest if name in names}
            positional = () if any(name in names for name in OFFSETS) else (of_queries,)
        given |= {name: options.causal for name in CAUSAL if name in names}
        if options.grouped and "enable_gqa" in names:
            given["enable_gqa"] = True
        # Where no parameter is called causal, causality is a window that ends at the query.
        if options.windowed or (options.causal and WINDOW & names.keys() and not CAUSAL & names.keys()):
            name = one_of(WINDOW, names, "a window")
            usual = names[name]
            unbounded = usual[0] if isinstance(usual, tuple) and usual[0] in (-1, None) else None
            given[name] = tuple(unbounded if side is None else side for side in options.reach)
        if options.deterministic and not by_torch:
            given[one_of({"deterministic"}, names, "determinism")] = True
        if options.lse:
            name = one_of(LSE, names, "the LSE")
            given[name] = AuxRequest(lse=True) if name == "return_aux" else True
        return fn(q, k, v, *positional, **given)

    return call


def one_of(wanted: set[str], names: dict[str, Any], what: str) -> str:
    found = sorted(wanted & names.keys())
    if not found:
        raise NotImplementedError(f"its signature names no parameter for {what}")
    return found[0]


def axes_of(every: dict[str, dict[str, Any]], causal: tuple[bool, ...], dtype: tuple[torch.dtype, ...]) -> Axes:
    """What signatures, by packing, can be asked: whatever one of them names."""
    names = set().union(*every.values())
    return Axes(
        packing=tuple(every),
        causal=(True, False) if names & (CAUSAL | WINDOW) else causal,
        windowed=(False, True) if names & WINDOW else (False,),
        cross=(False, True) if names & set(KEY_OFFSETS) else (False,),
        lse=(False, True) if names & LSE else (False,),
        deterministic=(False, True) if "deterministic" in names else (False,),
        dtype=dtype,
    )


def by_name(
    module: str,
    packed: str | None,
    batched: str | None,
    dtype: tuple[torch.dtype, ...] = HALVES,
    wrap: Callable[[Call], Call] | None = None,
    by_torch: bool = False,
    **extra: Any,
) -> Callable[[], tuple[Call, Axes]]:
    """A peer of the flash-attention family: its packed and its batched function in ``module``."""

    def build() -> tuple[Call, Axes]:
        found = importlib.import_module(module)
        functions = {p: getattr(found, n) for p, n in (("packed", packed), ("batched", batched)) if n}
        names = {packing: names_of(fn) for packing, fn in functions.items()}
        calls = {packing: named(fn, names[packing], by_torch, **extra) for packing, fn in functions.items()}

        def call(q: Tensor, k: Tensor, v: Tensor, cu: Offsets, options: Options) -> Any:
            return calls[options.packing](q, k, v, cu, options)

        axes = axes_of(names, (True, False), dtype)
        return wrap(call) if wrap else call, replace(axes, deterministic=(False, True)) if by_torch else axes

    return build


def function(name: str, fn: Callable[..., Any], layout: str = "packed", causal: bool = True) -> Peer:
    """Anybody's ``fn(q, k, v, cu_seqlens)`` or ``fn(q, k, v)``: swept as far as its signature names options; ``causal``
    is what it masks if it names no causality.
    """
    names = names_of(fn)

    def build() -> tuple[Call, Axes]:
        return named(fn, names), axes_of({layout: names}, (causal,), (*HALVES, torch.float32))

    return Peer(name, f"a {layout} function", build, distribution=name.partition(":")[0].partition(".")[0])


# --- torch's scaled_dot_product_attention -------------------------------------------------------------------------


def sdpa(backend: SDPBackend | None) -> Callable[[], tuple[Call, Axes]]:
    """Batched by nature. Documents by a loop over them, or all at once under a block mask; windows by a mask."""

    def attend(q: Tensor, k: Tensor, v: Tensor, options: Options, cu: Tensor | None) -> Tensor:
        plain = cu is None and not options.windowed
        mask = None if plain else allowed(q.shape[1], cu, options.reach, q.device)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        with chosen(backend):
            out = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=plain and options.causal, enable_gqa=options.grouped
            )
        return out.transpose(1, 2)

    def call(q: Tensor, k: Tensor, v: Tensor, cu: Tensor | None, options: Options) -> Tensor:
        if cu is None:
            return attend(q, k, v, options, None)
        if options.packing == "mask":
            return attend(q[None], k[None], v[None], options, cu)[0]
        return torch.cat([attend(q[None, a:b], k[None, a:b], v[None, a:b], options, None)[0] for a, b in parts(cu)])

    def build() -> tuple[Call, Axes]:
        return call, Axes(packing=("batched", "loop", "mask"), deterministic=(False, True))

    return build


@contextmanager
def chosen(backend: SDPBackend | None) -> Iterator[None]:
    """One backend alone. Why it was not viable torch says in warnings, so those join the error."""
    if backend is None:
        yield
        return
    with warnings.catch_warnings(record=True) as said, sdpa_kernel(backend):
        warnings.simplefilter("always")
        try:
            yield
        except RuntimeError as error:
            reasons = " ".join(str(w.message).split(" (Triggered")[0] for w in said)
            raise RuntimeError(f"{str(error).splitlines()[0]} {reasons}".strip()) from error


# --- flex attention -----------------------------------------------------------------------------------------------


def flex(compiled: bool) -> Callable[[], tuple[Call, Axes]]:
    """Batched by nature; documents by a document mask, and the window in the same mask."""

    def build() -> tuple[Call, Axes]:
        from torch.nn.attention import flex_attention as room

        run: Any = room.flex_attention
        if (
            compiled
        ):  # past its limit of recompilations dynamo would run eagerly and say nothing: fullgraph makes it say
            run = torch.compile(run, fullgraph=True, dynamic=False)

        def call(q: Tensor, k: Tensor, v: Tensor, cu: Tensor | None, options: Options) -> Any:
            if cu is not None:
                q, k, v = (x[None] for x in (q, k, v))
            total = q.shape[1]
            seen = allowed(total, cu, options.reach, q.device)
            given: dict[str, Any] = {"enable_gqa": options.grouped}
            if options.lse:
                given["return_aux"] = room.AuxRequest(lse=True)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # eager flex says at every call that it is slow
                given["block_mask"] = room.create_block_mask(
                    lambda b, h, i, j: seen[i, j], None, None, total, total, device=q.device
                )
                with torch._dynamo.config.patch(recompile_limit=10_000, accumulated_recompile_limit=10_000):
                    out = run(*(x.transpose(1, 2) for x in (q, k, v)), **given)
            o, aux = out if isinstance(out, tuple) else (out, None)
            o = o.transpose(1, 2)
            if aux is not None:
                return (o, aux.lse) if cu is None else (o[0], aux.lse[0])
            return o if cu is None else o[0]

        return call, Axes(packing=("batched", "mask"), lse=(False, True))

    return build


# --- SageAttention on a CPU ---------------------------------------------------------------------------------------


class _Disguised(torch.Tensor):
    """A CPU tensor that says it is on a GPU, for a library that asks before it calls Triton."""

    is_cuda = property(lambda self: True)  # type: ignore[assignment]


def interpreted(call: Call) -> Call:
    """With TRITON_INTERPRET=1 the same kernels run on the CPU, slowly; the library's own check for CUDA is then told
    what it wants to hear. Without it the check stands, and refuses.
    """

    def wrapped(q: Tensor, k: Tensor, v: Tensor, cu: Offsets, options: Options) -> Any:
        if q.device.type != "cpu" or os.environ.get("TRITON_INTERPRET") != "1":
            return call(q, k, v, cu, options)
        q, k, v = (x.as_subclass(_Disguised) for x in (q, k, v))
        if isinstance(cu, tuple):
            cu = (cu[0].as_subclass(_Disguised), cu[1].as_subclass(_Disguised))
        out = call(q, k, v, cu.as_subclass(_Disguised) if isinstance(cu, Tensor) else cu, options)
        first, *rest = out if isinstance(out, tuple) else (out,)
        first = first.as_subclass(torch.Tensor)
        return (first, *rest) if rest else first

    return wrapped
