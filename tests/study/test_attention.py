"""Folding documents into heads, and taking short cuts through the reference, changes no bit of it."""

import os
import subprocess
import sys

import pytest
import torch

import flamia
from flamia import quantize
from flamia.reference import weights
from flamia.reference.problem import Block
from flamia.study.attention import Arithmetic, Call, dense, folded, sunk
from flamia.study.plan import STUDIES, TORCH
from flamia.study.quick import quick

LENGTH = 256
RECIPES = sorted({str(r.arithmetic.forward) for s in STUDIES.values() for r in s.runs})


def inputs(documents=2, heads=2, kv_heads=1, dim=32, seed=0, powers=6):
    generator = torch.Generator().manual_seed(seed)
    shapes = (heads, kv_heads, kv_heads, heads)
    size = torch.exp2(torch.randint(-powers, powers + 1, (documents * LENGTH, 1, 1), generator=generator).float())
    return [(torch.randn(documents * LENGTH, h, dim, generator=generator) * size).bfloat16() for h in shapes]


def offsets(documents=2):
    return torch.arange(documents + 1, dtype=torch.int32) * LENGTH


def through(attend, q, k, v, do, cu):
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    o = attend(*leaves, cu)
    return [o.detach(), *torch.autograd.grad(o, leaves, do)]


@pytest.mark.parametrize("recipe", [*RECIPES, "nvfp4_fp8/fold", "mxfp8/strict,delta=compensated,u_range=running"])
def test_folded_attention_has_the_bits_of_the_library(recipe):
    q, k, v, do = inputs()

    def library(q, k, v, cu):
        return flamia.attention_varlen(q, k, v, cu, causal=True, recipe=recipe, backend="reference")

    expected = through(library, q, k, v, do, offsets())
    found = through(folded(Arithmetic.of(recipe), LENGTH), q, k, v, do, offsets())
    assert all(torch.equal(a, b) and a.count_nonzero() for a, b in zip(found, expected))


def test_short_cuts_are_taken_back():
    before = (Block.queries, Block.key_side, quantize._over_tokens, quantize._nvfp4, weights.round_to)
    with quick():
        assert Block.queries is not before[0]
    assert (Block.queries, Block.key_side, quantize._over_tokens, quantize._nvfp4, weights.round_to) == before


def test_lengths_that_do_not_fit_are_refused():
    q, k, v, _ = inputs()
    with pytest.raises(ValueError, match="multiple of the recipe's blocks of 128"):
        folded(Arithmetic.of("mxfp8/fold"), 200)
    with pytest.raises(ValueError, match="documents of 256"):
        folded(Arithmetic.of("mxfp8/fold"), LENGTH)(q[:300], k[:300], v[:300], offsets())
    with pytest.raises(ValueError, match="whole call"):
        folded(Arithmetic.of("mxfp8_scores,center_k=call"), LENGTH)


def test_torch_attention_is_near_the_exact_one():
    q, k, v, do = inputs()
    q = (q.float() / 64).bfloat16()
    found, expected = (
        through(a, q, k, v, do, offsets()) for a in (dense(LENGTH), folded(Arithmetic.of("bf16"), LENGTH))
    )
    assert all((a - b).double().norm() < 0.02 * b.double().norm() for a, b in zip(found, expected))


def test_a_sink_takes_what_it_was_given():
    q, k, v, _ = inputs()
    q, k = torch.zeros_like(q), torch.zeros_like(k)
    q, k = sunk(q, k, LENGTH, 8.0)
    v = torch.zeros_like(v)
    v[::LENGTH] = 1.0
    o = folded(Arithmetic.of("bf16"), LENGTH)(q, k, v, offsets())
    expected = 2.718281828**8 / (2.718281828**8 + LENGTH - 1)
    assert o[LENGTH - 1].float().mean().item() == pytest.approx(expected, rel=0.02)
    assert o[LENGTH - 1].equal(o[2 * LENGTH - 1])


def shares(arithmetic, tensors):
    diagnostics = {}
    q, k, v, do = tensors
    gradients = Call(arithmetic, q, k, v, LENGTH).backward(do, diagnostics)
    return diagnostics, gradients


def test_coarse_scales_zero_more_of_u_and_chance_zeroes_as_much():
    tensors = inputs(powers=0)
    torch.manual_seed(0)
    plain, coarse, random = (
        shares(Arithmetic.of("mxfp8/fold", fault=fault), tensors)[0]
        for fault in (None, ("coarse_u", 12), ("random_u", 12))
    )
    for side in ("u_zeroed_dq", "u_zeroed_dk"):
        assert plain[side] < 0.02 and coarse[side] > 0.1
        assert random[side] == pytest.approx(coarse[side], rel=0.05)


def test_a_fault_of_d_moves_dq_and_dk_alone():
    tensors = inputs()
    plain, wrong = (shares(Arithmetic.of("mxfp8/fold", fault=f), tensors)[1] for f in (None, ("exact_delta", 0)))
    assert [torch.equal(a, b) for a, b in zip(plain, wrong)] == [False, False, True]
    again = shares(Arithmetic.of("mxfp8/fold"), tensors)[1]
    assert all(torch.equal(a, b) for a, b in zip(plain, again))


def test_forward_and_backward_may_differ():
    q, k, v, do = inputs()
    exact, approximate = "bf16/strict", "bf16/strict,exp2=mitchell"
    both = {}
    for name, pair in {"forward": (approximate, exact), "both": (approximate,), "none": (exact,)}.items():
        call = Call(Arithmetic.of(*pair), q, k, v, LENGTH)
        both[name] = (call.output(), *call.backward(do))
    assert torch.equal(both["forward"][0], both["both"][0]) and not torch.equal(both["forward"][0], both["none"][0])
    assert not torch.equal(both["forward"][3], both["both"][3])
    blocks = Arithmetic.of("mxfp8/fold,frontier_block=256", "mxfp8/fold")
    assert not blocks.shares and str(blocks) == "mxfp8/fold,frontier_block=256; backward mxfp8/fold"


def test_the_plan_is_runnable_as_written():
    for study in STUDIES.values():
        names = [run.name for run in study.runs]
        assert len(set(names)) == len(names)
        for run in study.runs:
            assert run.control is None or run.control in names
            if run.attention != TORCH:
                folded(run.arithmetic, study.settings.length)


def test_the_rounding_kernel_rounds_as_the_reference_does():
    pytest.importorskip("triton")
    program = """
import torch
from flamia.formats import E2M1, E4M3, round_to
from flamia.study.rounding import rounded
generator = torch.Generator().manual_seed(0)
powers = torch.exp2(torch.randint(-14, 12, (3000,), generator=generator).double())
inf, nan = float("inf"), float("nan")
edges = [0.0, -0.0, 448, 464, 449, 6, 5, 7, 2.5, nan, inf, -inf, 1e-300, 5e-324, 2.0**-10, 3 * 2.0**-10, -(2.0**-10)]
x = torch.cat([torch.randn(3000, dtype=torch.float64, generator=generator) * powers, torch.tensor(edges).double()])
bits = lambda x: torch.where(x.isnan(), 7.5, x).view(torch.int64)
for fmt in (E4M3, E2M1):
    assert torch.equal(bits(rounded(x, fmt)), bits(round_to(x, fmt)))
y = x[:3000].view(30, 100)
for z in (y.t(), y[:, ::2], y[:1].expand(7, 100), y[:, 3:40], y[:0]):
    assert torch.equal(rounded(z, E4M3), round_to(z, E4M3))
"""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
