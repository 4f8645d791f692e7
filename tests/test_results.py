"""What README and docs quote is what the committed results say: nobody can edit a number by hand, in a page or a picture."""

import hashlib
import json
import math
import re
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPTS, RESULTS = ROOT / "scripts", ROOT / "docs" / "results"
DECIMAL = re.compile(r"(?<![\w.])\d*\.\d+(?![\w.]*\w)")
DRAWN = {
    "mass.svg": "peers-h200",
    "speed.svg": "bench-h200",
    "study_leak.svg": "study-h200",
    "study_curves.svg": "study-h200",
    "study_faults.svg": "faults-h200",
}


@pytest.fixture(scope="module")
def scripts():
    sys.path.insert(0, str(SCRIPTS))
    try:
        import reduce_peers
        import tables
    finally:
        sys.path.remove(str(SCRIPTS))
    return {"tables": tables, "reduce": reduce_peers}


def load(name):
    return json.loads((RESULTS / f"{name}.json").read_text())


def prose(page, blocks):
    """A page's text without code, links and pictures; the blocks that are generated kept alone, or left out."""
    text = re.sub(r"```.*?```|^    .*?$", "", (ROOT / page).read_text(), flags=re.S | re.M)
    text = re.sub(r"\]\([^)]*\)|`[^`]*`", "]", text)
    parts = re.split(r"<!-- (?:begin|end) [\w-]+ -->", text)
    return " ".join(parts[1::2] if blocks else parts[::2])


def test_pages_are_what_the_results_make_of_them(scripts):
    for page in scripts["tables"].PAGES:
        text = (ROOT / page).read_text()
        assert "<!-- begin " in text, page
        assert scripts["tables"].filled(text) == text, f"{page}: run python scripts/tables.py"


def test_an_edited_number_is_seen(scripts):
    text = (ROOT / "README.md").read_text()
    table = prose("README.md", blocks=True)
    number = DECIMAL.search(table)[0]
    edited = text.replace(number, "0.123")
    assert edited != text and scripts["tables"].filled(edited) == text


def test_every_block_is_on_a_page(scripts):
    pages = "".join((ROOT / page).read_text() for page in scripts["tables"].PAGES)
    assert {name for name in scripts["tables"].BLOCKS if f"<!-- begin {name} -->" not in pages} == set()


PAPERS = {"0.811", "0.827", "0.852", "0.888", "0.940", "0.0008", "0.049", "0.5"}
"""Losses, and a gradient norm, of FLAMIA's paper that the page of the training studies quotes."""


@pytest.mark.parametrize("page", ["README.md", "docs/evidence.md", "docs/evidence-training.md"])
def test_no_measured_number_outside_of_the_blocks(page):
    given = {"3.10", "2.11", "2.13", "2.0", "2611.03344", "1.1", "1.25"}  # versions, a paper, the goal of speed
    given |= PAPERS if page == "docs/evidence-training.md" else set()
    assert set(DECIMAL.findall(prose(page, blocks=False))) <= given


def leaves(x):
    if isinstance(x, dict):
        for value in x.values():
            yield from leaves(value)
    elif isinstance(x, list):
        for value in x:
            yield from leaves(value)
    elif isinstance(x, (int, float)):
        yield float(x)


def test_every_figure_of_the_readme_is_in_a_results_file():
    """Found without the maker of the blocks: a number of a file, what it leaves of 1, or a quotient of two peaks."""
    known = [x for name in ("accuracy-cpu", "bench-h200", "peers-h200") for x in leaves(load(name))]
    known += [1 - x for x in known]
    for w in load("bench-h200")["workloads"]:
        known.append(w["contenders"]["flamia"]["peak_bytes"] / w["contenders"]["flash-attn-4"]["peak_bytes"])
    figures = DECIMAL.findall(prose("README.md", blocks=True))
    assert len(figures) > 20
    for text in figures:
        digits = len(text.partition(".")[2])
        assert any(abs(round(x, digits) - float(text)) < 1e-9 for x in known), text


