"""`torch.library.opcheck` on both operators, with the arguments that the public functions really give them: schema, fakes,
autograd registration, and tracing with dynamic shapes."""

import pytest
import torch

import flamia
from flamia import ops

CU = torch.tensor([0, 3, 3, 40, 44], dtype=torch.int32)  # an empty document, and a tail of two rows
CU_K = torch.tensor([0, 5, 9, 41, 50], dtype=torch.int32)
RECIPES = ["mxfp8_scores/strict", "mxfp8/fold", "mxfp8/fast", "nvfp4_fp8/strict", "nvfp4/strict", "bf16"]


class Recorder:
    """An operator that remembers what it was called with."""

    def __init__(self, operator, calls):
        self.operator, self.calls = operator, calls

    def __call__(self, *args):
        self.calls.append((self.operator, tuple(x.detach() if isinstance(x, torch.Tensor) else x for x in args)))
        return self.operator(*args)

    def __getattr__(self, name):
        return getattr(self.operator, name)


@pytest.fixture
def calls(monkeypatch):
    calls = []
    for name in ("attention_forward", "attention_backward"):
        monkeypatch.setattr(ops, name, Recorder(getattr(ops, name), calls))
    return calls


def check(calls, *operators):
    assert [operator.name() for operator, _ in calls] == [f"flamia::attention_{name}" for name in operators]
    for operator, args in calls:
        gradients = operator.name().endswith("forward")
        torch.library.opcheck(
            operator, tuple(x.requires_grad_() if gradients and i < 3 else x for i, x in enumerate(args))
        )


def inputs(dtype=torch.bfloat16, keys=46):
    generator = torch.Generator().manual_seed(0)
    shapes = ((46, 4, 16), (keys, 2, 16), (keys, 2, 8))
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipes(recipe, calls):
    flamia.attention_varlen(*inputs(), CU, causal=True, window=(9, 0), recipe=recipe).sum().backward()
    check(calls, "forward", "backward")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_lengths_of_keys_and_both_outputs(dtype, calls):
    o, lse = flamia.attention_varlen(*inputs(dtype, 52), CU, cu_seqlens_k=CU_K, return_lse=True)
    (o.float().sum() + lse[:, :3].sum()).backward()
    check(calls, "forward", "backward")


def test_clamped_offsets_and_no_gradient(calls):
    q, k, v = (x.detach() for x in inputs())
    flamia.attention_varlen(q, k, v, CU + 1, causal=True, check_offsets=False)
    check(calls, "forward")


def test_batches(calls):
    q, k, v = (x.detach()[:44].view(4, 11, *x.shape[1:]).requires_grad_() for x in inputs())
    flamia.attention(q, k, v, causal=True).sum().backward()
    check(calls, "forward", "backward")
