"""The studies' command: what it writes, that it goes on where it stopped, and that it keeps its time."""

import json
from dataclasses import replace

import pytest
import torch

from flamia.study import engine, run
from flamia.study.attention import Arithmetic
from flamia.study.plan import FAULTS, LEAK, TORCH, Run
from flamia.study.text import batches, read, targets
from flamia.train.data import IGNORED


@pytest.fixture
def folder(tmp_path):
    generator = torch.Generator().manual_seed(0)
    made = tmp_path / "text"
    made.mkdir()
    for index in range(60):
        words = [("query", "key", "value", "mask")[i] for i in torch.randint(4, (200,), generator=generator).tolist()]
        (made / f"{index:02}.py").write_text(" ".join(words))
    (made / "copy.py").write_text((made / "07.py").read_text())
    (made / "notes.txt").write_text("no source " * 100)
    return made


def test_text_is_cut_into_documents_and_counted_once(folder):
    text = read([folder], 128)
    assert text.facts["files"] == 60 and len(text.facts["sha256"]) == 64
    assert text.train.shape[1] == text.held_out.shape[1] == 128
    contents = {path.read_bytes() for path in folder.glob("*.py")}
    whole = sum(len(content) // 128 for content in contents)
    assert len(text.train) + len(text.held_out) == whole
    held = {bytes(row.tolist()) for row in text.held_out}
    assert not held & {bytes(row.tolist()) for row in text.train}
    assert read([folder], 128, suffix=None).facts["files"] == 61
    assert read([folder], 128).train.equal(text.train)
    with pytest.raises(ValueError, match="too little text"):
        read([folder], 10_000)


def test_batches_go_round_and_targets_stop_at_an_end():
    pieces = torch.arange(12, dtype=torch.uint8).view(3, 4)
    assert batches(pieces, 2, 2).tolist() == [[[0, 1, 2, 3], [4, 5, 6, 7]], [[8, 9, 10, 11], [0, 1, 2, 3]]]
    assert targets(pieces)[1].tolist() == [5, 6, 7, IGNORED]


def options(folder, out, *more):
    return ["--out", str(out), "--text", str(folder), "--tiny", "--device", "cpu", "--documents", "1", *more]


@pytest.fixture(autouse=True)
def no_comparison(monkeypatch):
    """The comparison with the reference is test_attention.py's; here it would take most of the time."""
    monkeypatch.setattr(run, "compare", lambda recipes, length, device: dict.fromkeys(recipes, 0.0))


def test_a_study_is_written_and_continued(folder, tmp_path):
    first, second = tmp_path / "one", tmp_path / "two"
    run.main(options(folder, first, "--studies", "leak", "--only", "bf16"))
    found = json.loads((first / "study.json").read_text())
    (bf16,) = found["runs"]
    assert bf16["name"] == "bf16" and len(bf16["loss"]) == len(bf16["gradient_norm"]) == 12
    assert bf16["loss"][-1] < bf16["loss"][0] and len(bf16["own"]) == len(bf16["exact"]) == 2
    assert set(bf16["through"]) == {r.name for r in LEAK.runs if r.seed == 0} - {"bf16", "nvfp4/strict"}
    assert bf16["own"] == pytest.approx(bf16["exact"], abs=1e-3)
    kept = torch.load(first / "activations.pt", weights_only=True)
    assert set(kept["layers"]) == {0} and kept["cu_seqlens"].tolist() == [0, 256]
    assert {name: (x.shape, x.dtype) for name, x in kept["layers"][0].items()} == dict.fromkeys(
        ("q", "k", "v", "do"), (torch.Size([256, 1, 32]), torch.bfloat16)
    )
    assert all(x.count_nonzero() for x in kept["layers"][0].values())

    more = ["--have", str(first / "study.json"), "--only", "bf16;nvfp4/fast"]
    run.main(options(folder, second, "--studies", "leak", *more))
    again = json.loads((second / "study.json").read_text())
    assert [r["name"] for r in again["runs"]] == ["bf16", "nvfp4/fast"] and again["runs"][0] == bf16
    assert len(again["sessions"]) == 2 and not (second / "activations.pt").exists()
    assert again["runs"][1]["own"] != again["runs"][1]["exact"]

    with pytest.raises(SystemExit, match="steps 12, now 20"):
        run.main(options(folder, second, "--studies", "leak", "--steps", "20", *more))
    run.main(
        options(folder, second, "--studies", "faults", "--steps", "20", "--probe", *more[:2], "--only", "mxfp8/fold")
    )
    with pytest.raises(SystemExit, match="other text"):
        (folder / "more.py").write_text("another text " * 50)
        run.main(options(folder, second, *more))


def test_faults_are_diagnosed(folder, tmp_path):
    run.main(options(folder, tmp_path, "--studies", "faults", "--only", "D from the given dO"))
    (found,) = json.loads((tmp_path / "study.json").read_text())["runs"]
    assert found["control"] == "mxfp8_scores/strict" and found["arithmetic"].endswith("exact_delta 0")
    (last,) = found["diagnostics"]
    assert last["step"] == 12 and len(last["layers"]) == 2 and last["layers"][0]["row_residual"] > 0
    assert found["validation"][0]["step"] == 12


def test_no_run_is_begun_that_would_not_end(folder, tmp_path):
    run.main(options(folder, tmp_path, "--studies", "leak", "--only", "bf16", "--seconds", "0"))
    found = json.loads((tmp_path / "study.json").read_text())
    assert found["runs"] == [] and found["sessions"][0]["not_run"] == {"leak: bf16": "no time was left"}
    more = ["--only", "bf16", "--seconds", "9", "--steps", "20000"]
    run.main(options(folder, tmp_path, "--studies", "leak", *more))
    found = json.loads((tmp_path / "study.json").read_text())
    assert found["runs"] == [] and "ms a step" in found["sessions"][0]["not_run"]["leak: bf16"]
    run.main(options(folder, tmp_path, "--studies", "leak", "--only", "bf16", "--probe"))
    found = json.loads((tmp_path / "study.json").read_text())
    assert found["runs"] == [] and "ms a step, no graph (no card)" in found["sessions"][0]["not_run"]["leak: bf16"]


def test_unknown_names_are_refused(folder, tmp_path):
    with pytest.raises(SystemExit, match="no run 'fp7'; there are"):
        run.main(options(folder, tmp_path, "--only", "fp7"))
    with pytest.raises(SystemExit, match="no study 'speed'"):
        run.main(options(folder, tmp_path, "--studies", "speed"))
    with pytest.raises(SystemExit, match="at least 8"):
        run.main(options(folder, tmp_path, "--steps", "3"))


def test_runs_from_other_weights_differ_in_the_seed_alone():
    """Names are how files and commands know a run: those of earlier files stay, and each study has its own once."""
    assert "bf16, other weights" in {r.name for r in LEAK.runs}
    for study in (LEAK, FAULTS):
        runs = {r.name: r for r in study.runs}
        assert len(runs) == len(study.runs)
        for each in study.runs:
            assert each.control is None or runs[each.control].seed == each.seed
            if each.seed:
                first = runs[each.name.rpartition(", ")[0]]
                same = {"seed": 0, "name": first.name, "through": first.through, "control": first.control}
                assert replace(each, **same) == first
    seeds = lambda attention: {r.seed for r in LEAK.runs if r.attention == attention}  # noqa: E731
    assert seeds(TORCH) == seeds("kernels") == {0, 1, 2, 3}


def test_sizes_are_a_choice_of_one():
    small = run.prepared(run.parser().parse_args(["--out", "x", "--small", "--steps", "40"]))
    assert [(s.settings.length, s.settings.steps, s.settings.shape.width) for s in small] == [(256, 40, 128)] * 2
    assert [bool(s.settings.diagnose_every) for s in small] == [False, True]
    with pytest.raises(SystemExit):
        run.parser().parse_args(["--out", "x", "--small", "--tiny"])


def test_divergence_is_a_result_and_one_failure_takes_no_other_run(folder, tmp_path, monkeypatch):
    calls = 0

    def breaking(q, k, v, cu_seqlens):
        nonlocal calls
        calls += 1
        return q * (float("nan") if calls > 8 else 1)  # two layers: the fifth step

    def attention_of(each, length):
        if each.name == "breaks":
            raise RuntimeError("no such attention")
        return breaking

    tiny = replace(
        LEAK, runs=(Run("breaks", "reference", Arithmetic.of("bf16")), Run("nan", "reference", Arithmetic.of("bf16")))
    )
    monkeypatch.setattr(run, "STUDIES", {"leak": tiny})
    monkeypatch.setattr(engine, "attention_of", attention_of)
    run.main(options(folder, tmp_path, "--studies", "leak"))
    found = json.loads((tmp_path / "study.json").read_text())
    assert found["sessions"][0]["not_run"] == {"leak: breaks": "RuntimeError: no such attention"}
    (nan,) = found["runs"]
    assert nan["diverged_at"] == 5 and len(nan["loss"]) == 5 and "own" not in nan