@pytest.mark.parametrize("name", ["bench-h200", "bench-h200-dense"])
def test_ratios_follow_from_the_samples(name):
    found = load(name)
    for w in found["workloads"]:
        for peer, kinds in w["ratios"].items():
            for kind, (least, middle, greatest) in kinds.items():
                ours, theirs = (w["contenders"][c][kind] for c in ("flamia", peer))
                each = [b / a for a, b in zip(ours["samples"], theirs["samples"])]
                assert [min(each), statistics.median(each), max(each)] == pytest.approx([least, middle, greatest])
                assert statistics.median(ours["samples"]) == pytest.approx(ours["ms"])
    for peer, kinds in found["means"].items():
        for kind, mean in kinds.items():
            each = [w["ratios"][peer][kind][1] for w in found["workloads"] if w["group"] == "packed"]
            assert math.exp(statistics.fmean(map(math.log, each))) == pytest.approx(mean["mean"])
            assert (min(each), len(each)) == (pytest.approx(mean["least"]), mean["workloads"])


@pytest.mark.parametrize("name, study", [("study-h200", "leak"), ("faults-h200", "faults")])
def test_studies_hold_whole_runs_on_the_same_documents(name, study):
    assert (RESULTS / f"{name}.json").stat().st_size < 1_000_000
    found = load(name)
    settings = found["sessions"][-1]["settings"][study]
    names = [run["name"] for run in found["runs"]]
    assert len(set(names)) == len(names) and not set(names) & {
        key.partition(": ")[2] for key in found["sessions"][-1]["not_run"]
    }
    assert all(max(session["check"]["largest_difference"].values()) <= 2.0**-7 for session in found["sessions"])
    for run in found["runs"]:
        assert run["study"] == study and run["diverged_at"] is None
        assert len(run["loss"]) == len(run["gradient_norm"]) == settings["steps"]
        for losses in (run["own"], run["exact"], *run["through"].values()):
            assert len(losses) == settings["final_documents"] and all(map(math.isfinite, losses))


def losses(name):
    runs = {run["name"]: run for run in load(name)["runs"]}
    return runs, {n: statistics.fmean(run["exact"]) for n, run in runs.items()}


def late(run):
    return statistics.median(run["gradient_norm"][-100:])


def off(a, b):
    """Mean over documents of a - b, in standard errors."""
    each = [x - y for x, y in zip(a, b, strict=True)]
    return statistics.fmean(each) / statistics.stdev(each) * math.sqrt(len(each))


def test_the_words_about_training_follow_from_the_losses():
    """What evidence-training.md concludes, found without the maker of its blocks."""
    runs, loss = losses("study-h200")
    own = {name: statistics.fmean(run["own"]) for name, run in runs.items()}
    apart = abs(loss["bf16, other weights"] - loss["bf16"])
    first = {name: loss[name] - loss["bf16"] for name, run in runs.items() if run["seed"] == 0 and name != "bf16"}
    broken = {"nvfp4/fast", "nvfp4/fold"}
    sound = set(first) - broken - {"nvfp4/strict"}
    assert len(sound) == 6 and all(abs(first[name]) < apart / 2 for name in sound)
    assert sum(first[name] < 0 for name in sound) == 5
    assert all(loss["bf16, other weights"] < loss[name] for name in sound)
    weights = ("", ", other weights", ", weights 2", ", weights 3")
    bf16 = [loss["bf16" + which] for which in weights]
    each = [loss["mxfp8_scores/strict" + which] - x for which, x in zip(weights, bf16)]
    half = 3.182 * statistics.stdev(each) / 2
    assert all(-0.01 < x < 0 for x in each) and 0 < statistics.fmean(each) + half < 0.0008 < half / 5
    assert 45 < (2 * statistics.stdev(each) / 0.0008) ** 2 < 60 and 3 * statistics.stdev(each) < statistics.stdev(bf16)
    assert bf16[2] > bf16[0] < bf16[3]
    clear = {name for name in sound if off(runs[name]["exact"], runs["bf16"]["exact"]) < -3}
    assert clear == {"mxfp8/strict", "mxfp8/fold", "mxfp8/fast"}
    assert all(first[name] > 12.706 * apart for name in broken) and apart / 10 > 0.0008
    assert first["nvfp4/strict"] > max(first[name] for name in sound) and late(runs["nvfp4/strict"]) < 1.1 * late(
        runs["bf16"]
    )
    assert all(max(runs[name]["gradient_norm"][400:]) > 100 for name in broken)
    assert all(max(run["gradient_norm"][400:]) < 5 for name, run in runs.items() if name not in broken)
    assert all(own[name] > loss[name] - 1e-4 for name in runs)  # no use of a leak: none is better through its own
    through = runs["bf16"]["through"]
    assert first["nvfp4/fold"] > 100 * (statistics.fmean(through["nvfp4/fold"]) - loss["bf16"])
    gain = {}
    for name in set(through) & set(runs):
        seen, never = ([x - y for x, y in zip(a, b)] for a, b in (
            (runs[name]["own"], runs[name]["exact"]), (through[name], runs["bf16"]["exact"])))  # fmt: skip
        gain[name] = off(seen, never)
    assert len(gain) == 8 and [name for name, x in gain.items() if x < -2] == ["nvfp4_fp8/fast"]
    assert abs(gain["mxfp8/fast"]) < 2
    hidden = [a - b for a, b in zip(runs["mxfp8/fold"]["own"], runs["mxfp8/fold"]["exact"])]
    assert abs(off([a - b for a, b in zip(runs["mxfp8/fast"]["own"], runs["mxfp8/fast"]["exact"])], hidden)) < 1


