"""The kernels inside training stacks: packings that change under torch.compile without a wait for the device, CUDA graphs of
whole steps, checkpointing. transformers and TorchTitan have files of their own beside this one."""

from __future__ import annotations

import functools
from contextlib import contextmanager

import pytest
import torch

if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
    pytest.skip("needs an NVIDIA Hopper GPU", allow_module_level=True)

from calls import error, no_waiting, offsets, same
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import flamia
from flamia import hopper, ops

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fresh_compiler")]
WIDTH, DIM = 128, 64


class Layer(nn.Module):
    """Projections, attention on packed documents, a residual."""

    def __init__(self, window=None):
        super().__init__()
        torch.manual_seed(0)
        self.qkv = nn.Linear(WIDTH, 8 * DIM, bias=False, dtype=torch.bfloat16, device="cuda")
        self.out = nn.Linear(4 * DIM, WIDTH, bias=False, dtype=torch.bfloat16, device="cuda")
        self.window = window

    def forward(self, x, cu_seqlens):
        q, k, v = self.qkv(x).unflatten(-1, (8, DIM)).split((4, 2, 2), 1)
        o = flamia.attention_varlen(q, k, v, cu_seqlens, causal=True, window=self.window)
        return x + self.out(o.flatten(1))


def packing(tokens: int, documents: int, seed: int) -> torch.Tensor:
    """Offsets of so many documents, empty ones among them, and a tail that belongs to none."""
    generator = torch.Generator().manual_seed(seed)
    inner = torch.randint(0, tokens - 1, (documents,), generator=generator).sort().values
    return torch.cat([torch.zeros(1, dtype=torch.long), inner]).to(torch.int32).cuda()


def rows(tokens: int, seed: int) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(tokens, WIDTH, dtype=torch.bfloat16, device="cuda", generator=generator)


def step(layer, x, cu, call=None):
    """y, dx and the weights' gradients."""
    layer.zero_grad()
    x = x.detach().requires_grad_()
    y = (layer if call is None else call)(x, cu)
    y.backward(x.detach())
    return [y.detach().clone(), x.grad.clone(), *(p.grad.clone() for p in layer.parameters())]


def test_a_wait_would_be_noticed():
    with no_waiting(), pytest.raises(RuntimeError, match="synchroniz"):
        torch.ones(3, device="cuda").sum().item()


@pytest.mark.parametrize("window", [None, (200, 0)])
@pytest.mark.parametrize("sizes", ["equal", "changing"])
def test_fifty_packings_one_graph_no_wait(sizes, window):
    """Forward and backward; where the numbers of tokens and documents change too, compiled for any (dynamic=True)."""
    layer = Layer(window)
    calls = []
    for seed in range(50):
        tokens, documents = (900, 7) if sizes == "equal" else (700 + 13 * seed, 2 + seed % 9)
        calls.append((rows(tokens, seed), packing(tokens, documents, seed)))
    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(layer, fullgraph=True, backend=counter, dynamic=sizes == "changing")
    step(layer, *calls[0], compiled)
    with no_waiting():
        results = [step(layer, x, cu, compiled) for x, cu in calls]
    assert counter.frame_count == 1
    with no_waiting():
        eager = [step(layer, x, cu) for x, cu in calls]
    for got, want in zip(results, eager, strict=True):  # inductor may add in another order around attention
        assert all(error(x, y.double()) < 0.01 for x, y in zip(got, want, strict=True))


def test_attention_has_the_same_bits_in_every_compiled_size():
    def call(q, k, v, cu):
        return flamia.attention_varlen(q, k, v, cu, causal=True, return_lse=True)

    compiled = torch.compile(call, fullgraph=True, dynamic=True)
    for seed in range(10):
        tokens, documents = 300 + 71 * seed, 1 + seed % 6
        cu = packing(tokens, documents + 1, seed)
        q, k, v = (torch.randn(tokens, h, DIM, dtype=torch.bfloat16, device="cuda").requires_grad_() for h in (4, 2, 2))
        do = torch.randn(tokens, 4, DIM, dtype=torch.bfloat16, device="cuda")

        def run(function, leaves=(q, k, v), cu=cu, do=do):
            o, lse = function(*leaves, cu)
            return [o, lse, *torch.autograd.grad(o, leaves, do)]

        assert same(run(compiled), run(call))


def test_reduce_overhead():
    """mode="reduce-overhead": torch records CUDA graphs of the forward and the backward and replays them."""
    layer = Layer()
    calls = [(rows(900, seed), packing(900, 7, seed)) for seed in range(12)]
    graphed = torch.compile(layer, fullgraph=True, mode="reduce-overhead")
    stale = step(layer, calls[0][0], calls[1][1])
    for x, cu in calls:
        torch.compiler.cudagraph_mark_step_begin()
        got, want = step(layer, x, cu, graphed), step(layer, x, cu)
        assert all(error(a, b.double()) < 0.01 for a, b in zip(got, want, strict=True))
    assert error(stale[0] - calls[0][0], (step(layer, *calls[0])[0] - calls[0][0]).double()) > 0.1  # it would be seen
    manager = torch._inductor.cudagraph_trees.get_manager(torch.cuda.current_device(), create_if_none_exists=False)
    assert manager is not None and manager.roots and counters["inductor"]["cudagraph_skips"] == 0


