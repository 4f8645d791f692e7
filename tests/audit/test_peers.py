"""Other people's attention: every option is swept, what is refused is listed, and what one option loses is found."""

import io
import json
import sys

import pytest
import torch
from audit.peer_toys import KNOWN, narrowed, peer_of, swept, verdicts
from rich.console import Console

from flamia.audit.controls import attend
from flamia.audit.peer_calls import allowed, by_name
from flamia.audit.peer_modules import load
from flamia.audit.peer_report import listing
from flamia.audit.peers import Axes, Options, Peer, choose


def exact(q, k, v, cu, causal, window):
    options = Options(causal=causal, windowed=window is not None)
    return attend(q, k, v, cu, seen=allowed(len(q), cu, options.reach, q.device))


# ------------------------------------------------------------------------------------------------------ what is swept


def test_the_product_is_swept_and_the_ordinary_call_comes_first():
    every = Axes(lse=(False, True), deterministic=(False, True)).combinations()
    assert len(every) == len(set(every)) == 2 * 2 * 2 * 2 * 2 * 2 * 3
    assert (
        str(every[0]) == "packed causal GQA bf16" and str(every[-1]) == "batched full window MHA LSE deterministic fp32"
    )
    assert {o.window for o in every} == {None, (40, 0), (40, 24)} and {o.heads for o in every} == {(4, 2), (2, 2)}


def test_a_mask_that_is_lost_with_the_lse_is_found():
    def losing(q, k, v, cu_seqlens, *, causal=True, return_lse=False):
        out = attend(q, k, v, cu_seqlens, causal=causal and not return_lse)
        return (out, None) if return_lse else out

    result = swept(peer_of(losing, causal=(True, False), lse=(False, True)))
    assert result.verdict == "leak" and result.exit_code == 1
    assert [name for name, verdict in verdicts(result).items() if verdict == "leak"] == ["packed causal GQA LSE bf16"]
    assert sum(v == "clean" for v in verdicts(result).values()) == 3
    assert any(line[2] == "leak" and line[3].startswith("prefix O dQ (up to ") for line in result.summary())


def test_a_packing_that_is_dropped_under_a_window_is_found():
    def dropping(q, k, v, cu_seqlens, *, window=None):
        one = torch.tensor([0, len(q)], dtype=torch.int32)
        return exact(q, k, v, one if window[0] is not None else cu_seqlens, True, None)

    result = swept(peer_of(dropping, windowed=(False, True)))
    assert verdicts(result) == {"packed causal GQA bf16": "clean", "packed causal window GQA bf16": "leak"}
    assert result.rows[1].report.statuses["document"] == "leak"


def test_a_window_that_is_not_applied_is_found():
    """It keeps prefix and documents; the mask contract counts as soon as a window is asked for."""

    def ignoring(q, k, v, cu_seqlens, *, causal=True, window=None):
        return attend(q, k, v, cu_seqlens, causal=causal)

    result = swept(peer_of(ignoring, windowed=(False, True), causal=(True,)))
    lost = result.rows[1]
    assert (
        lost.verdict == "leak" and lost.report.statuses["prefix"] == "clean" and lost.report.statuses["mask"] == "leak"
    )
    assert result.rows[0].verdict == "clean"


# ------------------------------------------------------------------------------------------------- what is not judged


def test_refusals_are_listed_in_their_own_words_and_spoil_nothing():
    def proud(q, k, v, cu_seqlens, *, window=None):
        if window[0] is not None:
            raise NotImplementedError("windows are for buildings")
        return attend(q, k, v, cu_seqlens)

    result = swept(peer_of(proud, windowed=(False, True)))
    assert result.verdict == "clean" and [row.verdict for row in result.rows] == ["clean", "refused"]
    assert result.rows[1].refused == "NotImplementedError: windows are for buildings"
    assert any("windows are for buildings" in line[3] for line in result.summary())


def test_a_stranger_may_raise_anything():
    def rude(q, k, v, cu_seqlens):
        raise KeyError("sm_90")

    def moody(q, k, v, cu_seqlens):
        raise RuntimeError("training" if q.requires_grad else "inference")

    result = swept(peer_of(rude), peer_of(moody))
    assert result.rows[0].refused == "KeyError: 'sm_90'" and result.exit_code == 2  # nothing could run
    assert result.rows[1].refused == "RuntimeError: training; without gradients: RuntimeError: inference"


