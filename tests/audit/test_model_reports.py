"""Audits of models: reports read back, refusals that teach, what hooks write down, and the command line."""

import io
import json

import pytest
import torch
from audit.small_models import Small, by_sequence
from rich.console import Console
from torch import nn

import flamia
from flamia.audit import MODEL_CONTRACTS, audit_model
from flamia.audit.trace import Trace, by_position, digest, first_moves

BRIEF = {"effort": "brief"}


def test_reports_say_all_of_it(tmp_path):
    report = audit_model(Small(None, by_sequence), name="small", **BRIEF)
    got = json.loads(report.to_json(tmp_path / "a.json"))
    assert json.loads((tmp_path / "a.json").read_text()) == got
    assert (got["schema"], got["kind"], got["verdict"], got["exit_code"]) == (1, "model", "leak", 1)
    assert set(got["statuses"]) == set(MODEL_CONTRACTS) and got["target"]["name"] == "small"
    assert got["origin"]["module"] == "layers.1" and got["group"] == 32
    assert sum(t["moved"] for t in got["tried"]) == len(got["findings"]) > 0
    out = io.StringIO()
    Console(width=160, file=out).print(report)
    assert "small: leak" in out.getvalue() and "it enters in layers.1 (Attention)" in out.getvalue()
    assert str(report).startswith("small: LEAK")


@pytest.mark.parametrize(
    "options,reason",
    [
        ({"effort": "heroic"}, "allowed are spot, brief"),
        ({"claims": ("mass",)}, "contracts of a model"),
        ({"mode": "train"}, "'as_is'"),
        ({"step": 3}, "(tokens, cache) -> (logits, cache)"),
        ({"length": 2}, "at least 4 tokens"),
        ({"cuts": (0, 75)}, "strictly inside"),
    ],
)
def test_refusals_teach(options, reason):
    with pytest.raises(ValueError) as said:
        audit_model(Small(None), **({"effort": "brief"} | options))
    assert reason in str(said.value)


def test_what_cannot_be_a_model_is_refused():
    with pytest.raises(ValueError, match="cannot be called"):
        audit_model(3)
    with pytest.raises(ValueError, match=r"logits \(B, T, V\) are needed"):
        audit_model(lambda tokens: tokens.float(), vocabulary=9)
    with pytest.raises(ValueError, match="vocabulary= is needed"):
        audit_model(lambda tokens: tokens.float())
    short = Small(None)
    short.register_forward_pre_hook(lambda m, args: None if args[0].shape[1] < 50 else 1 / 0)
    with pytest.raises(ZeroDivisionError):  # a bug of the model stays one
        audit_model(short)


def test_a_model_that_takes_short_sequences_only_is_audited_there():
    model = Small(None)

    def limited(tokens):
        if tokens.shape[1] > 40:
            raise ValueError("40 tokens at most")
        return model(tokens)

    report = audit_model(limited, **BRIEF)
    assert report.target["tokens"] == 33 and report.verdict == "clean"
    with pytest.raises(ValueError, match="40 tokens at most"):
        audit_model(limited, length=41, **BRIEF)


def test_positions_are_read_off_shapes():
    x = torch.arange(2 * 5 * 3).view(2, 5, 3)
    assert by_position(x, 2, 5).shape == (2, 5, 3) and by_position(x.flatten(0, 1), 2, 5).shape == (2, 5, 3)
    assert torch.equal(by_position(x.mT, 2, 5), x) and by_position(x, 3, 5) is None
    assert by_position(torch.zeros(()), 2, 5) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.float8_e4m3fn, torch.int64])
def test_digests_tell_positions_that_differ_in_one_bit(dtype):
    x = torch.arange(1, 2 * 7 * 4 + 1).view(2, 7, 4).to(dtype)
    y = x.clone()
    y[1, 3, 2] = y[1, 3, 2].float() * (1 if dtype == torch.int64 else 1.125) + (dtype == torch.int64)
    differ = digest(x, 2, 7, 7) != digest(y, 2, 7, 7)
    assert differ.nonzero().tolist() == [[1, 3]]
    if dtype == torch.float32:
        x[0, 0], y[0, 0] = torch.tensor([0.0, torch.nan, 1.0, 1.0]), torch.tensor([-0.0, -torch.nan, 1.0, 1.0])
        assert not bool((digest(x, 2, 7, 7) != digest(y, 2, 7, 7))[0, 0])