def test_a_graph_of_a_whole_training_step():
    """torch.cuda.graph: forward, backward and the optimiser's step, replayed for fifty packings."""

    def build():
        layer = Layer()
        return layer, torch.optim.SGD(layer.parameters(), lr=1e-3, momentum=0.9)

    def train(layer, optimizer, x, cu):
        optimizer.zero_grad(set_to_none=True)
        loss = (layer(x, cu) - x).float().square().mean()
        loss.backward()
        optimizer.step()
        return loss

    calls = [(rows(900, seed), packing(900, 7, seed)) for seed in range(53)]
    layer, optimizer = build()
    eager = [train(layer, optimizer, x, cu).item() for x, cu in calls]
    weights = [p.detach().clone() for p in layer.parameters()]

    layer, optimizer = build()
    stale = [train(layer, optimizer, x, calls[2][1]).item() for x, _ in calls]

    layer, optimizer = build()
    x, cu = (z.clone() for z in calls[0])
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # the optimiser's buffers, and the kernels, come to be before the capture
        losses = []
        for new_x, new_cu in calls[:3]:
            x.copy_(new_x)
            cu.copy_(new_cu)
            losses.append(train(layer, optimizer, x, cu).detach().clone())
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    optimizer.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        loss = train(layer, optimizer, x, cu)
    with no_waiting():
        for new_x, new_cu in calls[3:]:
            x.copy_(new_x)
            cu.copy_(new_cu)
            graph.replay()
            losses.append(loss.detach().clone())
    for loss, right, wrong in zip(torch.stack(losses).tolist()[3:], eager[3:], stale[3:], strict=True):
        assert abs(loss - right) < 1e-3 * right and abs(loss - wrong) > 1e-3 * right
    assert all(error(p, w.double()) < 1e-3 for p, w in zip(layer.parameters(), weights, strict=True))


@pytest.mark.parametrize("form", ["reentrant", "plain", "selective"])
@pytest.mark.parametrize("compiled", [False, True])
def test_checkpointing(form, compiled, monkeypatch):
    """The same bits, and how often the forward ran."""
    if compiled and form == "reentrant":
        pytest.skip("torch.compile takes use_reentrant=False")
    calls = []
    for name in ("forward", "forward_saving"):  # without a gradient there is nothing to save
        function = getattr(hopper, name)
        monkeypatch.setattr(hopper, name, lambda *args, run=function: calls.append(1) or run(*args))
    layer, x, cu = Layer(), rows(900, 0), packing(900, 7, 0)

    def call(x, cu):
        if form == "selective":
            contexts = functools.partial(create_selective_checkpoint_contexts, flamia.SAVE_OPS)
            return checkpoint(layer, x, cu, use_reentrant=False, context_fn=contexts)
        return checkpoint(layer, x, cu, use_reentrant=form == "reentrant")

    plain = step(layer, x, cu, torch.compile(layer, fullgraph=True) if compiled else None)
    calls.clear()
    got = step(layer, x, cu, torch.compile(call, fullgraph=True) if compiled else call)
    assert len(calls) == (1 if form == "selective" else 2)
    if compiled:  # other graphs: inductor may fuse what surrounds attention otherwise
        assert all(error(a, b.double()) < 0.01 for a, b in zip(got, plain, strict=True))
    else:
        assert same(got, plain)


@contextmanager
def filled():
    """Fresh memory holds NaN or the largest integer here, so bytes that nobody writes compare equal."""
    torch.use_deterministic_algorithms(True)
    try:
        assert (torch.empty(1000, device="cuda", dtype=torch.uint8) == 255).all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("operator", ["forward", "backward"])
def test_opcheck(operator):
    """Schema, fakes and autograd registration with what the kernels really return: `saved` has a size then, and every byte of
    it that is written is compared. The lists of work in there have one order only where no two blocks have as many steps,
    so all documents but one are empty."""
    q, k, v = (torch.randn(300, h, DIM, dtype=torch.bfloat16, device="cuda").requires_grad_() for h in (4, 2, 2))
    cu = offsets([0, 270, 0])
    options = (-1, 0, 0.125, "mxfp8_scores/strict", "hopper", "clamped")
    if operator == "forward":
        with filled():
            torch.library.opcheck(ops.attention_forward, (q, k, v, cu, cu, *options, -1, -1, True))
        return
    q, k, v = (x.detach() for x in (q, k, v))
    o, lse, residual, saved = ops.attention_forward(q, k, v, cu, cu, *options, -1, -1, True)
    assert saved.numel() > 0
    arguments = (torch.randn_like(o), None, q, k, None, o, lse, residual, cu, cu, *options, True, True, True, saved)
    torch.library.opcheck(ops.attention_backward, arguments)
