"""Every check of every argument, written once.

Two kinds of facts are checked in two places, and the difference is when they are known:

* Shapes, dtypes, devices and options are known without looking at memory. The public functions check them before any
  work; `torch.compile` traces these checks and drops them.
* The *values* of `cu_seqlens` are known only where the call runs. On the CPU reading them is free, so they are read in
  full, inside the operator, where a compiled graph passes too and an offset edited in place is seen. On a device
  reading them makes the host wait, so there they are clamped instead: a bad offset may then give a meaningless
  document, but no access leaves a buffer. `check_offsets=True` reads them anyway, at the price of the wait.

Every message names the argument, the value it had, the rule it broke and, where there is one, the line to write
instead. Nothing is repaired silently: attention that quietly ran on other documents than the caller meant still lets
the loss fall, and is found weeks later or never.
"""

from __future__ import annotations

import functools
import itertools
import math
import sys

import torch
from torch import Tensor
from torch.autograd import forward_ad

from flamia.recipe import Recipe

MAX_HEAD_DIM = 256
DTYPES = (torch.bfloat16, torch.float16)
OPEN = -1  # how an open side of a window crosses the operator's schema, which has no "int or None"


class UnsupportedError(ValueError):
    """The call is well formed, but this library or this backend does not do it."""


# ---------------------------------------------------------------------------------------------------------- tensors


