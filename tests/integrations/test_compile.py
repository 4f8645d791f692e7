"""torch.compile around attention in a model: whole graphs, compiled once, whatever the packing."""

import pytest
import torch
from helpers import same
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

import flamia
from flamia import Recipe

pytestmark = pytest.mark.usefixtures("fresh_compiler")

DIM = 16


class Layer(nn.Module):
    """Projections, attention on packed documents, a residual; what surrounds attention in any model."""

    def __init__(self, recipe="mxfp8/strict", window=None, dtype=torch.bfloat16):
        super().__init__()
        torch.manual_seed(0)
        self.qkv = nn.Linear(32, 8 * DIM, dtype=dtype)
        self.out = nn.Linear(4 * DIM, 32, dtype=dtype)
        self.recipe, self.window = recipe, window

    def forward(self, x, cu_seqlens):
        q, k, v = self.qkv(x).unflatten(-1, (8, DIM)).split((4, 2, 2), 1)
        o = flamia.attention_varlen(q, k, v, cu_seqlens, causal=True, window=self.window, recipe=self.recipe)
        return x + self.out(o.flatten(1))


def gradients(layer, x, cu, call=None):
    layer.zero_grad()
    x = x.detach().requires_grad_()
    y = (layer if call is None else call)(x, cu)
    (y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum().backward()
    return [y.detach(), x.grad, *(p.grad.clone() for p in layer.parameters())]


def packing(tokens, documents, seed):
    """Offsets of so many documents, some of them empty, and a tail that belongs to none."""
    generator = torch.Generator().manual_seed(seed)
    inner = torch.randint(0, tokens - 1, (documents,), generator=generator).sort().values
    return torch.cat([torch.zeros(1, dtype=torch.long), inner]).to(torch.int32)


def rows(tokens, seed):
    return torch.randn(tokens, 32, generator=torch.Generator().manual_seed(seed)).bfloat16()


def test_fifty_packings_one_graph():
    """The offsets are data: other documents in a buffer of the same size are no reason to compile again."""
    layer, counter = Layer(), CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    for seed in range(50):
        x, cu = rows(40, seed), packing(40, 5, seed)
        assert same(gradients(layer, x, cu, compiled), gradients(layer, x, cu))
    assert counter.frame_count == 1 and counters["stats"]["unique_graphs"] == 1


def test_fifty_packings_of_other_sizes_and_numbers_of_documents():
    """Two graphs as torch compiles by default, the second for any size; one if it is told which sizes change."""
    layer = Layer()
    sizes = [(20 + seed % 23, 2 + seed % 7) for seed in range(50)]
    for told, graphs in ((False, 2), (True, 1)):
        torch._dynamo.reset()
        counter = CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(layer, fullgraph=True, backend=counter)
        for seed, (tokens, documents) in enumerate(sizes):
            x, cu = rows(tokens, seed), packing(tokens, documents, seed)
            if told:
                torch._dynamo.mark_dynamic(x, 0)
                torch._dynamo.mark_dynamic(cu, 0)
            result = compiled(x, cu)
            if seed < 8:
                assert torch.equal(result, layer(x, cu))
        assert counter.frame_count == graphs


def test_sizes_that_change_in_training():
    """Backward included, with the graph that was compiled for other sizes."""
    layer = Layer()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    gradients(layer, rows(30, 0), packing(30, 4, 0), compiled)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for seed in range(1, 11):
            x, cu = rows(30 + seed, seed), packing(30 + seed, 2 + seed % 5, seed)
            assert same(gradients(layer, x, cu, compiled), gradients(layer, x, cu))


def test_another_recipe_or_window_is_another_graph():
    """They are constants of a model; that they are seen at all is what is tested."""
    counter = CompileCounterWithBackend("aot_eager")
    x, cu = rows(40, 0), packing(40, 5, 0)
    for options in ({}, {"recipe": "bf16"}, {"recipe": Recipe.fast()}, {"window": (7, 0)}):
        layer = Layer(**options)
        compiled = torch.compile(layer, fullgraph=True, backend=counter)
        assert same(gradients(layer, x, cu, compiled), gradients(layer, x, cu))
    assert counter.frame_count == 4


@pytest.mark.parametrize("function", ["attention", "flash_attn_func", "flash_attn_varlen_func"])
def test_every_entry_is_one_graph(function):
    q, k, v = (torch.randn(2, 40, h, DIM).bfloat16().requires_grad_() for h in (4, 2, 2))
    cu = torch.tensor([0, 40, 80], dtype=torch.int32)

    def call(q, k, v):
        if function == "flash_attn_varlen_func":
            packed = (x.flatten(0, 1) for x in (q, k, v))
            return flamia.flash_attn_varlen_func(*packed, cu, cu, 40, 40, causal=True, window_size=(9, 0))
        if function == "flash_attn_func":
            return flamia.flash_attn_func(q, k, v, causal=True, window_size=(9, 0), return_lse=True)
        return flamia.attention(q, k, v, causal=True, window=(9, 0), return_lse=True)

    def run(call):
        out = call(q, k, v)
        out = out if isinstance(out, tuple) else (out,)
        return [*out, *torch.autograd.grad(sum(x.float().sum() for x in out), (q, k, v))]

    assert same(run(torch.compile(call, fullgraph=True, backend="aot_eager")), run(call))


@pytest.mark.parametrize("recipe", ["bf16", "mxfp8_scores/strict", "mxfp8/fast", "mxfp8/strict,delta=compensated"])
def test_inductor_changes_no_bit_of_attention(recipe):
    q, k, v = (torch.randn(60, h, DIM).bfloat16().requires_grad_() for h in (4, 2, 2))
    cu = packing(60, 3, 0)

    def run(call):
        o = call(q, k, v, cu, causal=True, recipe=recipe)
        return [o, *torch.autograd.grad(o, (q, k, v), torch.ones_like(o))]

    assert same(run(torch.compile(flamia.attention_varlen, fullgraph=True)), run(flamia.attention_varlen))


@pytest.mark.parametrize("compiled", [False, True])
def test_autocast(compiled):
    """In the region a float32 model's projections have 16 bits, and attention the bits that it has outside. What stayed
    float32 in there is refused by name."""
    layer, x, cu = Layer(dtype=torch.float32), rows(40, 0).float(), packing(40, 5, 0)
    call = torch.compile(layer, fullgraph=True, backend="aot_eager") if compiled else layer
    with torch.autocast("cpu", torch.bfloat16):
        inside = gradients(layer, x, cu, call)
    by_hand = Layer(dtype=torch.bfloat16)
    by_hand.load_state_dict(layer.state_dict())
    outside = gradients(by_hand, x.bfloat16(), cu)
    assert inside[1].dtype == torch.float32
    for a, b in zip(inside, outside, strict=True):
        assert (a.double() - b.double()).norm() < 0.01 * b.double().norm()
    q, k, v = (torch.randn(40, h, DIM).bfloat16() for h in (4, 2, 2))
    plain = flamia.attention_varlen(q, k, v, cu, causal=True)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(flamia.attention_varlen(q, k, v, cu, causal=True), plain)
        with pytest.raises(ValueError, match=r"q must be bfloat16 or float16, got torch\.float32; cast it where"):
            flamia.attention_varlen(q.float(), k, v, cu, causal=True)
