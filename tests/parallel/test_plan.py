"""Every token has one owner, pieces are whole blocks, and pairs are even where documents allow it."""

import random

import pytest
from helpers import documents

from flamia.integrations.parallel_plan import Piece, Plan, visible
from flamia.packing import visible_pairs


def check(plan: Plan) -> None:
    at = dict.fromkeys(range(len(plan.lengths)), 0)
    for piece in plan.pieces:
        assert piece.start == at[piece.document] < piece.end and 0 <= piece.rank < plan.ranks
        assert piece.end % plan.block == 0 or piece.end == plan.lengths[piece.document]
        at[piece.document] = piece.end
    assert list(at.values()) == list(plan.lengths)
    assert all(a.document != b.document or a.rank != b.rank for a, b in zip(plan.pieces, plan.pieces[1:]))
    assert sum(plan.tokens) == sum(plan.lengths)
    assert sum(plan.pairs) == visible_pairs(documents(plan.lengths, plan.left))


def test_every_token_has_one_owner():
    dice = random.Random(0)
    for _ in range(60):
        lengths = [int(2 ** dice.uniform(-1, 11)) for _ in range(dice.randrange(8))]
        check(Plan.of(lengths, dice.choice([1, 2, 3, 4, 8]), left=dice.choice([None, 0, 100, 1000]),
                      block=dice.choice([32, 128]), token_pairs=dice.choice([0, 500])))  # fmt: skip


@pytest.mark.parametrize("left", [None, 0, 5, 300])
def test_visible_pairs(left):
    for start, end in ((0, 1), (0, 400), (128, 256), (256, 400), (6, 6)):
        seen = sum(min(i + 1, i + 1 if left is None else left + 1) for i in range(start, end))
        assert visible(start, end, left) == seen


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("lengths", [(131_072,), (8192,) + (256,) * 224, (4096,) * 4, (1024,) * 64, (40_000, 3_000)])
@pytest.mark.parametrize("left", [None, 1000])
def test_pairs_are_even(lengths, ranks, left):
    plan = Plan.of(lengths, ranks, left=left)
    check(plan)
    assert max(plan.pairs) <= 1.04 * sum(plan.pairs) / ranks


def test_no_more_is_cut_than_balance_needs():
    assert not Plan.of([1024] * 64, 4).shared
    assert Plan.of([8192] + [256] * 224, 2).shared == {0}
    long = Plan.of([131_072], 4)
    assert all(len(long.of_rank(rank)) <= 2 for rank in range(4)) and max(long.tokens) == min(long.tokens)


def test_small_packings():
    assert Plan.of([], 2).pieces == () and Plan.of([0, 0], 2).pieces == ()
    assert Plan.of([100], 4).pieces == (Piece(0, 0, 100, 0),)  # one block cannot be shared
    assert "0 documents, 0 tokens" in str(Plan.of([], 2))
    with pytest.raises(ValueError, match="must be positive"):
        Plan.of([1], 0)


def test_tokens_may_count_too():
    lengths = [4096] + [256] * 255
    alone, both = Plan.of(lengths, 2), Plan.of(lengths, 2, token_pairs=3000)
    assert min(alone.tokens) < 5000 and min(both.tokens) > 30_000
