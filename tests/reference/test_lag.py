"""The reference of the softmax may lag its row's maximum by 2^6, and no result depends on where that maximum stands: rows whose
scores climb over the key blocks by less and by more, and keys that take all weight. tests/gpu/test_lag.py has the same for
the kernels; their oracle is compared here."""

import math

import pytest
import torch
from gpu import oracle
from helpers import GROWTHS, documents, exact_attention, growing, relative, same_bits

from flamia import reference
from flamia.recipe import Recipe
from flamia.reference.forward import row_reference, scores
from flamia.reference.problem import Problem

RECIPE = Recipe.strict("mxfp8_scores")
SCALE = math.log(2)
PEAKS = ("first", "middle", "last")
LENGTH = 600


def run(q, k, v, do, docs, recipe=RECIPE, scale=SCALE):
    o, lse, residual = reference.forward(q, k, v, docs, recipe, scale)
    return o, lse, *reference.backward(do, None, q, k, v, o, lse, residual, docs, recipe, scale)


def moves(q, k, v, docs, recipe=RECIPE) -> list[list[int]]:
    """For both heads: how often the reference of the last row moved after its first step, and the largest lag in bits."""
    *_, block = Problem(q, k, v, None, docs, recipe, SCALE).blocks()
    s = scores(block)[0, :, block.front + block.rows.stop - block.rows.start - 1]
    m = row_reference(s[:, None], recipe)[:, 0]
    lag = s.unflatten(-1, (-1, 128)).amax(-1).cummax(-1).values - m
    return [[int((m[h].diff() > 0).sum()), float(lag[h].amax())] for h in range(2)]


def test_when_a_reference_moves():
    """By the maximum of a step of 128 keys that exceeds it by more than six, and by nothing else."""
    found = {g: moves(*growing(LENGTH, g, "last")[:3], documents([LENGTH])) for g in GROWTHS}
    assert found == {
        2.0: [[0, 2.0], [0, 1.0]], 5.875: [[0, 5.875], [0, 2.9375]], 6.0: [[0, 6.0], [0, 3.0]],
        6.125: [[1, 4.59375], [0, 3.0625]], 30.0: [[4, 0.0], [2, 3.75]], 300.0: [[4, 0.0], [4, 0.0]],
    }  # fmt: skip


@pytest.mark.parametrize("peak", PEAKS)
@pytest.mark.parametrize("growth", GROWTHS)
def test_where_the_maximum_stands_changes_little(growth, peak):
    """The LSE of a reference that follows at once, O and gradients as near as two roundings of P."""
    x, docs = growing(LENGTH, growth, peak), documents([LENGTH])
    lagging, following = run(*x, docs), run(*x, docs, Recipe.strict("mxfp8_scores", lag=0))
    assert (lagging[1] - following[1]).abs().max() < 1e-6 * (1 + growth)
    for a, b in zip((lagging[0], *lagging[2:]), (following[0], *following[2:])):
        assert relative(a, b) < 2**-8


@pytest.mark.parametrize("left", [None, 300])
@pytest.mark.parametrize("growth", GROWTHS)
def test_the_oracle_of_the_card_has_the_same_rule(growth, left):
    for peak in PEAKS:
        x, docs = growing(LENGTH, growth, peak), documents([LENGTH], left)
        got = run(*x, docs)
        want = oracle.attention(*x, docs.spans(), left, 0, SCALE)
        assert (got[1] - want[1]).abs().max() < 1e-6 * (1 + growth)
        for a, b in zip((got[0], *got[2:]), (want[0], *want[2:])):
            assert relative(a, b) < 2.5e-3, (growth, peak)


