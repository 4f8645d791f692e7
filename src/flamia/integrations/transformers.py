"""Attention for Hugging Face transformers: one call registers the attention *and* its mask under one name.

    flamia.integrations.transformers.register()
    model = AutoModelForCausalLM.from_config(config, attn_implementation="flamia")

Both are needed. A name without a mask function gets no mask at all, and an attention that relied on one then sees the
future without a warning.

transformers describes a mask as a function of two indices, a padding mask, and position ids that restart where a packed
document begins. This attention knows documents and windows, so here the one is turned into the other:

* The mask function asks transformers' function at the edges only, four pairs for a query: its own key, the next one, and
  the first that it should see and the one before. That tells a causal mask, with or without a window, from everything
  else (bidirectional blocks of an image, encoders), and finds the starts of documents, packed or chunked, on the way. What
  it cannot honour raises there.
* What it returns is one int16 for each key, `(batch, 1, 1, keys)`, of which STARTS, IS_QUERY and PADDING are bits; with a
  window the second axis has two entries, so that the kind of a mask is known from its shape, without reading a value.
  transformers passes 4-d masks on as they are, also those prepared ahead for a static cache.
* The attention adds the restarts of `position_ids`, which transformers itself overlooks once there is a cache or a padding
  mask, and has the offsets of all documents. Padding becomes documents of its own, that nobody sees. `cu_seq_lens_q` and
  `cu_seq_lens_k`, where the caller gives them, are the documents, as in transformers' flash-attention.

How many documents a call holds is data. Read from there it costs one wait for the device in a forward, and cannot be
recorded in a CUDA graph; `register(max_documents=...)` bounds it, and then nothing is read.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from flamia import ops, validation
from flamia.api import attention_varlen
from flamia.recipe import Recipe
from flamia.validation import UnsupportedError

STARTS, IS_QUERY, PADDING = 1, 2, 4  # bits of a key: a document starts here; its query is in this call; nobody's
MASK_DTYPE = torch.int16  # masks of any other dtype are somebody else's
OLDEST = (5, 0)
WAY_OUT = "use attn_implementation='sdpa' for this model"

# What changes the result and is not done here: taken only where it is switched off.
_REFUSED = ("softcap", "s_aux", "position_bias", "head_mask", "block_table", "k_cache", "v_cache", "output_attentions")


def register(
    recipe: Recipe | str | None = None,
    name: str = "flamia",
    *,
    backend: str = "auto",
    max_documents: int | None = None,
) -> str:
    """Register flamia's attention and its mask with transformers under `name`; returns the name.

    Args:
        recipe: a `Recipe`, its string, or None for the default, "mxfp8_scores/strict".
        name: what to give as `attn_implementation`. Several recipes may be registered under several names.
        backend: "auto", "reference" or "hopper", as in `flamia.attention_varlen`.
        max_documents: at most so many documents in one call, all rows of the batch together, paddings included: a row
            that is padded on one side holds two. With it offsets have a fixed size and are never read, which CUDA graphs
            need. None: any number; the device is waited for once in a forward.
    """
    attention_interface, mask_interface = _interfaces()
    if not isinstance(name, str) or not name or any(part in name for part in ("/", "|", ":", "flash")):
        raise ValueError(
            f"name={name!r}: a plain word such as 'flamia' (transformers gives '/', '|', ':' and 'flash' meanings)"
        )
    known = attention_interface._global_mapping.get(name)
    if name in ("eager", "sdpa", "flex_attention") or (known is not None and not isinstance(known, _Attention)):
        raise ValueError(f"name={name!r} is taken by another attention; choose another name")
    if max_documents is not None and (type(max_documents) is not int or max_documents < 1):
        raise ValueError(f"max_documents must be None or an int of at least 1, got {max_documents!r}")
    ops.check_backend(backend)
    attention_interface.register(name, _Attention(validation.recipe_text(recipe), backend, max_documents))
    mask_interface.register(name, functools.partial(mask, wait=max_documents is None))
    return name


def _interfaces() -> tuple[Any, Any]:
    try:
        import transformers
        from transformers import AttentionInterface, AttentionMaskInterface
    except ImportError as error:
        raise ImportError("transformers is missing or too old: pip install 'transformers>=5.0'") from error
    version = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    if version < OLDEST:
        raise ImportError(f"transformers {transformers.__version__} is too old: pip install 'transformers>=5.0'")
    return AttentionInterface, AttentionMaskInterface


# -------------------------------------------------------------------------------------------------------------- mask


def mask(
    batch_size: int,
    kv_length: int,
    mask_function: Callable[..., Tensor],
    q_length: int | None = None,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    attention_mask: Tensor | None = None,
    *,
    cache_position: Tensor | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    config: Any = None,
    device: torch.device | str | None = None,
    wait: bool = True,
    **others: object,
) -> Tensor:
    """What transformers calls to build a mask; with a window a query sees `local_size` keys, its own included.

    `wait`: look at once whether the mask can be honoured, though the host then waits for the device.
    """
    if cache_position is not None:  # transformers 5.0: positions instead of their number and the first
        q_length, q_offset, device = cache_position.shape[0], cache_position[0], cache_position.device
    assert q_length is not None
    if use_vmap:
        raise UnsupportedError(
            f"this model adds its own mask function to the causal mask (or_mask_function, and_mask_function), which "
            f"cannot be told to be documents and windows; {WAY_OUT}"
        )
    # a local mask is a window or chunks; chunks are documents, as long as all their tokens are in this call
    window = local_size if local_size == getattr(config, "sliding_window", None) else None
    key = torch.arange(kv_length, device=device)[None]
    first = q_offset - kv_offset  # the key beside the first query
    is_query = ((key >= first) & (key < first + q_length)).expand(batch_size, -1)
    query = torch.arange(q_length, device=device)[None] + q_offset
    starts, honoured = _probe(mask_function, batch_size, query, kv_offset, kv_length, window)
    bits = is_query * IS_QUERY + _spread(starts, is_query) * STARTS
    bits = torch.where(key == 0, bits | STARTS, bits)
    bits = torch.where(key == first + q_length, bits | STARTS, bits)  # a static cache goes on behind the last query
    _must(honoured, f"this mask is not causal attention with documents and a window; {WAY_OUT}", wait)
    if attention_mask is not None:
        padding = ~_aligned(attention_mask.bool(), kv_length, kv_offset)
        change = padding.diff(dim=-1, prepend=padding[:, :1])
        bits = bits | padding * PADDING | change * STARTS
        runs = (change & ~padding).sum(-1) + ~padding[:, 0]
        _must(
            (runs <= 1).all(),
            "attention_mask has a gap: tokens on both sides of padding in one row. Padding on the left or on the right "
            "is honoured; move the tokens of a row together, or pack documents and give position_ids that restart at 0",
            wait,
        )
    bits = bits.to(MASK_DTYPE)[:, None, None]
    return bits if window is None else bits.expand(-1, 2, -1, -1)


def _probe(
    mask_function: Callable[..., Tensor], batch: int, query: Tensor, kv_offset: int, keys: int, window: int | None
) -> tuple[Tensor, Tensor]:
    """(starts, honoured): where a query does not see the token before it, and whether all edges are where they belong."""
    row = torch.arange(batch, device=query.device)[:, None]
    head = torch.zeros_like(row)

    def sees(key: Tensor, exists: Tensor | None = None) -> Tensor:
        """Whether each query sees that key; False where it does not exist, and transformers must not be asked."""
        if exists is None:
            return mask_function(row, head, query, key).expand(batch, -1)
        return sees(torch.where(exists, key, query)) & exists

    has_before = (query > query[:, :1]).expand(batch, -1)
    has_after = (query + 1 < kv_offset + keys).expand(batch, -1)
    starts = has_before & ~sees(query - 1, has_before)
    # a document begins at the last start up to the query; one that began before this call, with the keys there are
    begin = torch.where(starts, query, kv_offset).cummax(-1).values
    if window is not None:
        begin = torch.maximum(begin, query - (window - 1))
    inner = sees(query) & sees(begin)
    outer = sees(query + 1, has_after) | sees(begin - 1, begin > kv_offset)
    return starts, (inner & ~outer).all()


def _spread(of_queries: Tensor, is_query: Tensor) -> Tensor:
    """(batch, queries) -> (batch, keys): each query's value at its own key, False at the others."""
    index = (is_query.cumsum(-1) - 1).clamp_min(0)
    return of_queries.gather(1, index) & is_query


