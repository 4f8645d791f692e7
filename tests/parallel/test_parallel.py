"""Context parallel on two and four processes: the bits of one device, and so its contracts."""

import pytest
from helpers import offsets
from parallel import ranks

from flamia.integrations.parallel import ContextParallel

FOUR = ("one long document", "documents of all kinds", "fewer documents than ranks, one block", "window", "mxfp8")


def test_two_ranks_have_the_bits_of_one_device(tmp_path):
    assert not ranks.spawn(2, ranks.equal_to_one_device, tmp_path, list(ranks.CASES))


def test_four_ranks_have_the_bits_of_one_device(tmp_path):
    assert not ranks.spawn(4, ranks.equal_to_one_device, tmp_path, FOUR)


def test_one_rank_needs_nobody(tmp_path):
    assert not ranks.spawn(1, ranks.equal_to_one_device, tmp_path, ["documents of all kinds"])


def test_what_a_call_may_be_and_may_not(tmp_path):
    """Values that are not finite, parts of a call, the wire, errors: see there."""
    each = (ranks.tokens_that_are_not_finite, ranks.parts_of_a_call, ranks.what_crosses_the_wire, ranks.errors_teach)
    assert not ranks.spawn(2, ranks.all_of, tmp_path, each)


def test_the_audit_finds_it_clean(tmp_path):
    assert not ranks.spawn(2, ranks.audited, tmp_path)


def test_without_a_process_group():
    with pytest.raises(ValueError, match="start with torchrun"):
        ContextParallel(offsets([10]))
