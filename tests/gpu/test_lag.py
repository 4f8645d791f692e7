"""The forward's reference may lag a row's maximum by 2^6, and a step that raises it takes another way through the kernel.
Rows whose scores climb over the key blocks by less and by more, to a first, a middle or a last block: near the oracle, which
has the same rule (tests/reference/test_lag.py compares it with the reference), and the same bits whatever the rows beside
them do. A key that takes all weight is in test_sums.py."""

from __future__ import annotations

import math

import pytest
import torch

if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
    pytest.skip("needs an NVIDIA Hopper GPU", allow_module_level=True)

import oracle
from calls import NAMES, error, of_document, offsets, run, same
from helpers import GROWTHS, growing

from flamia.packing import Documents

LENGTH = 669  # five blocks and a part of a sixth
CASES = [(peak, growth) for peak in ("first", "middle", "last") for growth in GROWTHS]
both = pytest.mark.parametrize("d", [64, 128])
windows = pytest.mark.parametrize("left", [None, 300], ids=["", "window"])


def pack(d: int, left: int | None):
    """A document for every case: q, k, v, dO and where they lie."""
    parts = [growing(LENGTH, growth, peak, d, seed) for seed, (peak, growth) in enumerate(CASES)]
    given = [torch.cat(xs).cuda() for xs in zip(*parts)]
    cu = offsets([LENGTH] * len(CASES))
    return given, Documents(cu, cu, left, 0)


def call(given, documents):
    return run(*given, None, documents, scale=math.log(2))


@both
@windows
def test_against_the_oracle(d, left):
    """As tight as elsewhere (test_route.py). Scores are exact here, so the LSE is as good as float32 is."""
    given, documents = pack(d, left)
    got = call(given, documents)
    want = oracle.attention(*given, documents.spans(), left, 0, math.log(2))
    wrong = []
    for case, span in zip(CASES, documents.spans()):
        pairs = zip(NAMES, of_document(got, span), of_document(want, span))
        errors = {name: error(x, y) if name != "lse" else (x - y).abs().max().item() for name, x, y in pairs}
        print(*case, {name: f"{e:.1e}" for name, e in errors.items()})
        if not (errors.pop("lse") < 1e-5 * (1 + case[1]) and max(errors.values()) < 4e-3):
            wrong.append((case, errors))
    assert not wrong, wrong


@both
@windows
def test_alone_cut_and_in_a_pack(d, left):
    given, documents = pack(d, left)
    packed = call(given, documents)
    for case, span in zip(CASES, documents.spans()):
        start, own = span[0], of_document(packed, span)
        for length in (LENGTH, 1, 300, 512, 600):
            part = Documents(offsets([length]), offsets([length]), left, 0)
            alone = call([x[start : start + length] for x in given], part)
            if length == LENGTH:
                assert same(alone, own), case
            cut = (own[0][:length], own[1][:, :length], own[2][:length])
            assert same(alone[:3], cut), (case, length)


@both
@windows
@pytest.mark.parametrize("every", [2, 3, 64])
def test_neighbours_that_raise_their_reference_or_do_not(d, left, every):
    """One row in so many keeps its queries. The others' scores become flat, climb eight times as far, or are not finite."""
    given, documents = pack(d, left)
    before = call(given, documents)
    kept = torch.arange(len(given[0]), device="cuda") % every == every // 2
    for factor in (0.0, 8.0, torch.nan):
        q = given[0].clone()
        q[~kept, :, :3] *= factor
        o, lse, dq, *_ = call([q, *given[1:]], documents)
        assert torch.equal(o[kept], before[0][kept]) and torch.equal(dq[kept], before[2][kept]), factor
        assert torch.equal(lse[:, kept], before[1][:, kept]), factor
        if factor == 8:
            assert not torch.equal(o[~kept], before[0][~kept])