def test_where_gradients_are_refused_o_is_audited_alone():
    def forward_only(q, k, v, cu_seqlens):
        if q.requires_grad:
            raise RuntimeError("inference only")
        return attend(q, k, v, cu_seqlens)

    result = swept(peer_of(forward_only))
    assert result.rows[0].verdict == "clean" and result.rows[0].gradients == "RuntimeError: inference only"
    assert {tensor for _, tensor, _ in result.rows[0].report.tried} == {"O"}
    assert any("inference only" in note for note in result.notes())


def test_an_attention_that_computes_something_else_is_never_clean():
    def nothing(q, k, v, cu_seqlens):
        return (q + k.mean() * 0 + v.mean() * 0) * 0

    result = swept(peer_of(nothing))
    assert result.rows[0].report.verdict == "clean" and result.rows[0].error == pytest.approx(1.0)
    assert result.verdict == "undecided" and "not the attention asked for" in result.summary()[0][3]


def test_time_is_bounded_and_what_did_not_fit_is_named():
    result = swept(peer_of(lambda q, k, v, cu: attend(q, k, v, cu), causal=(True, False)), seconds=0.0)
    assert [row.verdict for row in result.rows][1:] == ["not run"] and result.exit_code == 2
    assert any(line[2] == "not run" for line in result.summary())


def test_peers_that_cannot_be_had_say_why():
    absent = Peer("absent", "", by_name("no_such_package_here", "f", None), "no-such-package-here")
    result = swept(absent)
    assert result.exit_code == 2 and result.missing == {
        "absent": "ModuleNotFoundError: No module named 'no_such_package_here'"
    }
    assert "not available here" in str(result)


# ----------------------------------------------------------------------------------------------------- torch, and ours


@pytest.mark.parametrize("name", ["sdpa:math", "sdpa:flash"])
def test_torch_attention_is_never_accused(name):
    result = swept(narrowed(name, packing=("batched", "loop", "mask"), windowed=(False, True)))
    assert {row.verdict for row in result.rows} <= {"clean", "undecided"} and len(result.rows) == 6
    for row in result.rows:
        assert row.error < 0.02
        counted = [f for f in row.report.findings if f.contract in row.report.claims]
        assert {f.kind for f in counted} <= {"order"} and {f.contract for f in counted} <= {"truncate", "offset"}


def test_flex_has_no_gradients_on_a_cpu():
    result = swept(narrowed("flex:eager", packing=("mask",), lse=(True,)))
    assert {row.verdict for row in result.rows} <= {"clean", "undecided"}
    assert all("does not support backward on CPU" in row.gradients and row.error < 0.02 for row in result.rows)


def test_backends_that_are_not_here_refuse_in_their_own_words():
    result = swept(narrowed("sdpa:cudnn", packing=("batched",)), narrowed("varlen", packing=("packed",)))
    assert [row.verdict for row in result.rows] == ["refused", "refused"] and result.exit_code == 2
    assert "No viable backend" in result.rows[0].refused
    assert "_flash_attention_forward" in result.rows[1].refused


def test_our_own_recipes_are_held_to_what_they_promise():
    strict, fast = narrowed("flamia:mxfp8/strict", packing=("packed",), lse=(True,)), load("flamia:mxfp8/fast")
    result = swept(strict)
    assert result.verdict == "clean" and len(result.rows) == 1
    assert all({"mask", "nonfinite", "prefix"} <= row.report.claims for row in result.rows)
    assert "prefix" not in fast.claims(Options()) and "document" in fast.claims(Options())


# ------------------------------------------------------------------------------------------------ names, table, command


def test_choosing_by_name_family_and_function():
    def fine(q, k, v, cu): ...

    found = choose(["sdpa", "flamia:nvfp4/fold"], KNOWN.values(), lambda text: load(text, find=lambda _: fine))
    assert {p.name.partition(":")[0] for p in found[:-1]} == {"sdpa"} and found[-1].name == "flamia:nvfp4/fold"
    assert "flex:compiled" not in {p.name for p in choose(["all", "flex"], KNOWN.values(), load)}
    assert choose(["flex:compiled"], KNOWN.values(), load)[0].name == "flex:compiled"
    assert choose(["m:f"], KNOWN.values(), lambda text: load(text, find=lambda _: fine))[0].name == "m:f"
    with pytest.raises(ValueError, match=r"Families are cudnn, .*sdpa.*list-targets"):
        choose(["sdpaa"], KNOWN.values(), load)
    with pytest.raises(ValueError, match="list-targets"):
        choose(["sdpa:flashy"], KNOWN.values(), load)


def test_listing_says_what_is_swept_or_why_not():
    lines = {
        line["name"]: line for line in listing([KNOWN["sdpa:flash"], Peer("no", "", by_name("no_such", "f", None))])
    }
    assert lines["sdpa:flash"]["asked"].endswith("bf16|fp16|fp32: 144 sets") and lines["sdpa:flash"]["available"]
    assert lines["no"]["reason"] == "ModuleNotFoundError: No module named 'no_such'" and lines["no"]["asked"] is None