def check_inputs(q: Tensor, k: Tensor, v: Tensor, layout: str) -> None:
    """Shapes, dtypes and devices of q, k, v; `layout` is "batched" (B, T, H, D) or "packed" (total, H, D)."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        _check_tensor(name, x, layout)
    for name, x in (("k", k), ("v", v)):
        if x.dtype != q.dtype:
            raise ValueError(
                f"q, k and v must share one dtype: q is {q.dtype} but {name} is {x.dtype}; "
                f"cast the one that is wrong, e.g. {name}.to({q.dtype})"
            )
        if x.device != q.device:
            raise ValueError(
                f"q, k and v must be on one device: q is on {q.device} but {name} is on {x.device}; "
                f"move the one that is wrong, e.g. {name}.to({str(q.device)!r})"
            )
    if k.shape[:-1] != v.shape[:-1]:
        raise ValueError(
            f"k and v must agree in everything but the head dimension: "
            f"k has shape {tuple(k.shape)}, v has shape {tuple(v.shape)}"
        )
    if layout == "batched" and q.shape[0] != k.shape[0]:
        raise ValueError(f"q and k must have the same batch size: q has {q.shape[0]}, k has {k.shape[0]}")
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(
            f"q and k must have the same head dimension: q has {q.shape[-1]}, k has {k.shape[-1]} (v may differ)"
        )
    if q.shape[-2] % k.shape[-2]:
        raise ValueError(
            f"the query heads must be a multiple of the key heads: q has {q.shape[-2]} heads, k has {k.shape[-2]}"
        )


def _check_tensor(name: str, x: Tensor, layout: str) -> None:
    if not isinstance(x, Tensor):
        raise ValueError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
    if x.is_nested or x.layout != torch.strided:
        raise UnsupportedError(
            f"{name} must be an ordinary strided tensor, got a nested or sparse one; "
            f"pass its values and offsets to flamia.attention_varlen"
        )
    if not torch.compiler.is_compiling() and forward_ad.unpack_dual(x).tangent is not None:
        raise UnsupportedError(  # torch would drop the tangent and return zeros
            f"{name} is a dual tensor: forward-mode derivatives (torch.func.jvp) are not supported, use backward()"
        )
    form, rank, other = {
        "batched": ("(batch, tokens, heads, dim)", 4, "packed documents go to flamia.attention_varlen"),
        "packed": ("(total tokens, heads, dim)", 3, "padded batches go to flamia.attention"),
    }[layout]
    if x.dim() != rank:
        raise ValueError(f"{name} must have shape {form}, got {tuple(x.shape)}; {other}")
    if x.dtype not in DTYPES:
        raise ValueError(
            f"{name} must be bfloat16 or float16, got {x.dtype}; cast it where you can see it: "
            f"{name}.to(torch.bfloat16)"
        )
    if x.shape[-2] < 1:
        raise ValueError(f"{name} must have at least one head, got shape {tuple(x.shape)}")
    if not 1 <= x.shape[-1] <= MAX_HEAD_DIM:
        raise UnsupportedError(f"the head dimension of {name} must lie in 1..{MAX_HEAD_DIM}, got {x.shape[-1]}")
    if x.numel() // (x.shape[-1] * x.shape[-2]) >= 2**31:
        raise UnsupportedError(f"{name} has 2^31 tokens or more; offsets are int32")


# ---------------------------------------------------------------------------------------------------------- offsets


def check_offsets_given(q: Tensor, k: Tensor, cu_q: Tensor | None, cu_k: Tensor | None, names: tuple[str, str]) -> None:
    """What shows of both offset vectors without reading them. `cu_k` None means that keys use `cu_q`."""
    if cu_q is None:
        raise ValueError(f"{names[0]} is missing: packed attention without offsets would be one document; "
                         f"write torch.tensor([0, total], dtype=torch.int32) if that is meant")  # fmt: skip
    _check_offsets(names[0], cu_q, q)
    if cu_k is None:
        if k.shape[0] != q.shape[0]:
            raise ValueError(
                f"q has {q.shape[0]} rows but k has {k.shape[0]}: give {names[1]} as well, "
                f"or if they are meant to be equal, check the layout, which is (total tokens, heads, dim)"
            )
        return
    _check_offsets(names[1], cu_k, q)
    if cu_q.shape != cu_k.shape:
        raise ValueError(
            f"{names[0]} and {names[1]} must describe the same documents: "
            f"they have {cu_q.shape[0] - 1} and {cu_k.shape[0] - 1}"
        )


def _check_offsets(name: str, cu: Tensor, q: Tensor) -> None:
    if not isinstance(cu, Tensor):
        raise ValueError(
            f"{name} must be an int32 tensor on {q.device}, got {type(cu).__name__}; "
            f"write torch.tensor({name}, dtype=torch.int32, device={str(q.device)!r})"
        )
    if cu.dtype != torch.int32:
        raise ValueError(f"{name} must be int32, got {cu.dtype}; write {name}.to(torch.int32)")
    if cu.dim() != 1 or cu.shape[0] < 1:
        raise ValueError(
            f"{name} must have shape (documents + 1,), the first entry 0 and one more per document; "
            f"got shape {tuple(cu.shape)}"
        )
    if cu.device != q.device:
        raise ValueError(
            f"{name} must be on the device of q, {q.device}; got {cu.device}; write {name}.to({str(q.device)!r})"
        )


def check_offset_values(name: str, cu: Tensor, rows: int, longest: int | None = None) -> None:
    """Reads the offsets (on a device this makes the host wait): start at 0, never decrease, end within the buffer.

    `longest`, where a caller gave it (flash-attention's max_seqlen), bounds every document.
    """
    values = cu.tolist()
    if values[0] != 0:
        raise ValueError(
            f"{name} must start at 0, got {values[0]}; if these are lengths, write "
            f"torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)"
        )
    for i, (a, b) in enumerate(itertools.pairwise(values)):
        if b < a:
            raise ValueError(f"{name} must not decrease: entry {i} is {a}, entry {i + 1} is {b}")
        if longest is not None and b - a > longest:
            raise ValueError(
                f"{name}: document {i} has {b - a} tokens, more than the max_seqlen of {longest} that was given"
            )
    if values[-1] > rows:
        raise ValueError(f"{name} must end within the buffer of {rows} rows, but its last entry is {values[-1]}")


def clamp_offsets(cu: Tensor, rows: int) -> Tensor:
    """Offsets that start at 0, never decrease and stay within `rows`, without reading them; good ones are unchanged."""
    cu = cu.clamp(0, rows)
    cu[:1] = 0
    return cu.cummax(0).values


def check_longest(name: str, value: int | Tensor | None) -> int:
    """flash-attention's max_seqlen: a hint. Returns the bound to hold documents to where offsets are read, -1 for none.

    A tensor is taken and never read: reading it would make the host wait, for a number that changes no bit.
    """
    if value is None or isinstance(value, Tensor):
        return -1
    if not _is_int(value) or value < 0:
        raise ValueError(f"{name} must be the length of the longest document, an int >= 0; got {value!r}")
    return int(value)


def _is_int(value: object) -> bool:
    """An int, a symbolic one while tracing, or one of numpy's. Not True; not a tensor, which would be waited for."""
    return not isinstance(value, (bool, Tensor)) and (isinstance(value, int) or hasattr(value, "__index__"))


# ---------------------------------------------------------------------------------------------------------- options


def window_sides(causal: bool, window: tuple[int | None, int | None] | None, name: str = "window") -> tuple[int, int]:
    """(left, right), both ends inclusive, -1 for an open side. `causal` closes the right side at the query itself."""
    check_flag("causal", causal)
    if window is None:
        window = (None, None)
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        example = f"; {window} keys, its own included, are ({window - 1}, 0)" if _is_int(window) and window > 0 else ""
        raise ValueError(f"{name} must be None or (left, right), got {window!r}; -1 or None is an open side{example}")
    sides = []
    for side, value in zip(("left", "right"), window):
        if value is None:
            value = OPEN
        if not _is_int(value) or not OPEN <= value < 2**31:
            raise ValueError(
                f"{name}: the {side} side must be an int in 0..2^31 - 1 (that many tokens, both ends inclusive), "
                f"or -1 or None for open; got {value!r}"
            )
        sides.append(int(value))
    return (sides[0], 0 if causal else sides[1])


def scale_or_default(softmax_scale: float | None, head_dim: int) -> float:
    """The factor on q.k: 1/sqrt(D) unless given. A finite positive number, in Python: a tensor would be waited for."""
    if softmax_scale is None:
        return 1.0 / math.sqrt(head_dim)
    if isinstance(softmax_scale, (bool, Tensor)) or not isinstance(softmax_scale, (int, float)):
        hint = "; write float(softmax_scale), once, outside the step" if isinstance(softmax_scale, Tensor) else ""
        raise ValueError(f"softmax_scale must be a Python float or None, got {type(softmax_scale).__name__}{hint}")
    if not 0.0 < softmax_scale <= sys.float_info.max:  # also refuses NaN, and integers that no float holds
        hint = (
            "; if it is flash-attention 2's dropout_p, in fourth place there, leave it out"
            if softmax_scale == 0
            else ""
        )
        raise ValueError(f"softmax_scale must be positive and finite, got {softmax_scale!r}{hint}")
    return float(softmax_scale)


def recipe_text(recipe: Recipe | str | None) -> str:
    """The string under which a recipe crosses the operator's schema. None: the default, `Recipe.strict()`.

    While `torch.compile` traces, `str(recipe)` cannot run, so the string that the recipe holds of itself crosses.
    """
    if recipe is None:
        return _DEFAULT
    if isinstance(recipe, str):
        return recipe if torch.compiler.is_compiling() else _text(parse_recipe(recipe))
    if not isinstance(recipe, Recipe):
        hint = "; presets are called, as in Recipe.strict()" if callable(recipe) else ""
        raise ValueError(
            f"recipe must be a flamia.Recipe, its string (such as 'mxfp8/strict') or None, "
            f"got {type(recipe).__name__}{hint}"
        )
    return recipe.spelled if torch.compiler.is_compiling() else _text(recipe)


_DEFAULT = str(Recipe.strict())


@functools.lru_cache(maxsize=64)
def _text(recipe: Recipe) -> str:
    return str(recipe)


@functools.lru_cache(maxsize=64)
def parse_recipe(text: str) -> Recipe:
    """`Recipe.parse`, remembered: operators meet the same few strings again and again."""
    return Recipe.parse(text)


def check_flag(name: str, value: bool) -> None:
    """A bool and nothing else: in positional calls written for another signature a number lands here."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {value!r}")


# ------------------------------------------------------------------------- flash-attention's further keyword arguments

# What changes the result: taken at the value that means "off", else refused by name.
_OFF: dict[str, tuple] = {
    "dropout_p": (None, 0),
    "softcap": (None, 0),
    "attention_chunk": (None, 0),
    **dict.fromkeys(
        (
            "alibi_slopes", "qv", "q_descale", "k_descale", "v_descale", "learnable_sink", "seqused_q", "seqused_k",
            "block_table", "page_table", "leftpad_k", "gather_kv_indices", "score_mod", "score_mod_bwd", "mask_mod",
            "block_sparse_tensors", "aux_tensors", "aux_scalars", "min_seqlen_k", "seqlen_k_per_split",
        ),
        (None,),
    ),
}  # fmt: skip

# What may change only the speed. Here the bits never depend on any of it (`deterministic` is how it always is).
_HINTS = frozenset(
    ("deterministic", "num_splits", "pack_gqa", "sm_margin", "scheduler_metadata", "disable_scheduler_metadata")
)


def check_flash_arguments(function: str, arguments: dict[str, object]) -> None:
    """The arguments flash-attention has and this library has not: hints pass, features must be switched off."""
    for name, value in arguments.items():
        if name in _HINTS:
            continue
        if name not in _OFF:
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")
        if not any(value is off or (isinstance(value, (int, float)) and value == off) for off in _OFF[name]):
            shown = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
            raise UnsupportedError(f"{name} is not supported, got {shown}; only {_OFF[name][-1]!r} is taken")
