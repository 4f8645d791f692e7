"""flamia: 8- and 4-bit attention that trains, sees no future, and loses nothing of the sum.

    out = flamia.attention(q, k, v, causal=True)                        # (batch, tokens, heads, dim)
    out = flamia.attention_varlen(q, k, v, cu_seqlens, causal=True)     # (total, heads, dim), packed documents
    cache = flamia.KVCache(...); out = flamia.decode(q, k, v, cache)    # serving, with the bits of training
    report = flamia.audit(fn)                                           # does an attention, anyone's, see the future?
    report = flamia.audit_model(model)                                  # does a whole language model?

`flamia.audit` is both the function and the package it lives in (`from flamia.audit import ...`); it, `audit_model`,
`KVCache` and `decode` are loaded when first named, so that attention alone does not pay for them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from flamia.api import attention, attention_varlen, flash_attn_func, flash_attn_varlen_func
from flamia.ops import BACKENDS, SAVE_OPS
from flamia.recipe import Recipe
from flamia.validation import UnsupportedError

if TYPE_CHECKING:  # as a function, which is how it is used under this name
    from flamia.audit import audit_callable as audit
    from flamia.audit import audit_model
    from flamia.cache import KVCache, decode

__version__ = "0.1.0"

__all__ = [
    "BACKENDS",
    "SAVE_OPS",
    "KVCache",
    "Recipe",
    "UnsupportedError",
    "attention",
    "attention_varlen",
    "audit",
    "audit_model",
    "decode",
    "flash_attn_func",
    "flash_attn_varlen_func",
]


def __getattr__(name: str) -> object:
    if name == "audit":
        return importlib.import_module("flamia.audit")
    if name == "audit_model":
        return importlib.import_module("flamia.audit").audit_model
    if name in ("KVCache", "decode"):
        return getattr(importlib.import_module("flamia.cache"), name)
    raise AttributeError(f"module 'flamia' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
