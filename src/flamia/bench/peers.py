"""Who is timed. A contender is built for one workload's tensors and offers `forward()` and `train()`.

`train()` is one whole training call, forward and backward, on tensors of 16 bits; `inside` says what a figure includes.
Peers are looked for when they are asked for: one that is not installed, or does not take the workload, says so in one
line and is left out. Whether its sums are right is found out by checks.py, not assumed here.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .workloads import Workload

OURS = "flamia"
FRONTIER = "flamia-frontier"
"""Ours with scores from Q and K as given at the mask's edge."""
ROUTE, ROUTE_FAST = "flamia-mxfp8", "flamia-mxfp8-fast"
"""The route `mxfp8`, strict and fast."""
RECIPES = {
    OURS: "mxfp8_scores/strict",
    FRONTIER: "mxfp8_scores/strict,frontier_scores=bf16",
    ROUTE: "mxfp8/strict",
    ROUTE_FAST: "mxfp8/fast,dq_accumulator=fp32",
}


class Refused(Exception):
    """This peer is not here, or does not do this."""


@dataclass(frozen=True)
class Contender:
    """forward() -> O; train() -> (O, dQ, dK, dV), each (tokens, heads, dim) or of that many elements in that order, in
    units of `read`. tolerance: the relative L2 error that the format explains, with room; above it something is wrong."""

    name: str
    inside: str
    forward: Callable[[], Tensor]
    train: Callable[[], tuple[Tensor, ...]]
    tolerance: float
    read: Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]] = lambda results: results
    prepare: Callable[[], None] = lambda: None
    """Called when the contents of the inputs have changed: calibration, for those that need it."""


Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def imported(name: str) -> Any:
    try:
        return functools.reduce(getattr, name.split(".")[1:], __import__(name))
    except (ImportError, AttributeError) as error:
        raise Refused(f"{name} cannot be imported: {' '.join(str(error).split())[:120]}") from error


def differentiated(
    attend: Callable[..., Tensor], inputs: Inputs, name: str, inside: str, tolerance: float
) -> Contender:
    """A contender whose gradients come from autograd. The leaves share the memory of the inputs."""
    q, k, v, do, _ = inputs
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]

    def forward() -> Tensor:
        with torch.no_grad():
            return attend(q, k, v)

    def train() -> tuple[Tensor, ...]:
        o = attend(*leaves)
        return (o.detach(), *torch.autograd.grad(o, leaves, do.view(o.shape)))

    return Contender(name, inside, forward, train, tolerance)


def ours(workload: Workload, inputs: Inputs, name: str = OURS) -> Contender:
    """The public function with one of its recipes, the default one unless another is named, as a training step calls it."""
    import flamia

    recipe = RECIPES[name]
    cu = inputs[4]
    window = None if workload.window is None else (workload.window, 0)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = flamia.attention_varlen(q, k, v, cu, causal=workload.causal, window=window, recipe=recipe)
        assert isinstance(out, Tensor)
        return out

    inside = "list of work, encoding of Q, K, V and dO, forward, backward: 16-bit tensors in, 16-bit tensors out"
    return differentiated(attend, inputs, name, inside, 0.07 if name in (OURS, FRONTIER) else 0.08)


def flash_attention_4(workload: Workload, inputs: Inputs) -> Contender:
    """flash-attn-4 (CuTe DSL), 16 bits: the fastest packed attention that trains on Hopper that we know of."""
    function = imported("flash_attn.cute.interface").flash_attn_varlen_func
    cu, longest = inputs[4], max(workload.lengths)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        found = function(
            q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=longest, max_seqlen_k=longest,
            causal=workload.causal, window_size=(workload.window, None),
        )  # fmt: skip
        return found[0] if isinstance(found, (tuple, list)) else found

    return differentiated(attend, inputs, "flash-attn-4", "forward, backward, bf16, not deterministic", 0.02)


def torch_varlen(workload: Workload, inputs: Inputs) -> Contender:
    """torch.nn.attention.varlen_attn, 16 bits."""
    function = imported("torch.nn.attention.varlen").varlen_attn
    names = inspect.signature(function).parameters
    cu, longest = inputs[4], max(workload.lengths)
    options: dict[str, Any] = {}
    if workload.window is not None:
        if "window_size" not in names:
            raise Refused("this torch's varlen_attn has no window")
        options = {"window_size": (workload.window, 0)}
    elif workload.causal:
        options = {"is_causal": True} if "is_causal" in names else {"window_size": (-1, 0)}
    if workload.heads != workload.kv_heads:
        if "enable_gqa" not in names:
            raise Refused("this torch's varlen_attn takes as many key heads as query heads")
        options["enable_gqa"] = True

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return function(q, k, v, cu, cu, longest, longest, **options)

    return differentiated(attend, inputs, "torch varlen_attn", "forward, backward, bf16", 0.02)