def test_scores_behind_the_cut_are_nobodys_business():
    """A module may give unmasked scores: its earlier rows hold later columns, by right."""
    scores = nn.Module()
    scores.forward = lambda x: x @ x.mT
    x = torch.randn(2, 6, 3)
    y = x.clone()
    y[1, 4:] = 0
    with Trace(scores, 2, 6, 4) as before:
        scores(x)
    with Trace(scores, 2, 6, 4) as after:
        scores(y)
    assert first_moves(before, after, 1, 4) == (None, None)
    assert first_moves(before, after, 0, 4)[0].elsewhere > 0
    assert not scores._forward_hooks and not scores._forward_pre_hooks


def test_it_is_public_and_loaded_when_first_named():
    assert flamia.audit_model is audit_model and "audit_model" in dir(flamia) and "audit_model" in flamia.__all__


@pytest.mark.parametrize("name,expected", [("sound", 0), ("leaky", 1), ("noisy", 2)])
def test_the_command_line_audits_what_a_factory_builds(monkeypatch, capsys, tmp_path, name, expected):
    pytest.importorskip("typer")
    from flamia import cli

    (tmp_path / "someones_models.py").write_text(
        "import torch\n"
        "table, head = torch.randn(50, 8), torch.randn(8, 50)\n"
        "def sound():\n    return torch.nn.Sequential(torch.nn.Embedding(50, 8), torch.nn.Linear(8, 50))\n"
        "def leaky():\n    return lambda t: (table[t] - table[t].mean(1, keepdim=True)) @ head\n"
        "def noisy():\n    return lambda t: table[t] @ head * (1 + 1e-3 * torch.rand(()))\n"
    )
    monkeypatch.chdir(tmp_path)
    options = ["audit", "--model", f"someones_models:{name}", "--effort", "spot", "--json"]
    monkeypatch.setattr("sys.argv", ["flamia", *options])
    with pytest.raises(SystemExit) as left:
        cli.main()
    got = json.loads(capsys.readouterr().out)
    assert (left.value.code or 0) == expected == got["exit_code"] and got["target"]["name"] == f"someones_models:{name}"
    monkeypatch.setattr("sys.argv", ["flamia", *options, "--html", "pages/page.html"])
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert (left.value.code or 0) == expected and "page: pages/page.html" in capsys.readouterr().err
    assert (tmp_path / "pages" / "page.html").read_text().count("someones_models") >= 2


def test_the_page_of_a_model_stands_alone(tmp_path):
    leak = audit_model(Small(None, by_sequence), name="a <b>", **BRIEF)
    page = leak.to_html(tmp_path / "m.html")
    assert (tmp_path / "m.html").read_text() == page and "<b>" not in page and "a &lt;b&gt;" in page
    assert "http" not in page and "<script" not in page and page.count("data:image/png;base64,") == 3
    assert leak.paragraph.startswith("a <b> leaks: its logits depend on tokens") and "layers.1" in leak.paragraph
    assert "carries it" in page and "groups of 32" in page and 'class="leak"' in page
    for spot in leak.blind_spots:
        assert spot.split("'")[0].split('"')[0][:40] in page
    where = [f for f in leak.findings if f.contract == "prefix" and f.cut]
    assert where and all(max(f.positions) < f.cut and min(f.positions) == f.first for f in where)
    assert "positions" not in leak.to_dict()["findings"][0]
    sound = audit_model(Small(None, None), name="sound", **BRIEF)
    page = sound.to_html()
    assert page.count("data:image/png;base64,") == 1 and "Modules" not in page and 'class="clean"' in page
    assert "kept everything" in sound.paragraph and "2 were seen" in sound.paragraph


def test_progress_is_told_and_time_ends_an_audit_of_a_model():
    told = []
    whole = audit_model(Small(None, None), progress=lambda *x: told.append(x), seconds=1000, **BRIEF)
    done, totals, notes = zip(*told)
    assert whole.verdict == "clean" and done == tuple(range(len(told))) and set(totals) == {len(told) - 1}
    assert "from position" in notes[0]
    late = audit_model(Small(None, None), seconds=0, **BRIEF)
    assert late.verdict == "undecided" and late.status("truncate") == "untried"
    assert any(f"out of time: {len(told) - 1} of {len(told) - 1} probes" in reason for reason in late.reasons)
