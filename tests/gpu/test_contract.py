"""The contract on the card, bit for bit: a document alone, packed, moved, cut; what a row cannot see; repeatability; memory
that was somebody else's. And 200 random packings, each against the oracle and one of its documents alone."""

from __future__ import annotations

import random
from contextlib import contextmanager

import pytest
import torch

if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
    pytest.skip("needs an NVIDIA Hopper GPU", allow_module_level=True)

import oracle
from calls import NAMES, bits, draw, error, make, of_document, offsets, run, run_alone, same

from flamia.packing import Documents

PACKED = ["short", "grouped", "window", "two-sided window", "more keys", "more queries, window"]


@pytest.mark.parametrize("case", PACKED)
def test_alone_equals_packed(case):
    """Every document gives the same bits alone, at offset zero, as in the pack."""
    q, k, v, do, dlse, documents = make(case)
    packed = run(q, k, v, do, dlse, documents)
    for span in documents.spans():
        if span[0] < span[1] and span[2] < span[3]:
            assert same(run_alone(q, k, v, do, dlse, documents, span), of_document(packed, span)), span


@pytest.mark.parametrize("shift", [1, 7, 64, 129])
@pytest.mark.parametrize("case", ["long", "window"])
def test_moved(case, shift):
    """Another document in front, of any length: the same bits at another address, another padded row, another place in
    the lists."""
    q, k, v, do, dlse, documents = make(case, tail=0)
    other = draw(shift, shift, (q.shape[1], k.shape[1]), q.shape[2], seed=5)
    front = [torch.cat([x, y]) for x, y in zip(other, (q, k, v, do))]
    lengths = documents.cu_q.diff().tolist()
    moved = Documents(offsets([shift, *lengths]), offsets([shift, *lengths]), documents.left, documents.right)
    got = run(*front, torch.cat([other[4], dlse], 1), moved)
    span = (shift, shift + len(q), shift, shift + len(k))
    assert same(of_document(got, span), run(q, k, v, do, dlse, documents))


@pytest.mark.parametrize("case", ["long", "window"])
@pytest.mark.parametrize("cut", [1, 100, 128, 391, 640])
def test_prefix_and_truncation(case, cut):
    """Changing or cutting what comes after a position leaves O, LSE and dQ up to it alone."""
    q, k, v, do, dlse, documents = make(case, tail=0)
    end = documents.spans()[0][1]
    whole = run(q, k, v, do, dlse, documents)
    short = run_alone(q, k, v, do, dlse, documents, (0, cut, 0, cut))
    kept = [(short[0], short[1], short[2])]
    for value in (2.0**20, 2.0**126, torch.nan, -torch.inf):
        other = [x.clone() for x in (q, k, v, do)]
        for x in other:
            x[cut:end] = torch.randn_like(x[cut:end]) * value
        changed = run(*other, dlse, documents)
        kept.append((changed[0][:cut], changed[1][:, :cut], changed[2][:cut]))
        second = documents.spans()[1]
        assert same(of_document(changed, second), of_document(whole, second)), "another document saw it"
    for o, lse, dq in kept:
        assert torch.equal(o, whole[0][:cut])
        assert torch.equal(lse, whole[1][:, :cut])
        assert torch.equal(dq, whole[2][:cut])


@pytest.mark.parametrize("value", [2.0**126, torch.nan, torch.inf])
@pytest.mark.parametrize("position", [330, 511, 640])
def test_behind_a_window(position, value):
    """Tokens that have left the window: rows from `position` on keep O and dQ, and the keys that only such rows see keep
    dK and dV."""
    q, k, v, do, dlse, documents = make("window", tail=0)
    whole = run(q, k, v, do, dlse, documents)
    gone = position - documents.left
    other = [x.clone() for x in (q, k, v, do)]
    for x in other:
        x[:gone] = value
    o, lse, dq, dk, dv = run(*other, dlse, documents)
    assert torch.equal(o[position:], whole[0][position:]) and torch.equal(dq[position:], whole[2][position:])
    assert torch.equal(lse[:, position:], whole[1][:, position:])
    assert torch.equal(dk[position:], whole[3][position:]) and torch.equal(dv[position:], whole[4][position:])
    assert not torch.equal(bits(dk[:gone]), bits(whole[3][:gone]))


