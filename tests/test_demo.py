"""The demo: the probe on real text finds what leaks and nothing else, tasks run in processes, the page stands alone."""

import json
import re
from dataclasses import replace

import pytest
import torch

pytest.importorskip("jinja2")
pytest.importorskip("matplotlib")

from flamia.accuracy import measure_all
from flamia.audit import audit_recipes
from flamia.audit.recipes import MASKS
from flamia.demo import Demo, render, tasks, text
from flamia.demo.run import work
from flamia.recipe import CONTROLS
from flamia.train import Decoder, Run, Shape, Trainer, load_corpus, preset

SHAPE = Shape(layers=2, width=64, heads=2, kv_heads=1, head_dim=32, hidden=64)


@pytest.fixture(scope="module")
def corpus():
    return load_corpus()


@pytest.fixture(scope="module")
def model():
    return Decoder(SHAPE, seed=1)


@pytest.mark.parametrize("recipe", ["mxfp8/strict", "mxfp8/fold", "nvfp4/strict", "mxfp8_scores", "bf16"])
def test_no_prediction_moves_when_later_text_changes(model, corpus, recipe):
    found = text.read_ahead(model, corpus, recipe, cuts=(5, 77, 150, 203))
    assert (found.moved, found.largest, found.crosses_documents) == (0, 0.0, False)
    assert found.watched == 4 * text.BEFORE + 5 + 77 + 150 + 203


@pytest.mark.parametrize("recipe", ["nvfp4/fast", str(CONTROLS["v_stripes_floor"])])
def test_a_shared_scale_shows_on_real_text_inside_its_group_alone(model, corpus, recipe):
    cuts = tuple(range(5, text.LENGTH, 18))
    found = text.read_ahead(model, corpus, recipe, cuts=cuts)
    assert found.moved > 0 and found.largest > 0 and not found.crosses_documents
    for cut, row in zip(cuts, found.change):
        first = int((row > 0).nonzero()[0]) - text.BEFORE if bool((row > 0).any()) else cut
        # One group back in the first layer; in the second the moved rows of that group move no earlier ones.
        assert first >= cut // 32 * 32


def test_a_statistic_of_the_call_crosses_documents(model, corpus):
    found = text.read_ahead(model, corpus, str(CONTROLS["k_centered_call"]), cuts=(50, 150))
    assert found.crosses_documents and found.moved > 100


def test_the_cuts_fall_inside_groups_and_on_every_residue():
    assert {cut % 16 for cut in text.CUTS} == set(range(16)) and max(text.CUTS) < text.LENGTH


def test_tasks_run_in_processes_and_one_may_follow_another():
    measure = (tasks.measure_accuracy, {"tokens": 24, "names": ("bf16/strict",)})
    results = work({"first": measure}, {"first": lambda: {"second": measure}}, processes=2)
    assert list(results) == ["first", "second"]
    (first, _), (second, _) = results.values()
    assert first == second and [found.inputs for found in first][:2] == ["gaussian", "peaked"]


def test_a_task_that_fails_ends_the_work_with_its_own_error():
    with pytest.raises(ValueError, match="'uniform'"):
        work({"bad": (tasks.explain_leaks, {"names": ("uniform",)})}, {}, processes=1)


@pytest.fixture(scope="module")
def demo(model, corpus):
    torch.set_num_threads(1)
    runs = []
    for recipe in tasks.TRAINED:
        config = replace(preset("tiny", recipe=recipe, steps=3, tokens=128, evaluate_batches=2), shape=SHAPE)
        trainer = Trainer(config, corpus, device="cpu")
        records = [trainer.advance() for _ in range(2)]
        runs.append(Run(config, records, trainer.judge(), 1.5, trainer.model.size))
    runs[0] = replace(runs[0], gap=None, diverged_at=2)
    return Demo(
        audit=audit_recipes(["mxfp8/strict"], masks=MASKS[:1], controls=False, effort="spot"),
        explained=tasks.explain_leaks(lambda *_: None, ("v_stripes_floor",)),
        runs=runs,
        text=[("strict", text.read_ahead(model, corpus, "mxfp8/strict", cuts=(5, 100)))],
        accuracy=list(measure_all(("bf16", "mxfp8/strict"), ("gaussian",), tokens=40, head_dim=16)),
        data=str(corpus),
        tokens=40,
        seconds={"audit": 1.0, "total": 2.0},
    )


def test_the_page_stands_alone_and_says_what_was_found(demo):
    page = render(demo)
    assert not re.search(r"""(src|href)=["'](?!data:|#)""", page), "the page must need nothing beside it"
    assert page.count("data:image/png;base64,") == 3 and "<svg" in page
    for said in ("mxfp8/strict", "groups of 32", "diverged at step 2", "0 of 195", "gaussian", torch.__version__):
        assert said in page
    assert "{{" not in page and "{%" not in page


def test_the_summary_is_json_and_the_exit_code_is_the_audits(demo):
    found = json.loads(json.dumps(demo.summary()))
    assert found["exit_code"] == demo.audit.exit_code == demo.exit_code
    assert found["text"]["strict"] == {"moved": 0, "watched": 195, "largest": 0.0}
    assert [run["recipe"] for run in found["runs"]] == list(tasks.TRAINED) and found["runs"][0]["diverged_at"] == 2
