"""What the ranks of a test do: run in all processes of a gloo group."""

from __future__ import annotations

import traceback
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from flamia.train import Trainer
from flamia.train.data import pack
from flamia.train.ranks import Ranks

LIMIT = timedelta(seconds=100)
"""For ranks to wait for one that has failed."""


def spawn(function, folder: Path, *arguments, count: int = 2) -> list[str]:
    """Run function(ranks, folder, *arguments) on `count` ranks; returns what went wrong."""
    mp.spawn(_run, (count, function, str(folder), arguments), nprocs=count)
    return [path.read_text() for path in sorted(folder.glob("failed-*"))]


def _run(rank: int, count: int, function, folder: str, arguments: tuple) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=count, timeout=LIMIT)
    try:
        function(Ranks(rank, count), Path(folder), *arguments)
    except BaseException:
        Path(folder, f"failed-{rank}").write_text(traceback.format_exc())
    dist.barrier()
    dist.destroy_process_group()


def near(records, expected):
    for got, want in zip(records, expected, strict=True):
        for name, bound in (("loss", 2e-5), ("gradient_norm", 1e-3)):
            assert abs(got[name] - want[name]) < bound * want[name], (name, got, want)


def whole(trainer):
    """Weights and moments of a trainer, split ones put together."""
    yield from trainer.ranks.whole(trainer.model.state_dict()).values()
    for moments in trainer.ranks.whole(trainer.optimizer.state_dict())["state"].values():
        yield from moments.values()


def everything(ranks: Ranks, folder: Path, corpus, config) -> None:
    alone = Trainer(config, corpus, device="cpu")
    together = Trainer(config, corpus, device="cpu", ranks=ranks)
    split = [weight for weight in together.model.parameters() if weight.to_local().numel() < weight.numel()]
    assert len(split) > 5 and together.model.size == alone.model.size
    half, rest = ([alone.advance() for _ in range(3)] for _ in range(2))
    records = [together.advance() for _ in range(3)]
    near(records, half)
    assert abs(together.validate() - 0) > 1  # a number on every rank

    # saved by all, read by all: the same bits go on
    path = together.save(folder / "together")
    ranks.wait()
    again = Trainer(config, corpus, device="cpu", ranks=ranks)
    again.restore(folder / "together/step-0000003.pt")
    assert path.name == ("step-0000003.pt" if ranks.first else "together")
    expected = [together.advance() for _ in range(3)]
    assert [again.advance() for _ in range(3)] == expected
    near(expected, rest)
    assert all(torch.equal(x, y) for x, y in zip(whole(again), whole(together), strict=True))
    assert abs(again.judge().own - alone.judge().own) < 1e-3

    # and on another number of ranks, both ways
    one = Trainer(config, corpus, device="cpu")
    one.restore(folder / "together/step-0000003.pt")
    near([one.advance() for _ in range(3)], expected)
    start = Trainer(config, corpus, device="cpu")
    [start.advance() for _ in range(3)]
    start.save(folder / f"alone-{ranks.rank}")
    two = Trainer(config, corpus, device="cpu", ranks=ranks)
    two.restore(folder / f"alone-{ranks.rank}/step-0000003.pt")
    near([two.advance() for _ in range(3)], rest)


def a_rank_without_a_document(ranks: Ranks, folder: Path, corpus, config) -> None:
    config = replace(config, tokens=100, context=200)
    alone, together = Trainer(config, corpus, device="cpu"), Trainer(config, corpus, device="cpu", ranks=ranks)
    batch = pack([corpus.train[0][:100]])
    assert sorted(len(Ranks(rank, 2).share(batch, 32)[0].tokens) for rank in range(2)) == [0, 100]
    for trainer in (alone, together):
        trainer.stream.next = lambda: batch
    near([together.advance() for _ in range(2)], [alone.advance() for _ in range(2)])


def ranks_that_differ(ranks: Ranks, folder: Path, corpus, config) -> None:
    try:
        Trainer(replace(config, learning_rate=1e-3 * (1 + ranks.rank)), corpus, device="cpu", ranks=ranks)
    except ValueError as error:
        assert "have other options or data than rank" in str(error) and "learning_rate=0.002" in str(error)
    else:
        raise AssertionError("not refused")


def several(ranks: Ranks, folder: Path, corpus, config) -> None:
    for function in (everything, a_rank_without_a_document, ranks_that_differ):
        function(ranks, folder, corpus, config)