@pytest.mark.parametrize("left", [None, 300])
@pytest.mark.parametrize("peak", PEAKS)
def test_bits_of_growing_rows(peak, left):
    """Alone, packed, cut, and with other rows of the block that move their references or do not."""
    lengths = (LENGTH, 77, 300)
    parts = [growing(n, g, peak, seed=n) for n, g in zip(lengths, (30.0, 6.125, 5.875), strict=True)]
    q, k, v, do = (torch.cat(xs) for xs in zip(*parts))
    whole = run(q, k, v, do, documents(lengths, left))
    start = 0
    for length, part in zip(lengths, parts):
        own = slice(start, start + length)
        alone = run(*part, documents([length], left))
        assert all(same_bits(a[:, own] if i == 1 else a[own], b) for i, (a, b) in enumerate(zip(whole, alone)))
        for cut in (1, 130, 250):
            if cut < length:
                o, lse, dq, *_ = run(*(x[:cut] for x in part), documents([cut], left))
                assert same_bits(o, alone[0][:cut]) and same_bits(dq, alone[2][:cut])
                assert same_bits(lse, alone[1][:, :cut])
        start += length
    kept = torch.arange(len(q)) % 3 == 0
    for factor in (0, 8):
        other = q.clone()
        other[~kept, :, :3] *= factor
        o, lse, dq, *_ = run(other, k, v, do, documents(lengths, left))
        assert same_bits(o[kept], whole[0][kept]) and same_bits(dq[kept], whole[2][kept])
        assert same_bits(lse[:, kept], whole[1][:, kept])


@pytest.mark.parametrize("lag", [0, 6])
@pytest.mark.parametrize("at", [0, 100, 127, 128, 200, 255, 256, 299])
def test_a_key_that_takes_all_weight_has_a_weight_of_one(at, lag):
    """Wherever it stands: its score is its row's reference, so O is V of that key, as E and D need it."""
    q, k, v, do = growing(300, 2.0, "middle", seed=at)
    recipe = Recipe.strict("mxfp8_scores", lag=lag)
    k[at, 0, 0] = 0.375  # 24 powers of two; 12 for the second head
    docs = documents([300])
    problem = Problem(q, k, v, None, docs, recipe, SCALE)
    rows = 0
    for block in problem.blocks():
        s = scores(block)[0]
        m = row_reference(s, recipe).repeat_interleave(128, -1)
        sees = block.visible[:, at] if at < block.keys else block.visible[:, :0].any(-1)
        if sees.any():
            assert (s[:, sees, at] == m[:, sees, at]).all() and (s[:, sees].amax(-1) == m[:, sees, -1]).all()
            rows += int(sees.sum())
    assert rows == 300 - at
    o = run(q, k, v, do, docs, recipe)[0]
    assert (o[at:, 0].double() - problem.encoded("o_v", "e4m3:token").values[at]).abs().max() < 2**-12


def test_a_sink_in_a_middle_block(monkeypatch):
    """A key that takes 0.9995 of every row that sees it: gradients of those rows are nearly nothing, and as far off as those
    of 16-bit attention. Were its P not one exactly, they would be far off."""
    length, dim, at = 600, 128, 290
    generator = torch.Generator().manual_seed(0)
    q, k, v, do = (torch.randn(length, 1, dim, generator=generator) for _ in range(4))
    sign = torch.randn(dim, generator=generator).sign()
    k[at, 0], q[at:] = 4 * sign, q[at:] + 0.65 * sign
    x, docs = [y.bfloat16() for y in (q, k, v, do)], documents([length])
    _, lse, dq, *_ = exact_attention(*x, None, docs, dim**-0.5)
    weight = (x[0][at:, 0].double() @ x[1][at, 0].double() * dim**-0.5 - lse[0, at:]).exp()
    assert weight.min() > 0.9995

    def off(recipe):
        return relative(run(*x, docs, recipe, dim**-0.5)[2][at:], dq[at:])

    own, sixteen = off(RECIPE), off(Recipe.bf16())
    assert own < 1.05 * sixteen
    module = reference.forward.__globals__
    rule = module["row_reference"]
    monkeypatch.setitem(module, "row_reference", lambda *given: rule(*given) - math.log2(1.0038))  # rounds to 1
    assert off(RECIPE) > 3 * own
