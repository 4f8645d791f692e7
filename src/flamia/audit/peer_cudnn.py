"""The FP8 attention of the cuDNN frontend: dense, E4M3 in and out, one scale for each whole tensor.

Those scales come from the caller, so there are two targets. ``cudnn:fp8`` sets every scale to a constant: whatever
moves then was moved by the kernel. ``cudnn:fp8-current`` takes the scales of q, k, v and dO from their largest entry, as
frameworks do that call it so ("current scaling"); one scale for a whole call is a channel between all of its tokens, and
the second target shows what the first one's caller adds.

A graph is built for one shape and kept. The library's exceptions derive from no class that says "refused", so they are
raised again as ``RuntimeError`` with their own words.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from .peers import Axes, Call, Options, own_words

E4M3_MAX = 448.0
P_SCALE = 256.0  # weights are at most 1
SCALAR = {"dim": [1, 1, 1, 1], "stride": [1, 1, 1, 1]}
FORWARD = ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o")
BACKWARD = (
    "descale_q", "descale_k", "descale_v", "descale_o", "descale_dO", "descale_s", "descale_dP", "scale_s", "scale_dQ",
    "scale_dK", "scale_dV", "scale_dP",
)  # fmt: skip


@contextmanager
def refusals() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise RuntimeError(own_words(error)) from error


def laid(b: int, h: int, s: int, d: int) -> dict[str, list[int]]:
    """Dimensions in cuDNN's order (b, h, s, d) of memory in ours (b, s, h, d)."""
    return {"dim": [b, h, s, d], "stride": [s * h * d, d, h * d, 1]}


class Graphs:
    """Forward and backward graphs of one handle; a shape is (b, s, query heads, key heads, d)."""

    def __init__(self, cudnn: Any) -> None:
        self.cudnn, self.handle = cudnn, cudnn.create_handle()
        self.forward = functools.lru_cache(maxsize=None)(self._forward)
        self.backward = functools.lru_cache(maxsize=None)(self._backward)

    def _new(self) -> Any:
        kind = self.cudnn.data_type
        return self.cudnn.pygraph(
            io_data_type=kind.FP8_E4M3, intermediate_data_type=kind.FLOAT, compute_data_type=kind.FLOAT,
            handle=self.handle,
        )  # fmt: skip

    def _mask(self, causal: bool) -> dict[str, Any]:
        return {"diagonal_alignment": self.cudnn.diagonal_alignment.TOP_LEFT, "right_bound": 0} if causal else {}

    def _tensors(self, graph: Any, shape: tuple[int, ...], names: tuple[str, ...], scales: tuple[str, ...]) -> Any:
        b, s, hq, hk, d = shape
        kind = self.cudnn.data_type
        named = {
            n: graph.tensor(name=n, data_type=kind.FP8_E4M3, **laid(b, hk if n in "kv" else hq, s, d)) for n in names
        }
        return named | {n: graph.tensor(name=n, data_type=kind.FLOAT, **SCALAR) for n in scales}

    def _out(self, symbol: Any, data_type: Any, dim: list[int], stride: list[int]) -> Any:
        symbol.set_output(True).set_dim(dim).set_stride(stride).set_data_type(data_type)
        return symbol

    def _finished(self, graph: Any) -> Any:
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([self.cudnn.heur_mode.A, self.cudnn.heur_mode.FALLBACK])
        graph.check_support()
        graph.build_plans()
        return graph

    def _forward(self, shape: tuple[int, ...], causal: bool) -> tuple[Any, dict[str, Any]]:
        b, s, hq, _, d = shape
        graph, kind = self._new(), self.cudnn.data_type
        named = self._tensors(graph, shape, ("q", "k", "v"), FORWARD)
        o, stats, amax_s, amax_o = graph.sdpa_fp8(
            **named, generate_stats=True, attn_scale=d**-0.5, **self._mask(causal)
        )
        named["o"] = self._out(o, kind.FP8_E4M3, **laid(b, hq, s, d))
        named["stats"] = self._out(stats, kind.FLOAT, [b, hq, s, 1], [hq * s, s, 1, 1])
        named |= {n: self._out(x, kind.FLOAT, **SCALAR) for n, x in (("amax_s", amax_s), ("amax_o", amax_o))}
        return self._finished(graph), named

    def _backward(self, shape: tuple[int, ...], causal: bool, deterministic: bool) -> tuple[Any, dict[str, Any]]:
        b, s, hq, hk, d = shape
        graph, kind = self._new(), self.cudnn.data_type
        named = self._tensors(graph, shape, ("q", "k", "v", "o", "dO"), BACKWARD)
        named["stats"] = graph.tensor(name="stats", data_type=kind.FLOAT, dim=[b, hq, s, 1], stride=[hq * s, s, 1, 1])
        out = graph.sdpa_fp8_backward(
            **named, attn_scale=d**-0.5, use_deterministic_algorithm=deterministic, **self._mask(causal)
        )
        for name, x, h in zip(("dQ", "dK", "dV"), out[:3], (hq, hk, hk)):
            named[name] = self._out(x, kind.FP8_E4M3, **laid(b, h, s, d))
        for name, x in zip(("amax_dQ", "amax_dK", "amax_dV", "amax_dP"), out[3:]):
            named[name] = self._out(x, kind.FLOAT, **SCALAR)
        return self._finished(graph), named

    def run(self, built: tuple[Any, dict[str, Any]], memory: dict[str, Tensor], device: torch.device) -> None:
        graph, named = built
        if device.type == "cuda":
            self.cudnn.set_stream(handle=self.handle, stream=torch.cuda.current_stream().cuda_stream)
        workspace = torch.empty(max(1, graph.get_workspace_size()), dtype=torch.uint8, device=device)
        graph.execute({symbol: memory[name] for name, symbol in named.items()}, workspace, handle=self.handle)