@pytest.mark.parametrize("case", ["short", "grouped", "window", "small heads"])
def test_twenty_runs(case):
    given = make(case)
    first = run(*given)
    for _ in range(19):
        assert same(run(*given), first)


@contextmanager
def poisoned():
    """What is allocated here holds NaN in floating point, and the largest number in integers, until it is written."""
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(1000, device="cuda").isnan().all()
        assert (torch.empty(1000, device="cuda", dtype=torch.uint8) == 255).all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("case", [*PACKED, "one", "small heads"])
def test_poisoned_memory(case):
    """Nothing reads what nobody has written: fresh memory full of NaN changes no bit, the rows behind the last document
    included."""
    given = make(case, tail=150)
    clean = run(*given)
    with poisoned():
        assert same(run(*given), clean)
    assert not any(x.isnan().any() for x in clean)


def random_packing(seed: int):
    draw_from = random.Random(seed)
    heads = draw_from.choice([(2, 2), (4, 2), (3, 1)])
    d = draw_from.choice([64, 128])
    lengths = [draw_from.randint(40, 300)]  # one that is long enough for errors to be measured against
    lengths += [
        draw_from.choice([0, 1, 2, 31, 127, 128, 129, draw_from.randint(1, 260)])
        for _ in range(draw_from.randint(0, 6))
    ]
    keys = [n + draw_from.randint(0, 150) for n in lengths] if draw_from.random() < 0.25 else lengths
    order = draw_from.sample(range(len(lengths)), len(lengths))
    lengths, keys = [lengths[i] for i in order], [keys[i] for i in order]
    left = draw_from.choice([None, None, 5, draw_from.randint(3, 300)])
    right = draw_from.choice([None, 0, 0, draw_from.randint(1, 200)])
    tail = draw_from.choice([0, 1, 140])
    documents = Documents(offsets(lengths), offsets(keys), left, right)
    given = draw(sum(lengths) + tail, sum(keys) + tail, heads, d, seed)
    return given, documents, f"seed {seed}: {lengths} / {keys}, heads {heads}, D {d}, window {left}, {right}"


# Where a narrow window leaves a row few weights, one number that rounds the other way moves dQ by more than a step of BF16;
# a row or a mask that is wrong moves it by some tenths.
LIMIT = 1e-2


@pytest.mark.slow
def test_two_hundred_random_packings():
    wrong = []
    for seed in range(200):
        (q, k, v, do, dlse), documents, text = random_packing(seed)
        dlse = dlse if seed % 2 else None
        spans = documents.spans()
        got = run(q, k, v, do, dlse, documents)
        scale = q.shape[-1] ** -0.5
        want = oracle.attention(q, k, v, do, spans, documents.left, documents.right, scale, dlse)
        alive = want[1] > -torch.inf
        errors = {name: error(g, w) for name, g, w in zip(NAMES, got, want) if name != "lse"}
        if not torch.equal(got[1] > -torch.inf, alive) or (got[1].double() - want[1])[alive].abs().max() > 2e-3:
            errors["lse"] = 1.0
        span = spans[seed % len(spans)]
        if span[0] < span[1] and span[2] < span[3]:
            alone = run_alone(q, k, v, do, dlse, documents, span)
            errors |= {
                f"{n} alone": 1.0 for n, a, b in zip(NAMES, alone, of_document(got, span)) if not torch.equal(a, b)
            }
        errors = {name: e for name, e in errors.items() if not e < LIMIT}
        if errors:
            wrong.append(f"{text}: {errors}")
    assert not wrong, "\n".join(wrong)