def _aligned(given: Tensor, keys: int, offset: int) -> Tensor:
    """The padding mask of the keys at hand: those from `offset` on; what it does not reach is padding."""
    missing = keys + offset - given.shape[-1]
    if missing > 0:
        given = nn.functional.pad(given, (0, missing))
    return given[:, offset : offset + keys]


def _must(condition: Tensor, message: str, wait: bool) -> None:
    """Raise unless the condition holds. Where the host may not look, the device does, and a failure ends the process."""
    if torch.compiler.is_compiling() or (condition.is_cuda and (not wait or torch.cuda.is_current_stream_capturing())):
        torch._assert_async(condition, message)
    elif not condition:
        raise UnsupportedError(message)


# --------------------------------------------------------------------------------------------------------- documents


class _Latest(threading.local):
    """The offsets of the last mask and positions: all layers of a forward share them."""

    def __init__(self) -> None:
        self.given: list[tuple[weakref.ref, int]] = []
        self.options: tuple = ()
        self.offsets: tuple[Tensor, Tensor] | None = None

    def get(self, given: list[Tensor], options: tuple, make: Callable[[], tuple[Tensor, Tensor]]) -> Any:
        versions = [x._version for x in given]
        same = len(given) == len(self.given) and options == self.options
        if not same or any(ref() is not x or n != v for x, v, (ref, n) in zip(given, versions, self.given)):
            self.offsets = make()
            self.given, self.options = [(weakref.ref(x), v) for x, v in zip(given, versions)], options
        return self.offsets