def test_table_and_json(tmp_path):
    def losing(q, k, v, cu_seqlens, *, causal=True, return_lse=False):
        return attend(q, k, v, cu_seqlens, causal=causal and not return_lse)

    result = swept(peer_of(losing, lse=(False, True)), Peer("no", "", by_name("no_such", "f", None)))
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(result)
    shown = console.export_text()
    assert "packed causal GQA LSE bf16" in shown and "prefix O dQ" in shown and "No module named 'no_such'" in shown
    got = json.loads(result.to_json(tmp_path / "r.json"))
    assert (got["verdict"], got["exit_code"]) == ("leak", 1) and (tmp_path / "r.json").read_text().startswith("{")
    assert [t["available"] for t in got["targets"]] == [True, False] and got["targets"][0]["verdicts"]["leak"] == 1
    assert [r["verdict"] for r in got["rows"]] == ["clean", "leak"] and got["rows"][1]["report"]["schema"] == 1
    assert result.to_html().count("<h2>") == 2


@pytest.fixture
def flamia(monkeypatch, capsys, tmp_path):
    """``flamia audit ARGUMENTS`` in this process, in a folder with a module of its own: (exit code, out, err)."""
    pytest.importorskip("typer")
    from flamia import cli

    (tmp_path / "mine.py").write_text(
        "from flamia.audit.controls import attend\n"
        "def losing(q, k, v, cu_seqlens, *, return_lse=False):\n"
        "    return attend(q, k, v, cu_seqlens, causal=not return_lse)\n"
    )
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["flamia", "audit", *map(str, arguments)])
        with pytest.raises(SystemExit) as left:
            cli.main()
        said = capsys.readouterr()
        return left.value.code or 0, said.out, said.err

    return run


def test_command(flamia):
    code, out, _ = flamia("--list-targets", "--json")
    listed = {line["name"]: line for line in json.loads(out)}
    assert code == 0 and listed["sdpa:math"]["available"] and "never run" in listed["te:mxfp8"]["caution"]
    code, out, _ = flamia("--target", "mine:losing", "--effort", "spot", "--json")
    got = json.loads(out)
    assert code == 1 and {r["verdict"] for r in got["rows"]} >= {"clean", "leak"}
    assert {r["options"]["lse"] for r in got["rows"] if r["verdict"] == "leak"} == {True}
    code, _, err = flamia("--target", "nothing")
    assert code == 2 and "neither a target nor a family" in err and "Traceback" not in err
    code, _, err = flamia("--target", "sdpa", "--claim", "prefix")
    assert code == 2 and "held to the default contracts" in err
    code, _, err = flamia("--target", "mine:missing")
    assert code == 2 and "has no 'missing'" in err


def test_the_documents_of_a_mask():
    cu = torch.tensor([0, 2, 2, 5])
    seen = allowed(5, cu, (1, 0), torch.device("cpu"))
    rows = [[j for j in range(5) if seen[i, j]] for i in range(5)]
    assert rows == [[0], [0, 1], [2], [2, 3], [3, 4]]
    whole = allowed(5, None, (None, None), torch.device("cpu"))
    assert bool(whole.all())


def test_peers_go_by_name_as_on_the_command_line(tmp_path, monkeypatch):
    from flamia.audit import Options, Peer, PeerAudit, audit_peers, known_peers

    (tmp_path / "somebodys_attention.py").write_text(
        "from flamia.audit.controls import attend\ndef forward(q, k, v, cu_seqlens):\n    return attend(q, k, v, cu_seqlens)\n"
    )
    monkeypatch.chdir(tmp_path)
    mine = peer_of(lambda q, k, v, cu: attend(q, k, v, cu))
    asked = ["sdpa:overrideable", mine, "somebodys_attention:forward", "flash:4"]
    found = audit_peers(asked, effort="spot", head_dim=16)
    assert isinstance(found, PeerAudit)
    assert [p.name for p in found.peers] == ["sdpa:overrideable", "toy", "somebodys_attention:forward", "flash:4"]
    assert {r.verdict for r in found.of("toy") + found.of("somebodys_attention:forward")} == {"clean"}
    assert {r.verdict for r in found.of("sdpa:overrideable")} == {"refused"} and "flash_attn" in found.missing[
        "flash:4"
    ]
    assert all(isinstance(p, Peer) for p in known_peers()) and Options().layout == "packed"
    with pytest.raises(ValueError, match="neither a target nor a family"):
        audit_peers(["varlan"])