def test_the_words_about_faults_follow_from_the_losses():
    runs, loss = losses("faults-h200")
    first = {name: run for name, run in runs.items() if run["seed"] == 0}
    gaps = {n: loss[n] - loss[run["control"]] for n, run in first.items() if run["control"]}
    broken = {"nvfp4/fold", "4 bits, D from the given dO"}
    sunk = {n for n in first if n.startswith("sink")}
    plain = set(first) - broken - sunk
    sound = [loss[n] for n in plain if first[n]["control"] is None]
    yardstick = math.sqrt(2) * statistics.stdev(sound)
    assert len(sound) == 3 and loss["bf16/strict"] == max(sound)
    assert all(abs(gaps[n]) < 4.303 * yardstick for n in plain & set(gaps))
    assert all(late(run) < 1.1 * late(runs["bf16/strict"]) for n, run in first.items() if n not in broken)
    assert all(late(first[n]) > 20 for n in broken) and gaps["4 bits, D from the given dO"] > 0.1
    bf16 = sorted(loss[n] for n, run in runs.items() if run["arithmetic"] == "bf16/strict")
    spread = math.sqrt(2) * statistics.stdev(bf16)
    assert len(bf16) == 4 and loss["bf16/strict"] == bf16[2]  # the second worst of four
    inside = plain & set(gaps)
    assert len(inside) == 10 and all(abs(gaps[n]) < spread and bf16[0] < loss[n] < bf16[3] for n in inside)
    assert all(abs(gaps[n]) > 3.182 * spread for n in (broken | sunk) & set(gaps))
    assert 3.182 * spread > 0.049 and 1 / 20 < 3.182 * spread / bf16[2] < 1 / 15
    assert spread < loss["sink, O from the exact V"] - loss["sink"] < 1.3 * spread
    assert loss["blocks of 256 forward, 128 backward"] > loss["blocks of 256"] > loss["mxfp8/fold"]
    approximate = [n for n in plain if n.startswith(("approximate", "secant"))]
    assert all(bf16[0] < loss[n] < bf16[1] and abs(loss[n] - statistics.fmean(bf16)) < spread for n in approximate)
    assert 2 * spread > bf16[3] - bf16[0] > loss["bf16/strict"] - min(loss[n] for n in approximate)
    assert len(approximate) == 4 and all(loss[n] < min(sound) for n in approximate)
    best = min(approximate, key=loss.__getitem__)
    assert best == "approximate in the forward only" and loss["bf16/strict"] - loss[best] > 4.303 * yardstick
    assert 0 < gaps["as much of U zeroed by chance"] < yardstick < gaps["U's scales 2^10"] < 2 * yardstick
    assert gaps["sink, O and E from one V"] > 3 * abs(loss["sink, O from the exact V"] - loss["sink"])
    assert gaps["sink, O from the exact V"] < 0 < gaps["O from the exact V"]
    at = {n: [told["layers"] for told in run["diagnostics"]] for n, run in first.items()}
    zeroed = {
        n: [[max(x["u_zeroed_dq"], x["u_zeroed_dk"]) for x in layers] for layers in all_] for n, all_ in at.items()
    }
    assert min(sorted(zeroed["mxfp8/fold"][-1])[1:]) > 0.5 and min(sorted(zeroed["U's scales 2^10"][-1])[1:]) > 0.9
    assert all(a <= b + 0.01 for a, b in zip(zeroed["nvfp4/fold"][0], zeroed["nvfp4/fold"][1]))
    assert statistics.fmean(zeroed["nvfp4/fold"][1]) - statistics.fmean(zeroed["U's scales 2^10"][1]) < 0.08
    for name in ("D from the given dO",):
        for mine, control in zip(at[name][-1], at[runs[name]["control"]][-1]):
            assert mine["row_residual"] > 1.05 * control["row_residual"]


