"""The two operators through which everything passes, `flamia::attention_forward` and `flamia::attention_backward`.

Why operators, and not an autograd.Function around kernels:

* `torch.compile` sees one opaque call with a shape rule (`register_fake`) and keeps its graph whole from the first
  call on, since importing this module loads torch and nothing else. Backends are modules looked up by name when an
  operator *runs*; none is loaded to trace one.
* Selective activation checkpointing knows operators by name: `SAVE_OPS` is the list to save.
* The backward is an operator too, so a compiled or checkpointed backward stays the same one call.

Both are functional: they read their arguments, write nothing of the caller's, and return new contiguous tensors. The
schema has tensors, ints, floats and strings only. A recipe crosses as `str(recipe)`, an open side of a window as -1, a
backend by its name, and documents as their offsets. `offsets` says what may be assumed of those: "trusted" (this
library made them), "aligned" (so it did, and first queries lie on blocks of keys), "checked" (read and checked here; a wait on
a device), "clamped" (made harmless without reading).

Backends answer two calls (see `reference`): forward(q, k, v, documents, recipe, scale) -> (o, lse, residual) and
backward(do, dlse, q, k, v, o, lse, residual, documents, recipe, scale) -> (dq, dk, dv). What they are given is made easy
for them: contiguous tensors, whatever the caller's strides were, so that views and expanded gradients have the bits of
their copies; offsets that stay within the buffers; and no autocast region, which would reach into the reference's own
matrix products. A backend that does some of this itself says so in a set HANDLES: "strides" (reads any), "offsets"
(clamps them while it reads them), "subset" (`backward` takes `wanted`, three bools; the others are not looked at),
"saved" (it has `forward_saving`, whose further result `backward` takes as `saved` in place of encoding v, k and q again:
one tensor of bytes, of the size that `flamia.saved` has for the shapes).

`saved` is an output of the forward operator, so that autograd, compiled graphs and checkpoints keep and drop it as they
keep and drop O. It is empty where nobody will differentiate (`save`), and where the backend keeps nothing. Where it is not,
v itself is not kept: its codes are in there, and the backward needs nothing else of it.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from flamia import validation
from flamia.packing import Documents
from flamia.recipe import Recipe
from flamia.saved import keeps, nbytes
from flamia.validation import OPEN, UnsupportedError

BACKENDS = {"reference": "flamia.reference", "hopper": "flamia.hopper"}


# --------------------------------------------------------------------------------------------------------- backends


def check_backend(name: str) -> None:
    """Known names only; whether it can run here is decided by the call that runs."""
    if name != "auto" and name not in BACKENDS:
        raise ValueError(f"backend must be 'auto' or one of {sorted(BACKENDS)}, got {name!r}")


def _choose(name: str, q: Tensor, k: Tensor, v: Tensor, recipe: Recipe, window: tuple[int, int]) -> ModuleType:
    """The backend module for this call. There is no second choice: what cannot run raises, and says how to ask."""
    check_backend(name)
    if name == "reference" or (name == "auto" and q.device.type == "cpu"):
        return importlib.import_module(BACKENDS["reference"])
    reason: str | None = f"no kernel runs on {q.device.type} tensors"
    if q.device.type == "cuda":
        kernels, reason = _load_hopper()
        if kernels is not None:
            reason = kernels.supports(q, k, v, recipe, window)
            if reason is None:
                return kernels
    raise UnsupportedError(
        f"backend={name!r}: {reason}. The call was q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}, "
        f"{q.dtype}, recipe {str(recipe)!r}, window {window}. To run the slow readable twin instead, ask for it: "
        f"backend='reference'"
    )


def _load_hopper() -> tuple[ModuleType | None, str | None]:
    try:
        return importlib.import_module(BACKENDS["hopper"]), None
    except ModuleNotFoundError as error:  # flamia.hopper itself, or Triton, on a machine set up for the CPU
        return None, f"its kernels cannot be loaded, since the module {error.name!r} is missing"


def _handles(room: ModuleType, what: str) -> bool:
    return what in getattr(room, "HANDLES", ())


def _dense(room: ModuleType, *tensors: Tensor) -> list[Tensor]:
    return list(tensors) if _handles(room, "strides") else [x.contiguous() for x in tensors]


def _documents(
    room: ModuleType,
    q: Tensor,
    k: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    window: tuple[int, int],
    offsets: str,
    longest: tuple[int, int],
) -> Documents:
    if offsets == "checked":
        for name, cu, rows, most in (
            ("cu_seqlens (cu_seqlens_q)", cu_q, q.shape[0], longest[0]),
            ("cu_seqlens_k", cu_k, k.shape[0], longest[1]),
        ):
            validation.check_offset_values(name, cu, rows, None if most < 0 else most)
    elif offsets == "clamped":
        if not _handles(room, "offsets"):
            cu_q, cu_k = validation.clamp_offsets(cu_q, q.shape[0]), validation.clamp_offsets(cu_k, k.shape[0])
    elif offsets not in ("trusted", "aligned"):
        raise ValueError(f"offsets must be 'checked', 'clamped', 'trusted' or 'aligned', got {offsets!r}")
    left, right = (None if side == OPEN else side for side in window)
    shared = cu_k.data_ptr() == cu_q.data_ptr()  # what is one tensor stays one
    cu_q = cu_q.contiguous()
    return Documents(cu_q, cu_q if shared else cu_k.contiguous(), left, right, offsets == "aligned")


@contextmanager
def _surroundings(x: Tensor) -> Iterator[None]:
    """No autocast, and kernels launched on the device where the tensors are, which need not be the current one. Asking
    is much cheaper than setting, and the host's time is part of a call."""
    with ExitStack() as stack:
        if torch.is_autocast_enabled(x.device.type):
            stack.enter_context(torch.autocast(x.device.type, enabled=False))
        if x.device.type == "cuda" and x.device.index != torch.cuda.current_device():
            stack.enter_context(torch.cuda.device(x.device))
        yield