_latest = _Latest()


def documents(bits: Tensor, positions: Tensor | None, queries: int, most: int | None) -> tuple[Tensor, Tensor]:
    """(cu_q, cu_k) from a mask of ours and the position ids, if there are any."""
    make = functools.partial(_documents, bits, positions, queries, most)
    if torch.compiler.is_compiling() or (bits.is_cuda and torch.cuda.is_current_stream_capturing()):
        return make()
    given = [x for x in (bits, positions) if x is not None]
    if any(x.is_inference() for x in given):  # these do not count their changes, so none can be told from the last
        return make()
    return _latest.get(given, (queries, most), make)


def _documents(bits: Tensor, positions: Tensor | None, queries: int, most: int | None) -> tuple[Tensor, Tensor]:
    bits = bits[:, 0, 0]
    batch, keys = bits.shape
    is_query, start = (bits & IS_QUERY) != 0, (bits & STARTS) != 0
    if positions is not None:
        positions = positions.expand(batch, queries)
        restart = positions.diff(dim=-1, prepend=positions[:, :1] - 1) != 1
        start = start | (_spread(restart, is_query) & ((bits & PADDING) == 0))
    cu_k = offsets_of(start.flatten(), most)
    if queries == keys:
        return cu_k, cu_k
    if positions is not None:
        cached = (is_query.cumsum(-1) == 0) & ((bits & PADDING) == 0)
        _must(
            (positions[:, 0] >= cached.sum(-1)).all(),
            "position_ids go on with fewer tokens than the cache holds: after a prefill of packed documents the keys of all "
            "of them are in there. Decode with one document in a row, padded on the left",
            wait=most is None,
        )
    before = nn.functional.pad(is_query.flatten().cumsum(0), (1, 0))  # queries up to, not including, a key
    return before[cu_k.long()].to(torch.int32), cu_k


def offsets_of(start: Tensor, most: int | None) -> Tensor:
    """cu_seqlens from flags (tokens,). With `most` the size is most + 1, further documents are empty, nothing is read."""
    tokens = start.shape[0]
    if most is None:
        return nn.functional.pad(start.nonzero()[:, 0], (0, 1), value=tokens).to(torch.int32)
    index = start.cumsum(0) - 1
    message = f"more documents in one call than register(max_documents={most}) allows; give a larger one"
    _must(index[-1] < most, message, wait=False)
    token = torch.arange(tokens, device=start.device)
    fits = start & (index < most)
    offsets = torch.full((most + 1,), tokens, device=start.device)
    return offsets.scatter(0, torch.where(fits, index, most), torch.where(fits, token, tokens)).to(torch.int32)


# --------------------------------------------------------------------------------------------------------- attention


