"""Who is timed. A contender is built for one workload's tensors and offers `forward()` and `train()`.

`train()` is one whole training call: forward and backward from 16-bit tensors to 16-bit tensors, whatever quantisation
that needs included.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Contender:
    name: str
    forward: Callable[[], object]
    train: Callable[[], object]


def hopper(q: Tensor, k: Tensor, v: Tensor, do: Tensor, cu: Tensor, longest: int) -> Contender:
    """The kernels of flamia.hopper, route mxfp8_scores; the encoded operands pass from the forward to the backward."""
    from flamia import hopper as kernels
    from flamia.packing import Documents
    from flamia.recipe import Recipe

    recipe, documents, scale = Recipe.strict("mxfp8_scores"), Documents(cu, cu, None, 0), q.shape[-1] ** -0.5

    def forward() -> object:
        return kernels.forward_saving(q, k, v, documents, recipe, scale)

    def train() -> object:
        o, lse, residual, saved = kernels.forward_saving(q, k, v, documents, recipe, scale)
        return kernels.backward(do, None, q, k, v, o, lse, residual, documents, recipe, scale, saved=saved)

    return Contender("flamia mxfp8_scores", forward, train)


def hopper_graph(q: Tensor, k: Tensor, v: Tensor, do: Tensor, cu: Tensor, longest: int) -> Contender:
    """The same, captured in CUDA graphs: what the card does, without what the host adds."""
    plain = hopper(q, k, v, do, cu, longest)
    return Contender(plain.name + ", graph", graphed(plain.forward), graphed(plain.train))


def graphed(fn: Callable[[], object]) -> Callable[[], object]:
    fn()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fn()
    return graph.replay


def flash_attention_4(q: Tensor, k: Tensor, v: Tensor, do: Tensor, cu: Tensor, longest: int) -> Contender:
    """flash-attn-4 (CuTe DSL), bf16: the fastest packed attention that trains on Hopper that we know of."""
    from flash_attn.cute.interface import flash_attn_varlen_func

    options = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": longest, "max_seqlen_k": longest, "causal": True}
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]

    def first(result: Any) -> Any:  # o, or (o, lse)
        return result[0] if isinstance(result, (tuple, list)) else result

    def forward() -> object:
        with torch.no_grad():
            return flash_attn_varlen_func(q, k, v, **options)

    def train() -> object:
        return torch.autograd.grad(first(flash_attn_varlen_func(*leaves, **options)), leaves, do)

    return Contender("flash-attn-4 bf16", forward, train)


CONTENDERS = {"hopper": hopper, "graph": hopper_graph, "fa4": flash_attention_4}
