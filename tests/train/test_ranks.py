"""FSDP2 under torchrun: the losses of one process, checkpoints for any number of ranks, and nothing lost with a rank."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from train import processes

from flamia.train.data import IGNORED, pack
from flamia.train.ranks import ALONE, Ranks, watched

SOURCE = str(Path(__file__).parents[2] / "src")


def test_two_ranks_train_as_one_does(corpus, config, tmp_path):
    """Losses to 2e-5; checkpoints bit for bit on two ranks, and good for one; a rank without documents; other options."""
    folder = tmp_path / "ranks"
    folder.mkdir()
    assert not processes.spawn(processes.several, folder, corpus, config)


def test_documents_are_dealt_whole_and_by_their_work():
    documents = [torch.arange(n, dtype=torch.uint8) for n in (200, 30, 1, 90, 90, 100)]
    batch = pack(documents)
    parts = [Ranks(rank, 3).share(batch, 32) for rank in range(3)]
    assert sorted(n for part, _ in parts for n in part.lengths) == sorted(batch.lengths)
    assert max(len(part.tokens) for part, _ in parts) == 200
    for part, predicted in parts:
        assert predicted == int((batch.targets != IGNORED).sum()) == 505
        assert part.cu_seqlens.tolist() == [0, *torch.tensor(part.lengths).cumsum(0).tolist()]
        for start, end in zip(part.cu_seqlens[:-1], part.cu_seqlens[1:]):
            assert torch.equal(part.tokens[start:end], torch.arange(end - start))
            assert torch.equal(part.positions[start:end], torch.arange(end - start))
            assert part.targets[end - 1] == IGNORED
    assert ALONE.share(batch, 32) == (batch, None)


def test_a_collective_that_fails_is_explained(tmp_path):
    lost = RuntimeError("[/pytorch/third_party/gloo/pair.cc:547] Connection closed by peer [127.0.0.1]:5")
    for words in (
        r"rank 1 of 2 stopped behind step 7.*no checkpoint yet.*--resume",
        r"all up to .*-0000005\.pt is kept",
    ):
        with pytest.raises(ValueError, match=words), watched(Ranks(1, 2), lambda: 7, tmp_path):
            raise lost
        (tmp_path / "step-0000005.pt").touch()
    for ranks, error in ((Ranks(1, 2), RuntimeError("shape mismatch")), (ALONE, lost)):
        with pytest.raises(RuntimeError), watched(ranks, lambda: 7, tmp_path):
            raise error


def torchrun(out: Path, text: Path, *launch: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *launch]
    command += ["-m", "flamia", "train", "--data", str(text), "--out", str(out), "--device", "cpu", "--threads", "1"]
    command += ["--steps", "10", "--tokens", "256", "--context", "100", "--evaluate-every", "0", "--save-every", "2"]
    environment = {**os.environ, "PYTHONPATH": SOURCE, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*command, "--resume"], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def process_of(rank: int, launcher: int) -> int:
    """The process of a rank, found among torchrun's children by its environment."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            parent = int(process.joinpath("stat").read_text().rsplit(")", 1)[1].split()[1])
            if parent == launcher and f"RANK={rank}\0" in process.joinpath("environ").read_text().replace(
                "LOCAL_RANK", ""
            ):
                return int(process.name)
        except OSError:
            continue
    raise AssertionError(f"no process of rank {rank}")


def log_of(out: Path) -> list[str]:
    log = out / "mxfp8_scores-strict/log.jsonl"
    return log.read_text().splitlines() if log.exists() else []


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds processes in /proc")
def test_a_rank_that_is_killed_costs_nothing_that_was_saved(corpus, tmp_path):
    """kill -9 in the middle of a run; torchrun starts both ranks again, and they end where an unbroken run ends."""
    text, out = Path(corpus.source), tmp_path / "killed"
    whole = torchrun(tmp_path / "whole", text)
    said = whole.communicate(timeout=200)[0]
    assert whole.returncode == 0 and said.count("curves:") == 1, said  # one rank speaks

    run, until = torchrun(out, text, "--max-restarts", "1"), time.monotonic() + 120
    while len(log_of(out)) < 4:
        assert time.monotonic() < until and run.poll() is None
        time.sleep(0.01)
    os.kill(process_of(1, run.pid), signal.SIGKILL)
    before = log_of(out)
    said = run.communicate(timeout=200)[0]
    assert run.returncode == 0, said
    assert "go on with --resume" in said and ("another rank was lost" in said or "exitcode: -9" in said), said

    first, second = ([json.loads(line) for line in log_of(folder)] for folder in (out, tmp_path / "whole"))
    assert before[:2] == log_of(out)[:2]  # seconds included: these steps were not made again
    assert [(x["step"], x["loss"]) for x in first] == [(x["step"], x["loss"]) for x in second]  # bit for bit
    summaries = [json.loads((x / "mxfp8_scores-strict/summary.json").read_text()) for x in (out, tmp_path / "whole")]
    assert summaries[0]["gap"] == summaries[1]["gap"] and len(first) == 10
    assert not list(out.glob("*/*.partial"))