class _Attention:
    """What transformers calls in every layer: (batch, heads, tokens, dim) in, (batch, tokens, heads, dim) out."""

    def __init__(self, recipe: str, backend: str, max_documents: int | None) -> None:
        self.recipe, self.backend, self.max_documents = recipe, backend, max_documents

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        sliding_window: int | None = None,
        is_causal: bool | None = None,
        position_ids: Tensor | None = None,
        cu_seq_lens_q: Tensor | None = None,
        cu_seq_lens_k: Tensor | None = None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        _check_call(dropout, position_ids, query, others)
        query, key, value = _sixteen_bits(query, key, value)
        (batch, _, queries, _), keys = query.shape, key.shape[2]
        window = _window(module, attention_mask, sliding_window)
        causal = attention_mask is not None or _causal(module, is_causal)
        if (cu_seq_lens_q is None) != (cu_seq_lens_k is None):
            raise ValueError("cu_seq_lens_q and cu_seq_lens_k come together: give both, or neither")
        if cu_seq_lens_q is not None and cu_seq_lens_k is not None:
            cu_q = cu_seq_lens_q.to(torch.int32)
            # one tensor stays one: it says that queries and keys are the same tokens
            cu_k = cu_q if cu_seq_lens_k is cu_seq_lens_q else cu_seq_lens_k.to(torch.int32)
        elif not causal:
            step = torch.arange(batch + 1, dtype=torch.int32, device=query.device)
            cu_q = step * queries
            cu_k = cu_q if keys == queries else step * keys
        else:
            if attention_mask is None:
                attention_mask = _plain(batch, queries, keys, query.device)
            cu_q, cu_k = documents(attention_mask, position_ids, queries, self.max_documents)
        if window is not None and not causal:
            raise UnsupportedError(f"a window of {window} around tokens that see both sides; {WAY_OUT}")
        q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
        o = attention_varlen(
            q,
            k,
            v,
            cu_q,
            cu_seqlens_k=cu_k,
            causal=causal,
            window=None if window is None else (window - 1, 0),
            softmax_scale=scaling,
            recipe=self.recipe,
            backend=self.backend,
        )
        assert isinstance(o, Tensor)
        return o.unflatten(0, (batch, queries)), None


def _plain(batch: int, queries: int, keys: int, device: torch.device) -> Tensor:
    """The mask of a causal layer that was given none: whole rows."""
    if queries != keys:
        raise UnsupportedError(
            f"{queries} queries and {keys} keys without a mask: which keys are filled is unknown, since the model built "
            f"no mask; {WAY_OUT}"
        )
    bits = torch.full((batch, 1, 1, keys), IS_QUERY, dtype=MASK_DTYPE, device=device)
    return torch.where(torch.arange(keys, device=device) == 0, bits | STARTS, bits)


def _check_call(dropout: float, position_ids: Tensor | None, query: Tensor, others: dict[str, Any]) -> None:
    if dropout:
        raise UnsupportedError(
            f"dropout={dropout}: there is none here; set config.attention_dropout = 0.0 to train with flamia "
            "(GPT-2: attn_pdrop)"
        )
    for name in _REFUSED:
        value = others.get(name)
        if value is not None and value is not False:
            raise UnsupportedError(f"{name} is not supported by flamia's attention; {WAY_OUT}")
    batch, _, queries, _ = query.shape
    if position_ids is not None and tuple(position_ids.shape) not in ((batch, queries), (1, queries)):
        raise UnsupportedError(
            f"position_ids of shape {tuple(position_ids.shape)} for {batch} rows of {queries} tokens: documents are read "
            f"from (batch, tokens) only; {WAY_OUT}"
        )


def _sixteen_bits(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As they are; inside autocast, where rotary embeddings leave float32 behind, in the region's dtype."""
    if torch.float32 not in (query.dtype, key.dtype, value.dtype):
        return query, key, value
    device = query.device.type
    if not torch.is_autocast_enabled(device):
        raise ValueError(
            "the model runs in float32 and this attention in 16 bits: load the model with dtype=torch.bfloat16, or run "
            "it under torch.autocast(device_type, torch.bfloat16)"
        )
    dtype = torch.get_autocast_dtype(device)
    return query.to(dtype), key.to(dtype), value.to(dtype)


def _window(module: nn.Module, attention_mask: Tensor | None, sliding_window: int | None) -> int | None:
    """The layer's window, which its mask must know of too: else one of them is not what the model means."""
    if attention_mask is None:
        return sliding_window
    if attention_mask.dtype != MASK_DTYPE or attention_mask.dim() != 4 or attention_mask.shape[2] != 1:
        raise UnsupportedError(
            f"a mask of shape {tuple(attention_mask.shape)} and {attention_mask.dtype} cannot be honoured: give a padding "
            f"mask (batch, tokens), position_ids that restart at 0 for packed documents, or cu_seq_lens_q and "
            f"cu_seq_lens_k; for any other mask {WAY_OUT}"
        )
    masked = attention_mask.shape[1] == 2
    if masked and sliding_window is None:  # a model that leaves the window to its mask
        sliding_window = getattr(module.config, "sliding_window", None)
    if masked != (sliding_window is not None):
        raise UnsupportedError(
            f"the layer's sliding_window is {sliding_window} but its mask has {'a' if masked else 'no'} window; {WAY_OUT}"
        )
    return sliding_window


def _causal(module: nn.Module, is_causal: bool | None) -> bool:
    return bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
