"""Reports read back, sums are measured, and our own presets keep what they claim."""

import base64
import io
import json
import re

import pytest
from audit import toys
from rich.console import Console

import flamia
from flamia import Recipe, console
from flamia.audit import CONTRACTS, LEAKY, audit_callable, audit_recipes
from flamia.audit.controls import attend
from flamia.audit.mass import LIMIT, Mass, verdict
from flamia.audit.recipes import LONG_MASKS, MASKS, RecipeAudit, Row, _missed, callable_of

SMALL = {"lengths": (13, 75, 0, 1, 21), "heads": (2, 1), "head_dim": 16}


def printed(thing):
    out = io.StringIO()
    Console(width=160, file=out).print(thing)
    return out.getvalue()


@pytest.fixture(scope="module")
def leak():
    return audit_callable(LEAKY[0].fn, effort="brief", name="stripes", **SMALL)


def test_json_says_all_of_it(leak, tmp_path):
    got = json.loads(leak.to_json(tmp_path / "a.json"))
    assert json.loads((tmp_path / "a.json").read_text()) == got
    assert (got["schema"], got["verdict"], got["exit_code"], got["target"]["name"]) == (1, "leak", 1, "stripes")
    assert set(got["statuses"]) == set(CONTRACTS) and got["statuses"]["prefix"] == "leak"
    cell = next(c for c in got["tried"] if (c["contract"], c["tensor"], c["operand"]) == ("prefix", "O", "v"))
    assert cell["moved"] > 0 and 0 < cell["largest"] <= 2
    assert {
        f["first"] for f in got["findings"] if f["contract"] == "prefix" and f["tensor"] == "O" and f["cut"] == 7
    } == {0}
    assert got["diagnosis"]["group"] == 32 and got["diagnosis"]["carriers"]["O"] == ["v"]
    assert got["diagnosis"]["channel"] == "scale" and got["diagnosis"]["smallest"].startswith("v times ")
    assert {"units", "scene"} <= got["findings"][0].keys() and "positions" not in got["findings"][0]
    assert len(got["controls"]) == len(LEAKY) + 1 and all(c["caught"] for c in got["controls"])
    assert got["blind_spots"]


def test_html_stands_alone(leak, tmp_path):
    leak.to_html(tmp_path / "a.html")
    page = (tmp_path / "a.html").read_text()
    pictures = re.findall(r'src="data:image/png;base64,([^"]+)"', page)
    assert len(pictures) == 3 and all(base64.b64decode(p).startswith(b"\x89PNG") for p in pictures)
    assert "stripes" in page and "groups of 32" in page and not re.search(r'(src|href)="(?!data:)', page)


@pytest.mark.parametrize("name", ["matplotlib", "jinja2"])
def test_a_page_without_the_extra_says_what_to_install(leak, name, tmp_path, monkeypatch):
    monkeypatch.setattr(console.importlib, "import_module", missing(name))
    with pytest.raises(console.MissingExtra, match=r"needs " + name + r".*flamia\[cli\]"):
        leak.to_html(tmp_path / "a.html")
    assert not list(tmp_path.iterdir())


def missing(name):
    def load(asked):
        if asked == name:
            raise ModuleNotFoundError(f"No module named '{name}'", name=name)

    return load


def test_names_are_escaped_in_html():
    report = audit_callable(attend, effort="spot", name="<script>alert(1)</script>", **SMALL)
    assert "<script>" not in report.to_html()


def test_text_and_table(leak):
    assert str(leak).startswith("stripes: LEAK") and "= O is moved by v" in str(leak)
    shown = printed(leak)
    assert "prefix" in shown and "stripes: leak" in shown


def test_sums():
    good = audit_callable(attend, claims=("mass",), effort="quick", **SMALL)
    assert good.verdict == "clean" and [m.length for m in good.masses] == [33, 300, 1024]
    assert max(m.o_bias for m in good.masses) < 2.0**-12 and max(m.dq_equal for m in good.masses) < 1e-9
    bad = audit_callable(toys.unboosted, claims=("mass", "prefix"), effort="brief", **SMALL)
    assert bad.statuses["prefix"] == "clean" and bad.verdict == "leak"
    assert any("underflows" in r for r in bad.reasons) and bad.masses[0].tail == 0.0

    def shy(q, k, v, cu):
        return attend(q, k, v, cu) * 0.99

    assert any("off by 0.01" in r for r in audit_callable(shy, claims=("mass",), effort="brief", **SMALL).reasons)


