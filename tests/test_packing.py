"""Masks, blocks and positions, each against a brute-force count."""

import itertools

import pytest
import torch
from helpers import documents, offsets

from flamia.packing import Documents, query_blocks, visible_pairs

SIDES = list(itertools.product((None, 0, 5, 40, 100), (None, 0, 3, 70)))


def inside(block, span):
    return block >= span[0] and (span[1] is None or block < span[1])


@pytest.mark.parametrize("left, right", SIDES)
def test_key_and_full_blocks_are_those_of_the_dense_mask(left, right):
    block = 32
    docs = Documents(offsets([1]), offsets([1]), left, right)
    past = Documents(offsets([1]), offsets([1]), None, right)
    for qb, kb in itertools.product(range(-2, 6), range(10)):
        query, key = (torch.arange(b * block, (b + 1) * block) for b in (qb, kb))
        seen = docs.visible(query, key)
        assert inside(kb, docs.key_blocks(qb, block)) == bool(seen.any())
        assert inside(kb, docs.full_blocks(qb, block, "both")) == bool(seen.all())
        assert inside(kb, docs.full_blocks(qb, block, "right")) == bool(past.visible(query, key).all() and seen.any())
        assert docs.full_blocks(qb, block, "none") == docs.key_blocks(qb, block)


def test_visible_pairs_of_the_published_examples():
    assert visible_pairs(documents([4096] * 16)) == 134_250_496
    assert visible_pairs(documents([8192] + [256] * 224)) == 40_927_232


@pytest.mark.parametrize("left, right", SIDES)
def test_visible_pairs_are_those_of_the_dense_mask(left, right):
    queries, keys = [0, 3, 50, 7, 90], [5, 1, 20, 60, 90]
    docs = documents(queries, left, right, keys)
    dense = sum(int(docs.visible(torch.arange(a) + b - a, torch.arange(b)).sum()) for a, b in zip(queries, keys))
    assert visible_pairs(docs) == dense


def test_positions_are_counted_inside_documents_and_bottom_right():
    docs = documents([2, 0, 3, 1], key_lengths=[4, 2, 1, 1])
    document, position = docs.positions("q", 8)  # two rows behind the last document
    assert document.tolist() == [0, 0, 2, 2, 2, 3, 4, 4]
    assert position.tolist()[:6] == [2, 3, -2, -1, 0, 0]
    document, position = docs.positions("k", 8)
    assert document.tolist() == [0, 0, 0, 0, 1, 1, 2, 3]
    assert position.tolist() == [0, 1, 2, 3, 0, 1, 0, 0]


def test_query_blocks_lie_on_positions():
    assert list(query_blocks(70, 70, 32)) == [(0, 0, 32), (1, 32, 64), (2, 64, 70)]
    assert list(query_blocks(3, 100, 32)) == [(3, 0, 3)]
    assert list(query_blocks(5, 3, 32)) == [(-1, 0, 2), (0, 2, 5)]
    assert list(query_blocks(0, 5, 32)) == []
    assert list(query_blocks(4, 0, 32)) == [(-1, 0, 4)]
    for lq, lk in itertools.product(range(0, 80, 7), range(0, 80, 9)):
        rows = [r for _, a, b in query_blocks(lq, lk, 16) for r in range(a, b)]
        assert rows == list(range(lq))


def test_batched_documents():
    docs = Documents.batched(3, 5, 7, None, 0)
    assert docs.spans() == [(0, 5, 0, 7), (5, 10, 7, 14), (10, 15, 14, 21)]