def test_the_audits_counts_agree():
    found = load("peers-h200")
    assert (RESULTS / "peers-h200.json").stat().st_size < 300_000
    for target in found["targets"]:
        mine = [r for r in found["rows"] if r["target"] == target["name"]]
        for verdict in ("clean", "undecided", "leak"):
            assert sum(r["count"] for r in mine if r["verdict"] == verdict) == target[verdict]
        refused = [r for r in found["refused"] if r["target"] == target["name"] and not r["sets"].startswith("grad")]
        assert sum(r["count"] for r in refused) == target["refused"]
        for contract, statuses in found["contracts"].get(target["name"], {}).items():
            assert sum(statuses.values()) == target["ran"] or contract in ("prefix", "truncate")
    leaking = {t["name"] for t in found["targets"] if t["leak"]}
    assert {p["target"] for p in found["probes"] if p["contract"] != "nonfinite"} == leaking


def test_reducing_counts_and_copies(scripts):
    def row(verdict, moved, **more):
        report = {"statuses": {"prefix": verdict}, "claims": ["prefix"], "tried": [], "findings": []}
        usual = {"target": "a", "head_dim": 64, "words": ["packed", "causal"], "alike": moved, "moved": moved}
        options = {"packing": "packed", "windowed": False, "deterministic": False}
        return usual | {"verdict": verdict, "options": options, "refused": None, "gradients": None, "error": 0.5,
                        "report": report} | more  # fmt: skip

    leak = row("leak", "prefix O")
    size = {"tensor": "O", "operand": "v", "disturbance": "spike", "tone": "plain", "units": 2.0}
    leak["report"] |= {
        "tried": [{"contract": "prefix", "operand": "v", "comparisons": 7, "moved": 3}],
        "findings": [size | {"contract": c, "kind": k, "largest": x} for c, k, x in (
            ("prefix", "leak", 0.25), ("prefix", "leak", "inf"), ("prefix", "noise", 9.0), ("mask", "leak", 9.0))],
    }  # fmt: skip
    refusal = row("refused", "", report=None, refused="no", error=None)
    facts = {"version": "1", "about": "", "words": None, "items": ["x", "y", "z", "w", "sums at 9"], "ended": ["done"]}
    found = {"targets": {"a": facts}, "rows": [row("clean", ""), leak, refusal], "mass": [{"length": 9}]}
    found |= {"machine": {}, "seed": 0, "effort": "quick", "seconds": 1.0, "verdict": "leak"}
    small = scripts["reduce"].reduce(found, commit="abc")
    target = small["targets"][0]
    assert [target[v] for v in ("clean", "undecided", "leak", "refused", "not run")] == [1, 0, 1, 1, 1]
    assert [(r["verdict"], r["count"]) for r in small["rows"]] == [("clean", 1), ("leak", 1)]
    assert small["refused"][0]["words"] == "no" and small["mass"] == found["mass"]
    assert [(o["operand"], o["comparisons"], o["moved"]) for o in small["operands"]] == [("v", 7, 3)]
    assert [(p["contract"], p["largest"], p["sets"]) for p in small["probes"]] == [("prefix", "inf", 1)]


@pytest.mark.parametrize("picture", DRAWN)
def test_pictures_are_drawn_from_the_committed_files(picture, tmp_path):
    pytest.importorskip("matplotlib")
    committed = (ROOT / "docs" / "figures" / picture).read_text()
    assert hashlib.sha256((RESULTS / f"{DRAWN[picture]}.json").read_bytes()).hexdigest() in committed
    subprocess.run([sys.executable, SCRIPTS / "figures.py", tmp_path, picture], check=True, cwd=ROOT)
    drawn = (tmp_path / picture).read_text()
    made_by = re.compile(r"Matplotlib v[\w.]+")
    if made_by.search(drawn)[0] == made_by.search(committed)[0]:  # another version draws other bytes
        assert drawn == committed