def power(amax: Tensor) -> Tensor:
    """The largest power of two that keeps ``amax`` within E4M3, on the device; 1 where there is nothing to scale."""
    good = (amax > 0) & amax.isfinite()
    return torch.where(good, torch.exp2(torch.floor(torch.log2(E4M3_MAX / amax.clamp_min(1e-30)))), 1.0)


def scalar(x: Tensor | float, device: torch.device) -> Tensor:
    return torch.as_tensor(x, dtype=torch.float32, device=device).reshape(1, 1, 1, 1).clone()


class Scaled:
    """E4M3 copies of some tensors with their scales: 1, or each tensor's own."""

    def __init__(self, current: bool, **tensors: Tensor) -> None:
        self.codes, self.scale = {}, {}
        for name, x in tensors.items():
            self.scale[name] = scalar(power(x.float().abs().amax()) if current and x.numel() else 1.0, x.device)
            wide = torch.nan_to_num(x.float() * self.scale[name].flatten(), 0.0).clamp(-E4M3_MAX, E4M3_MAX)
            self.codes[name] = wide.to(torch.float8_e4m3fn).contiguous()


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, graphs: Graphs, current: bool, options: Options) -> Any:
        (b, s, hq, d), hk, device = q.shape, k.shape[2], q.device
        x = Scaled(current, q=q, k=k, v=v)
        ctx.graphs, ctx.options, ctx.current, ctx.shape = graphs, options, current, (b, s, hq, hk, d)
        o_scale = x.scale["v"]  # O is a mean of rows of V
        memory = x.codes | {f"descale_{n}": 1 / x.scale[n] for n in "qkv"}
        memory |= {"scale_s": scalar(P_SCALE, device), "descale_s": scalar(1 / P_SCALE, device), "scale_o": o_scale}
        memory["o"] = torch.empty(b, s, hq, d, dtype=torch.float8_e4m3fn, device=device)
        memory["stats"] = torch.empty(b, hq, s, 1, device=device)
        memory |= {n: scalar(0.0, device) for n in ("amax_s", "amax_o")}
        with refusals():
            graphs.run(graphs.forward(ctx.shape, options.causal), memory, device)
        memory["descale_o"] = 1 / o_scale
        ctx.memory, ctx.dtype = memory, q.dtype
        lse = memory["stats"].squeeze(-1).clone()
        ctx.mark_non_differentiable(lse)
        return (memory["o"].float() / o_scale.flatten()).to(q.dtype), lse

    @staticmethod
    def backward(ctx: Any, do: Tensor, _: Any) -> Any:  # type: ignore[override]
        b, s, hq, hk, d = ctx.shape
        device = do.device
        given = Scaled(ctx.current, dO=do)
        memory = ctx.memory | given.codes | {"descale_dO": 1 / given.scale["dO"]}
        scales = {n: scalar(1.0, device) for n in ("dP", "dQ", "dK", "dV")}
        memory |= {f"amax_{n}": scalar(0.0, device) for n in scales}
        for n, h in (("dQ", hq), ("dK", hk), ("dV", hk)):
            memory[n] = torch.empty(b, s, h, d, dtype=torch.float8_e4m3fn, device=device)
        with refusals():
            built = ctx.graphs.backward(ctx.shape, ctx.options.causal, ctx.options.deterministic)
            # dP's scale changes the others, so theirs are read after it is set.
            for settled in ((), ("dP",), ("dQ", "dK", "dV")) if ctx.current else ((),):
                scales |= {n: power(memory[f"amax_{n}"]) for n in settled}
                memory |= {f"scale_{n}": x for n, x in scales.items()} | {"descale_dP": 1 / scales["dP"]}
                ctx.graphs.run(built, memory, device)
        grads = ((memory[n].float() / scales[n].flatten()).to(ctx.dtype) for n in ("dQ", "dK", "dV"))
        return (*grads, None, None, None)


def cudnn_fp8(current: bool) -> Callable[[], tuple[Call, Axes]]:
    """The peer: batched, causal or full, deterministic backward or not, with its LSE."""

    def build() -> tuple[Call, Axes]:
        if torch.backends.cudnn.is_available():
            torch.backends.cudnn.version()  # so that torch's own libcudnn is loaded before the frontend looks for one
        cudnn: Any = importlib.import_module("cudnn")

        @functools.lru_cache(maxsize=1)
        def graphs() -> Graphs:
            return Graphs(cudnn)

        def call(q: Tensor, k: Tensor, v: Tensor, cu: Tensor | None, options: Options) -> Any:
            with refusals():
                own = graphs()
            o, lse = _Attend.apply(q, k, v, own, current, options)
            return (o, lse) if options.lse else o

        return call, Axes(
            packing=("batched",), windowed=(False,), lse=(False, True), deterministic=(False, True),
            dtype=(torch.bfloat16,),
        )  # fmt: skip

    return build