def _keeps(x: Tensor, backend: str, save: bool, recipe: str) -> bool:
    """Whether a call that runs leaves something in `saved`: known without loading the backend that will run."""
    return save and x.device.type == "cuda" and backend != "reference" and keeps(validation.parse_recipe(recipe))


# ---------------------------------------------------------------------------------------------------------- forward


torch.library.define(
    "flamia::attention_forward",
    "(Tensor q, Tensor k, Tensor v, Tensor cu_q, Tensor cu_k, SymInt left, SymInt right, float scale, str recipe, "
    "str backend, str offsets, SymInt max_q, SymInt max_k, bool save) -> (Tensor o, Tensor lse, Tensor residual, "
    "Tensor saved)",
    tags=torch.Tag.pt2_compliant_tag,
)
attention_forward = torch.ops.flamia.attention_forward.default


@torch.library.impl("flamia::attention_forward", "default")
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    left: int,
    right: int,
    scale: float,
    recipe: str,
    backend: str,
    offsets: str,
    max_q: int,
    max_k: int,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q (Tq, Hq, D), k (Tk, Hk, D), v (Tk, Hk, Dv), offsets int32 -> o (Tq, Hq, Dv), lse (Hq, Tq) float32, residual,
    saved.

    The residual is what BF16 took from O, in O's shape, for recipes with delta="compensated"; else it is empty.
    `max_q` and `max_k` bound the lengths where offsets are checked; -1 is no bound. `save`: a backward may follow;
    without it `saved` is empty, and a backward that follows all the same has to be given v and encodes again.
    """
    parsed = validation.parse_recipe(recipe)
    room = _choose(backend, q, k, v, parsed, (left, right))
    documents = _documents(room, q, k, cu_q, cu_k, (left, right), offsets, (max_q, max_k))
    with _surroundings(q):
        arguments = (*_dense(room, q, k, v), documents, parsed, scale)
        if save and keeps(parsed) and _handles(room, "saved"):
            o, lse, residual, saved = room.forward_saving(*arguments)
        else:
            o, lse, residual = room.forward(*arguments)
            saved = q.new_empty((0,), dtype=torch.uint8)
    # a recipe without rounding answers in float64; the operator's dtypes do not depend on the recipe
    o, lse, residual = o.to(q.dtype), lse.to(torch.float32), residual.to(q.dtype)
    return o.contiguous(), lse.contiguous(), residual.contiguous(), saved


@torch.library.register_fake("flamia::attention_forward")
def _(q, k, v, cu_q, cu_k, left, right, scale, recipe, backend, offsets, max_q, max_k, save):
    o = q.new_empty((q.shape[0], q.shape[1], v.shape[2]))
    lse = q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)
    residual = torch.empty_like(o) if validation.parse_recipe(recipe).delta == "compensated" else o.new_empty((0,))
    size = 0
    if _keeps(q, backend, save, recipe):
        size = nbytes(q.shape[0], k.shape[0], cu_q.shape[0] - 1, q.shape[1], k.shape[1], q.shape[2])
    return o, lse, residual, q.new_empty((size,), dtype=torch.uint8)


# --------------------------------------------------------------------------------------------------------- backward


torch.library.define(
    "flamia::attention_backward",
    "(Tensor? do, Tensor? dlse, Tensor q, Tensor k, Tensor? v, Tensor o, Tensor lse, Tensor residual, Tensor cu_q, "
    "Tensor cu_k, SymInt left, SymInt right, float scale, str recipe, str backend, str offsets, bool want_dq, "
    "bool want_dk, bool want_dv, Tensor? saved=None) -> (Tensor dq, Tensor dk, Tensor dv)",
    tags=torch.Tag.pt2_compliant_tag,
)
attention_backward = torch.ops.flamia.attention_backward.default


@torch.library.impl("flamia::attention_backward", "default")
def _backward(
    do: Tensor | None,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    o: Tensor,
    lse: Tensor,
    residual: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    left: int,
    right: int,
    scale: float,
    recipe: str,
    backend: str,
    offsets: str,
    want_dq: bool,
    want_dk: bool,
    want_dv: bool,
    saved: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """do like o, dlse like lse (None: zero) -> dq, dk, dv like q, k, v, contiguous. One not wanted comes back empty.

    saved: what the forward of the same arguments left; with it v may be None, since its codes are in there.
    """
    parsed = validation.parse_recipe(recipe)
    kept = saved is not None and saved.numel() > 0
    if v is None and not kept:
        raise ValueError("v is None: it may be left out only with what the forward saved, and `saved` is empty")
    room = _choose(backend, q, k, k if v is None else v, parsed, (left, right))
    documents = _documents(room, q, k, cu_q, cu_k, (left, right), offsets, (-1, -1))
    do = torch.zeros_like(o) if do is None else _dense(room, do)[0]
    dlse = None if dlse is None else _dense(room, dlse)[0]
    wanted = (want_dq, want_dk, want_dv)
    choice: dict[str, Any] = {"wanted": wanted} if _handles(room, "subset") else {}
    if kept and _handles(room, "saved"):
        choice["saved"] = saved
    elif v is None:
        raise ValueError(f"v is None, but {room.__name__} does not read `saved`: it needs v")
    with _surroundings(q):
        given = [None if x is None else _dense(room, x)[0] for x in (q, k, v, o, lse, residual)]
        gradients = room.backward(do, dlse, *given, documents, parsed, scale, **choice)
    dq, dk, dv = (g.to(q.dtype).contiguous() if want else q.new_empty((0,)) for g, want in zip(gradients, wanted))
    return dq, dk, dv


@torch.library.register_fake("flamia::attention_backward")
def _(do, dlse, q, k, v, o, lse, residual, cu_q, cu_k, left, right, scale, recipe, backend, offsets,
      want_dq, want_dk, want_dv, saved=None):  # fmt: skip
    shapes = (q.shape, k.shape, (*k.shape[:2], o.shape[2]))
    dq, dk, dv = (q.new_empty(s if want else (0,)) for s, want in zip(shapes, (want_dq, want_dk, want_dv)))
    return dq, dk, dv


# --------------------------------------------------------------------------------------------------------- autograd


# The forward is registered for autograd by hand, in the shape that torch.library.register_autograd has: that one looks up
# the defaults of all arguments in every call, a quarter of what the host does for a training call beside the kernels
# (250 us down to 175 on a build machine, torch 2.13).


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, keyset, *inputs):
        q, k, v, cu_q, cu_k, *options, _, _, save = inputs
        o, lse, residual, saved = _below_autograd(keyset, *inputs)
        kept = _keeps(q, options[4], save, options[3])  # what `saved` holds, the inputs need not be kept for
        others = None if cu_k is cu_q else cu_k  # saved twice, hooks that copy would make two of them
        ctx.save_for_backward(q, k, None if kept else v, o, lse, residual, cu_q, others, saved if kept else None)
        ctx.options = options
        ctx.mark_non_differentiable(residual, saved)
        ctx.set_materialize_grads(False)  # an output no loss reads has the gradient None: nothing is computed for it
        return o, lse, residual, saved

    @staticmethod
    def backward(ctx, do, dlse, _, __):
        nothing = (None,) * (2 + len(ctx.options) + 3)
        wanted = ctx.needs_input_grad[1:4]
        if (do is None and dlse is None) or not any(wanted):
            return (None, None, None, None, *nothing)
        *tensors, cu_q, cu_k, saved = ctx.saved_tensors
        tensors += [cu_q, cu_q if cu_k is None else cu_k]
        gradients = attention_backward(do, dlse, *tensors, *ctx.options, *wanted, saved)
        return (None, *(g if want else None for g, want in zip(gradients, wanted)), *nothing)


def _below_autograd(keyset, *inputs):
    with torch._C._AutoDispatchBelowAutograd():
        return attention_forward.redispatch(keyset & torch._C._after_autograd_keyset, *inputs)


def _autograd(keyset, *inputs):
    if torch.is_grad_enabled() and any(x.requires_grad for x in inputs[:3]):
        return _Attention.apply(keyset, *inputs)
    return _below_autograd(keyset, *inputs)


def _differentiate_twice(ctx, *_):
    raise UnsupportedError("attention has no second derivative here: drop create_graph=True")


_library = torch.library.Library("flamia", "FRAGMENT")
_library.impl("attention_forward", _autograd, "Autograd", with_keyset=True)
torch.library.register_autograd("flamia::attention_backward", _differentiate_twice)

# For selective activation checkpointing: torch.utils.checkpoint.create_selective_checkpoint_contexts(SAVE_OPS).
SAVE_OPS = [attention_forward]