def dense(workload: Workload) -> tuple[int, int]:
    if workload.batch is None:
        raise Refused("takes batches of one length only")
    if workload.window is not None:
        raise Refused("is asked for no windows here")
    return workload.batch


def cudnn(workload: Workload, inputs: Inputs) -> Contender:
    """cuDNN in 16 bits, through torch's scaled_dot_product_attention: dense only."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    batch, length = dense(workload)
    grouped = workload.heads != workload.kv_heads

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.view(batch, length, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            o = scaled_dot_product_attention(q, k, v, is_causal=workload.causal, enable_gqa=grouped)
        return o.transpose(1, 2).reshape(batch * length, q.shape[1], q.shape[3])

    return differentiated(attend, inputs, "cuDNN bf16", "forward, backward, bf16, dense", 0.02)


def cudnn_fp8(workload: Workload, inputs: Inputs) -> Contender:
    """cuDNN in E4M3 with one scale a tensor, through its frontend: dense only, kernels alone."""
    from flamia.audit.peer_cudnn import P_SCALE, Graphs, power, scalar

    batch, length = dense(workload)
    if workload.dim != 128:
        raise Refused("its backward takes head size 128 only")
    torch.backends.cudnn.version()  # loads torch's own libcudnn before the frontend looks for one
    graphs = Graphs(imported("cudnn"))
    q, k, v, do, _ = inputs
    given = {"q": q, "k": k, "v": v, "dO": do}
    made = {"o": q, "dQ": q, "dK": k, "dV": v}
    device = q.device
    shape = (batch, length, workload.heads, workload.kv_heads, workload.dim)

    def shaped(x: Tensor) -> Tensor:
        return x.view(batch, length, *x.shape[1:])

    memory = {n: shaped(torch.empty_like(x, dtype=torch.float8_e4m3fn)) for n, x in (given | made).items()}
    memory["stats"] = torch.empty(batch, workload.heads, length, 1, device=device)
    scales = {n: scalar(1.0, device) for n in (*given, *made, "s", "dP")}
    memory |= {f"{kind}_{n}": scalar(1.0, device) for n in scales for kind in ("scale", "descale")}
    memory |= {f"amax_{n}": scalar(0.0, device) for n in ("s", "o", "dQ", "dK", "dV", "dP")}

    def set_scale(name: str, value: Tensor | float) -> None:
        memory[f"scale_{name}"].fill_(float(value))
        memory[f"descale_{name}"].fill_(1 / float(value))

    forward_graph = graphs.forward(shape, workload.causal)
    backward_graph = graphs.backward(shape, workload.causal, False)

    def forward() -> Tensor:
        graphs.run(forward_graph, memory, device)
        return memory["o"]

    def train() -> tuple[Tensor, ...]:
        forward()
        graphs.run(backward_graph, memory, device)
        return tuple(memory[n] for n in made)

    def prepare() -> None:
        """Codes and scales for the present contents, every scale from a pass before: none of it is timed."""
        for name, x in given.items():
            set_scale(name, power(x.abs().amax().float()))
            memory[name].copy_(shaped(x.float() * memory[f"scale_{name}"].flatten()).to(torch.float8_e4m3fn))
        for name in (*made, "dP"):
            set_scale(name, 1.0)
        set_scale("s", P_SCALE)
        for names in (("o",), ("dP",), ("dQ", "dK", "dV")):  # dP's scale changes those of the gradients
            train()
            for name in names:
                set_scale(name, power(memory[f"amax_{name}"]))
        train()

    def read(results: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(x.float() / memory[f"scale_{n}"].flatten() for n, x in zip(made, results))

    inside = "kernels alone, dense: E4M3 in and out, scales known beforehand, nothing quantised"
    return Contender("cuDNN fp8", inside, forward, train, 0.1, read, prepare)


CONTENDERS: dict[str, Callable[[Workload, Inputs], Contender]] = {
    OURS: ours,
    **{name: functools.partial(ours, name=name) for name in (FRONTIER, ROUTE, ROUTE_FAST)},
    "flash-attn-4": flash_attention_4,
    "torch-varlen": torch_varlen,
    "cudnn": cudnn,
    "cudnn-fp8": cudnn_fp8,
}
