"""The loop: runs resume bit for bit, recipes see the same data, a cheat is found out, divergence is a result."""

import json
import math
from dataclasses import replace

import pytest
import torch

from flamia.train import Trainer, load_corpus, train
from flamia.train.checkpoint import list_all
from flamia.train.evaluate import gap, judge_checkpoint
from flamia.train.loop import read_log


def state_of(trainer):
    yield from trainer.model.state_dict().values()
    for moments in trainer.optimizer.state_dict()["state"].values():
        yield from moments.values()


def test_stopping_and_resuming_changes_no_bit(corpus, config, tmp_path):
    straight, first = (Trainer(config, corpus, device="cpu") for _ in range(2))
    expected = [straight.advance() for _ in range(6)]
    records = [first.advance() for _ in range(3)]
    path = first.save(tmp_path)
    resumed = Trainer(config, corpus, device="cpu")
    resumed.restore(path)
    records += [resumed.advance() for _ in range(3)]
    assert records == expected
    pairs = list(zip(state_of(resumed), state_of(straight), strict=True))
    assert len(pairs) > 20 and all(torch.equal(a, b) for a, b in pairs)


def test_a_run_that_was_killed_goes_on_from_its_last_checkpoint(corpus, config, tmp_path):
    config = replace(config, save_every=2)
    whole = train(config, corpus, tmp_path / "whole", device="cpu")

    def kill(record):
        if record["step"] == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(config, corpus, tmp_path / "killed", device="cpu", on_step=kill)
    assert [path.name for path in list_all(tmp_path / "killed")] == ["step-0000002.pt", "step-0000004.pt"]
    assert read_log(tmp_path / "killed/log.jsonl")[-1]["step"] == 5
    again = train(config, corpus, tmp_path / "killed", device="cpu", resume=True)

    def without_time(records):
        return [{key: value for key, value in record.items() if key != "seconds"} for record in records]

    assert without_time(again.records) == without_time(whole.records)
    assert without_time(read_log(tmp_path / "killed/log.jsonl")) == without_time(whole.records)
    assert again.gap == whole.gap


def test_the_log_and_the_summary_say_what_happened(corpus, config, tmp_path):
    run = train(config, corpus, tmp_path, device="cpu")
    records = read_log(tmp_path / "log.jsonl")
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5, 6]
    assert [record["step"] for record in records if "validation" in record] == [3, 6]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["steps"] == 6 and summary["recipe"] == "mxfp8/strict" and summary["diverged_at"] is None
    assert summary["gap"]["own"] == run.gap.own == records[-1]["validation"]


def test_every_recipe_sees_the_same_batches_in_the_same_order(corpus, config, no_attention):
    seen = {}
    for recipe in ("mxfp8/strict", "mxfp8/fast", "bf16"):
        batches = seen[recipe] = []

        def watch(q, k, v, cu_seqlens, batches=batches):
            batches.append(cu_seqlens.tolist())
            return torch.zeros_like(q)

        train(replace(config, recipe=recipe), corpus, device="cpu", attend=watch, exact=no_attention)
    assert seen["mxfp8/strict"] == seen["mxfp8/fast"] == seen["bf16"] and len(seen["bf16"]) > 6


@pytest.mark.parametrize("recipe", ["mxfp8/strict", "bf16"])
def test_it_learns(corpus, config, recipe):
    config = replace(config, recipe=recipe, steps=40, learning_rate=1e-2, evaluate_every=0)
    run = train(config, corpus, device="cpu")
    assert run.records[0]["loss"] > 5.4
    assert run.gap.exact < 3.0 and run.gap.own < 3.0


def test_the_gap_finds_a_model_that_reads_the_future(config, tmp_path):
    """On random bytes nobody can predict anything; an attention that shows the next token seems to."""
    noise = torch.randint(256, (40_000,), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    (tmp_path / "noise.txt").write_bytes(bytes(noise.tolist()))
    corpus = load_corpus(tmp_path / "noise.txt")

    def cheat(q, k, v, cu_seqlens):
        return v.roll(-1, 0).repeat_interleave(q.shape[1] // v.shape[1], 1)

    def honest(q, k, v, cu_seqlens):
        return v.repeat_interleave(q.shape[1] // v.shape[1], 1)

    config = replace(config, steps=150, learning_rate=2e-2, evaluate_every=0)
    run = train(config, corpus, device="cpu", attend=cheat, exact=honest)
    guessing = math.log(256)
    assert run.gap.own < 0.5 * guessing < guessing < run.gap.exact
    assert run.gap.difference < -20 * run.gap.standard_error < 0


def test_the_gap_of_an_attention_to_itself_is_zero(corpus, config):
    trainer = Trainer(config, corpus, device="cpu")
    found = gap(trainer.model, trainer.validation, trainer.attend, trainer.attend)
    assert (found.difference, found.standard_error, found.batches) == (0.0, 0.0, 2)


def test_divergence_ends_the_run_and_is_reported(corpus, config, no_attention, tmp_path):
    calls = []

    def breaks(q, k, v, cu_seqlens):
        calls.append(1)
        return torch.full_like(q, math.nan) if len(calls) == 2 else torch.zeros_like(q)

    run = train(config, corpus, tmp_path, device="cpu", attend=breaks, exact=no_attention)
    assert run.diverged_at == 2 and len(run.records) == 2 and run.gap is None
    assert json.loads((tmp_path / "summary.json").read_text())["diverged_at"] == 2
    assert list_all(tmp_path) == []


def test_a_checkpoint_is_judged_through_two_attentions(corpus, config, tmp_path):
    run = train(config, corpus, tmp_path / "run", device="cpu")
    path = list_all(tmp_path / "run")[-1]
    recipe, found = judge_checkpoint(path, corpus, batches=2, device="cpu")
    assert recipe == "mxfp8/strict" and found == run.gap
    recipe, found = judge_checkpoint(path, corpus, recipe="bf16", batches=2, device="cpu")
    assert found.difference == 0 and found.exact == run.gap.exact


@pytest.mark.parametrize("change", [{"recipe": "bf16"}, {"steps": 7}, {"seed": 1}])
def test_a_run_does_not_continue_as_another(corpus, config, no_attention, tmp_path, change):
    trainer = Trainer(config, corpus, device="cpu", attend=no_attention)
    path = trainer.save(tmp_path)
    name, value = next(iter(change.items()))
    with pytest.raises(ValueError, match=f"with {name} = .*this run has {value!r}"):
        Trainer(replace(config, **change), corpus, device="cpu", attend=no_attention).restore(path)


def test_a_run_does_not_continue_on_other_data(corpus, config, no_attention, tmp_path):
    path = Trainer(config, corpus, device="cpu", attend=no_attention).save(tmp_path)
    (tmp_path / "text/99.txt").write_text("one more file")
    with pytest.raises(ValueError, match="other data"):
        Trainer(config, load_corpus(tmp_path / "text"), device="cpu", attend=no_attention).restore(path)


def test_a_run_begun_anew_keeps_nothing_of_a_longer_one(corpus, config, tmp_path):
    train(config, corpus, tmp_path, device="cpu")
    train(replace(config, steps=3), corpus, tmp_path, device="cpu")
    assert [path.name for path in list_all(tmp_path)] == ["step-0000003.pt"]
    assert read_log(tmp_path / "log.jsonl")[-1]["step"] == 3
