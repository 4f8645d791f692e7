"""FSDP2 on two cards with NCCL: the losses of one card, and a checkpoint that both can read."""

import pytest
import torch

if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9 or torch.cuda.device_count() < 2:
    pytest.skip("needs two NVIDIA Hopper GPUs", allow_module_level=True)

import traceback
from pathlib import Path

import torch.distributed as dist
import torch.multiprocessing as mp

from flamia.train import Trainer, load_corpus, preset
from flamia.train.ranks import Ranks


def run(rank: int, folder: str) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    try:
        corpus, config, device = load_corpus(), preset("tiny", steps=6), f"cuda:{rank}"
        alone = Trainer(config, corpus, device=device)
        together = Trainer(config, corpus, device=device, ranks=Ranks(rank, 2))
        for _ in range(3):
            got, want = together.advance(), alone.advance()
            assert abs(got["loss"] - want["loss"]) < 5e-3 * want["loss"], (got, want)
        together.save(Path(folder))
        again = Trainer(config, corpus, device=device, ranks=Ranks(rank, 2))
        again.restore(Path(folder) / "step-0000003.pt")
        one = Trainer(config, corpus, device=device)
        one.restore(Path(folder) / "step-0000003.pt")
        for _ in range(3):
            got, want = again.advance(), together.advance()
            assert abs(got["loss"] - want["loss"]) < 1e-4 * want["loss"], (got, want)
            assert abs(one.advance()["loss"] - want["loss"]) < 5e-3 * want["loss"]
        assert 1 < together.validate() < 8  # nats a byte; all ranks take part
    except BaseException:
        Path(folder, f"failed-{rank}").write_text(traceback.format_exc())
    dist.barrier()
    dist.destroy_process_group()


def test_two_cards_train_as_one(tmp_path):
    mp.spawn(run, (str(tmp_path),), nprocs=2)
    assert not [path.read_text() for path in sorted(tmp_path.glob("failed-*"))]
