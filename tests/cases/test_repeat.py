"""The same call, the same bits: again, on other thread counts, recomputed by a checkpoint.

Origins: flash-attention #1596, #2244, #1766, #1839, #1893, #2795 (a deterministic flag that was dropped on the way);
Megatron-LM #7538, TransformerEngine #1190, #1568, #415 (a recomputation in another format than the first pass).
"""

import functools

import pytest
import torch
from cases.case_inputs import RECIPES, all_same, at, run, tensors
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import flamia


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("options", [{}, {"window": (20, 0)}], ids=str)
def test_repeated_runs(recipe, options):
    given = tensors(70)
    cu = at(0, 33, 33, 70)
    first = run(*given, cu, recipe=recipe, **options)
    assert all(all_same(run(*given, cu, recipe=recipe, **options), first) for _ in range(3))


def test_twenty_backward_runs_on_changing_numbers_of_threads():
    given = tensors(70)
    first = run(*given)
    threads = torch.get_num_threads()
    try:
        for n in range(20):
            torch.set_num_threads(1 if n < 17 else 2)
            assert all_same(run(*given), first)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("deterministic", [True, False])
def test_the_deterministic_flag_promises_what_holds_anyway(deterministic):
    q, k, v, do = (x[None] for x in tensors(70))
    results = []
    for flag in (deterministic, None):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        options = {} if flag is None else {"deterministic": flag}
        o = flamia.flash_attn_func(*leaves, causal=True, **options)
        results.append([o.detach(), *torch.autograd.grad(o, leaves, do)])
    assert all_same(*results)


@pytest.mark.parametrize("recipe", ["mxfp8/strict", "mxfp8/fast", "nvfp4/fold", "mxfp8/strict,delta=compensated"])
@pytest.mark.parametrize("mode", ["reentrant", "not reentrant", "selective"])
def test_checkpointed_calls_have_the_bits_of_plain_ones(recipe, mode):
    q, k, v, do = tensors(40)
    cu = at(0, 8, 40)
    plain = run(q, k, v, do, cu, recipe=recipe)
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    options = {"use_reentrant": mode == "reentrant"}
    if mode == "selective":
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, flamia.SAVE_OPS)
    call = functools.partial(flamia.attention_varlen, cu_seqlens=cu, causal=True, recipe=recipe)
    o = checkpoint(call, *leaves, **options)
    twice = mode == "not reentrant"  # the one mode in which torch allows two backward passes over a graph
    if twice:
        o.backward(do, retain_graph=True)
        for x in leaves:
            x.grad = None
    o.backward(do)
    assert all_same([o.detach(), *(x.grad for x in leaves)], [plain.o, *plain[2:]])


def test_the_backward_keeps_the_recipe_of_its_forward():
    """Two layers with two recipes in one graph, differentiated together: each as if alone."""
    given = tensors(150)
    alone = [run(*given, recipe=recipe) for recipe in ("mxfp8/fast", "nvfp4/fast")]
    leaves = [[x.detach().clone().requires_grad_() for x in given[:3]] for _ in range(2)]
    outputs = [
        flamia.attention_varlen(*xs, at(0, 150), causal=True, recipe=recipe)
        for xs, recipe in zip(leaves, ("mxfp8/fast", "nvfp4/fast"))
    ]
    torch.autograd.backward(outputs, [given[3]] * 2)
    for xs, expected in zip(leaves, alone):
        assert all_same([x.grad for x in xs], expected[2:])
    assert not all_same(alone[0][2:], alone[1][2:])
