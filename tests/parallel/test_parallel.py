"""Context parallel on two and four processes: the bits of one device, and so its contracts."""

import pytest
from helpers import offsets
from parallel import ranks

from flamia.bench import parallel as bench
from flamia.integrations.parallel import ContextParallel

FOUR = ("one long document", "documents of all kinds", "fewer documents than ranks, one block", "window", "mxfp8")


def test_two_ranks_have_the_bits_of_one_device(tmp_path):
    assert not ranks.spawn(2, ranks.equal_to_one_device, tmp_path, list(ranks.CASES))


def test_four_ranks_have_the_bits_of_one_device(tmp_path):
    assert not ranks.spawn(4, ranks.equal_to_one_device, tmp_path, FOUR)


def test_what_a_call_may_be_and_may_not(tmp_path):
    """Values that are not finite, parts of a call, the wire, errors, the audit, the benchmark: see there."""
    each = (
        ranks.tokens_that_are_not_finite, ranks.parts_of_a_call, ranks.what_crosses_the_wire, ranks.errors_teach,
        ranks.audited, ranks.benchmarked,
    )  # fmt: skip
    assert not ranks.spawn(2, ranks.all_of, tmp_path, each)


def test_without_a_process_group():
    with pytest.raises(ValueError, match="start with torchrun"):
        ContextParallel(offsets([10]))


def test_the_benchmark_reads_packings_and_wants_torchrun(monkeypatch):
    assert bench.lengths("8192+2x256") == (8192, 256, 256) and bench.lengths("1x131072") == (131_072,)
    with pytest.raises(ValueError, match="write lengths such as"):
        bench.lengths("2*5")
    monkeypatch.setattr("sys.argv", ["parallel"])
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit, match="start it with torchrun"):
        bench.main()