def test_a_bias_that_grows_is_broken_before_it_is_large():
    grown = [Mass(33, o_bias=1e-5), Mass(300, o_bias=3e-4), Mass(1024, o_bias=0.6 * LIMIT)]
    status, reasons = verdict(grown)
    assert status == "leak" and "grows" in reasons[0]
    assert verdict([Mass(33, o_bias=3e-4), Mass(1024, o_bias=3e-4)])[0] == "clean"
    assert verdict([Mass(33, refused="no")])[0] == "untried"


@pytest.mark.parametrize(
    "cell,tensor,operand",
    [
        ("frontier.o_v=e4m3:stripe32", "O", "v"),
        ("frontier.e_g=e4m3:block", "dQ", "do"),
        ("s_q=e4m3:block", "O", "q"),
        ("frontier.dq_u=e4m3:square", "dQ", "k"),
    ],
)
def test_one_careless_cell_in_strict_is_found(cell, tensor, operand):
    fn = callable_of(Recipe.parse(f"mxfp8/strict,{cell}"), MASKS[0])
    report = audit_callable(fn, effort="brief", heads=(2, 1), head_dim=16, explain=False)
    assert report.verdict == "leak" and report.statuses["document"] == "clean"
    found = {(f.tensor, f.operand) for f in report.findings if f.contract == "prefix"}
    assert (tensor, operand) in found and (tensor == "O" or not any(t == "O" for t, _ in found))


def test_every_way_in_is_isolated():
    """Batched, drop-in, and with its LSE: the same promise."""

    def drop_in(q, k, v, cu):
        longest = int(cu.diff().max())
        return flamia.flash_attn_varlen_func(q, k, v, cu, cu, longest, longest, causal=True)

    def with_lse(q, k, v, cu):
        return flamia.attention_varlen(q, k, v, cu, causal=True, return_lse=True)

    def batched(q, k, v):
        return flamia.attention(q, k, v, causal=True)

    claims = Recipe.strict().claims
    options = {"effort": "spot", "heads": (2, 1), "head_dim": 16, "claims": claims}
    assert flamia.audit(drop_in, **options).verdict == "clean"
    assert flamia.audit(with_lse, **options).verdict == "clean"
    assert flamia.audit(batched, layout="batched", **options).verdict == "clean"


def test_presets_keep_their_claims_and_are_shown(tmp_path):
    presets = audit_recipes(["mxfp8/strict", "mxfp8/fast"], masks=MASKS[:2], effort="spot", head_dim=16)
    assert presets.verdict == "clean" and presets.exit_code == 0 and presets.missed == []
    for contract in ("prefix", "truncate", "document", "offset", "mask", "repeat", "nonfinite"):
        status, claimed, count, largest, _ = presets.cell("mxfp8/strict", contract)
        assert (status, claimed, largest) == ("clean", True, None) and count > 0
    status, claimed, _, largest, _ = presets.cell("mxfp8/fast", "prefix")
    assert status == "leak" and not claimed and largest > 0.1
    assert presets.cell("current_scaling", "document")[0] == "leak"

    got = json.loads(presets.to_json(tmp_path / "r.json"))
    assert got["exit_code"] == 0 and len(got["rows"]) == 4 + 4  # two masks each, and the four imitations
    assert "mxfp8/strict" in str(presets) and str(presets).endswith("verdict: clean")
    assert "current_scaling" in printed(presets)
    presets.rows = presets.rows[:2]
    assert presets.to_html(tmp_path / "r.html").count("<h2>") == 2


def test_windows_long_enough_to_hide_parts_of_whole_blocks():
    for mask in LONG_MASKS:
        report = (
            audit_recipes(["mxfp8/strict"], masks=[mask], controls=False, effort="spot", head_dim=16).rows[0].report
        )
        assert report.verdict == "clean"
        hidden = [(c, t) for (c, t, o), n in report.tried.items() if c == "mask" and o in ("k", "v") and n]
        assert ("mask", "O") in hidden and ("mask", "dQ") in hidden


def test_a_preset_that_is_known_to_leak_and_does_not_spoils_the_audit():
    clean = audit_callable(attend, effort="spot", claims=("document",), explain=False, **SMALL)
    rows = [Row("mxfp8/fast", MASKS[0], clean)]
    assert _missed(rows) == ["mxfp8/fast under causal: no leak seen in prefix"]
    assert RecipeAudit(rows, _missed(rows)).exit_code == 2
