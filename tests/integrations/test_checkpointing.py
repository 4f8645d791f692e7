"""Activations that are computed again have the same bits; those that are saved are not computed again; gradients of parts
of a batch are those of the whole."""

import functools

import pytest
import torch
from helpers import same
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import flamia

pytestmark = pytest.mark.usefixtures("fresh_compiler")

LENGTHS = (17, 1, 30, 12)
CU = torch.tensor([0, 17, 18, 48, 60], dtype=torch.int32)


class Layer(nn.Module):
    """In float64 but for attention, so that sums in another order show in nothing else."""

    def __init__(self, recipe):
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 128, dtype=torch.float64), nn.Linear(64, 32, dtype=torch.float64)
        self.recipe = recipe

    def forward(self, x, cu):
        q, k, v = self.qkv(x).bfloat16().unflatten(-1, (8, 16)).split((4, 2, 2), 1)
        o = flamia.attention_varlen(q, k, v, cu, causal=True, recipe=self.recipe)
        return x + self.out(o.flatten(1).double())


class Model(nn.Module):
    """Two layers under a form of checkpointing: None, "reentrant", "plain" or "selective"."""

    def __init__(self, form=None, recipe="mxfp8/strict"):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer(recipe) for _ in range(2))
        self.form = form

    def forward(self, x, cu):
        for layer in self.layers:
            if self.form is None:
                x = layer(x, cu)
            elif self.form == "selective":
                contexts = functools.partial(create_selective_checkpoint_contexts, flamia.SAVE_OPS)
                x = checkpoint(layer, x, cu, use_reentrant=False, context_fn=contexts)
            else:
                x = checkpoint(layer, x, cu, use_reentrant=self.form == "reentrant")
        return x


FORMS = {None: 2, "reentrant": 4, "plain": 4, "selective": 2}  # how often two layers' attention runs forward


def inputs(tokens=60):
    return torch.randn(tokens, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def backward(model, x=None, cu=CU, passes=1, call=None):
    model.zero_grad()
    x = (inputs() if x is None else x).detach().requires_grad_()
    y = (model if call is None else call)(x, cu)
    loss = (y * torch.linspace(-1, 1, 32)).sum()
    for i in range(passes):
        model.zero_grad()
        x.grad = None
        loss.backward(retain_graph=i < passes - 1)
    return [y.detach(), x.grad, *(p.grad.clone() for p in model.parameters())]


@pytest.mark.parametrize("recipe", ["mxfp8/strict", "mxfp8/strict,delta=compensated", "mxfp8/fast", "bf16"])
@pytest.mark.parametrize("form", ["reentrant", "plain", "selective"])
def test_what_is_computed_again_has_the_same_bits(form, recipe, forward_calls):
    plain = backward(Model(recipe=recipe))
    forward_calls.clear()
    assert same(backward(Model(form, recipe)), plain)
    assert len(forward_calls) == FORMS[form]


@pytest.mark.parametrize("form", [None, "reentrant", "plain"])
def test_two_backward_passes(form, forward_calls):
    """retain_graph: the second pass recomputes once more, and sees the same."""
    plain = backward(Model())
    forward_calls.clear()
    assert same(backward(Model(form), passes=2), plain)
    assert len(forward_calls) == {None: 2, "reentrant": 6, "plain": 6}[form]


def test_torch_allows_selective_checkpointing_one_backward_pass():
    with pytest.raises(RuntimeError, match="only allowed to backward once"):
        backward(Model("selective"), passes=2)


@pytest.mark.parametrize("form", ["plain", "selective"])
def test_compiled(form, forward_calls):
    """In the compiled graph, too, what is in SAVE_OPS is kept."""
    plain = backward(Model())
    model = Model(form)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    forward_calls.clear()
    assert same(backward(model, call=compiled), plain)
    assert len(forward_calls) == FORMS[form]


def test_a_policy_by_name():
    """As training stacks write them: a function of the operator, here one that keeps attention and nothing else."""

    def policy(context, operator, *args, **options):
        kept = operator in flamia.SAVE_OPS
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    model = Model("plain")
    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    x = inputs().requires_grad_()
    for layer in model.layers:
        x = checkpoint(layer, x, CU, use_reentrant=False, context_fn=contexts)
    (x * torch.linspace(-1, 1, 32)).sum().backward()
    assert same([p.grad for p in model.parameters()], backward(Model())[2:])


def test_the_list_is_what_the_operators_are_called():
    assert [str(op) for op in flamia.SAVE_OPS] == ["flamia.attention_forward.default"]
    assert all(isinstance(op, torch._ops.OpOverload) for op in flamia.SAVE_OPS)


# ---------------------------------------------------------------------------------------------------- accumulation


def parts():
    """The documents in three calls: [(rows, offsets)], one of them with two documents."""
    return [
        (slice(0, 18), torch.tensor([0, 17, 18], dtype=torch.int32)),
        (slice(18, 48), torch.tensor([0, 30], dtype=torch.int32)),
        (slice(48, 60), torch.tensor([0, 12], dtype=torch.int32)),
    ]


@pytest.mark.parametrize("recipe", ["mxfp8/strict", "mxfp8_scores/strict", "nvfp4_fp8/strict", "mxfp8/fast", "bf16"])
def test_attention_of_parts_has_the_bits_of_the_whole(recipe):
    """Each document by itself, or all in one call: O, dQ, dK and dV do not know."""
    q, k, v, do = (torch.randn(60, h, 16, generator=torch.Generator().manual_seed(h)).bfloat16() for h in (4, 2, 2, 4))

    def run(rows, cu):
        leaves = [x[rows].detach().requires_grad_() for x in (q, k, v)]
        o = flamia.attention_varlen(*leaves, cu, causal=True, recipe=recipe)
        return [o, *torch.autograd.grad(o, leaves, do[rows])]

    whole = run(slice(0, 60), CU)
    for rows, cu in parts():
        assert same(run(rows, cu), [x[rows] for x in whole])


@pytest.mark.parametrize("form", [None, "selective"])
def test_accumulated_gradients_are_those_of_the_large_batch(form):
    """Weights' gradients are sums over tokens: to float64's rounding."""
    x, model = inputs(), Model(form)
    whole = backward(Model(), x)
    model.zero_grad()
    for rows, cu in parts():
        (model(x[rows], cu) * torch.linspace(-1, 1, 32)).sum().backward()
    for p, expected in zip(model.parameters(), whole[2:], strict=True):
        assert (p.grad - expected).norm() < 1e-12 * expected.norm()
