"""Closeness, dependency, shares, memory and a model: what docs/evidence.md says of them follows from the committed files."""

import hashlib
import json
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from flamia.recipe import CONTROLS, Recipe

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "results"
DRAWN = {"parts.svg": "bench-more-h200", "rotation.svg": "closeness-h200"}
CLAIMED = {
    "prefix": ("k", "v", "q", "do", "2^20"), "document": ("document",), "offset": ("offset",), "truncate": ("truncate",),
    "mask": ("window", "2^126", "nan"),
}  # fmt: skip


def load(name):
    return json.loads((RESULTS / f"{name}.json").read_text())


def test_nothing_that_a_recipe_claims_was_seen_to_move_and_every_leak_was():
    rows = {row["recipe"]: row for row in load("dependency-cpu")["rows"]}
    moved = lambda row, channel: sum(size["moved"] for size in row["channels"][channel].values())  # noqa: E731
    for name, row in rows.items():
        claims = (CONTROLS[name] if name in CONTROLS else Recipe.parse(name)).claims
        assert row["claims"] == sorted(claims)
        for claim in claims & set(CLAIMED):
            assert all(moved(row, channel) == 0 for channel in CLAIMED[claim]), (name, claim)
        for sizes in row["channels"].values():
            assert all(
                size["comparisons"] > 0 and (size["moved"] > 0) == (size["largest"] != 0) for size in sizes.values()
            )
        if "prefix" not in claims:
            assert sum(moved(row, channel) for channel in CLAIMED["prefix"]) > 0, name
    assert set(CONTROLS) < set(rows) and {"mxfp8_scores/strict", "mxfp8/fold", "nvfp4/fast"} < set(rows)


def test_the_words_about_activations_follow_from_the_rows():
    rows = load("closeness-activations-cpu")["rows"]
    layers = sorted({row["inputs"] for row in rows})
    found = {(row["inputs"], row["who"]): row for row in rows}
    assert layers == ["captured:0", "captured:2", "captured:5"] and len(found) == len(rows)
    error = lambda layer, who: max(found[layer, who]["error"][t] for t in ("dq", "dk"))  # noqa: E731
    for layer in layers:
        assert error(layer, "mxfp8/strict") < error(layer, "mxfp8_scores/strict") < error(layer, "mxfp8/fast")
        for route in ("nvfp4_fp8", "nvfp4"):
            assert error(layer, f"{route}/fast") / error(layer, f"{route}/strict") > 1.5
    gaussian = {row["who"]: row for row in load("closeness-h200")["rows"] if row["inputs"] == "gaussian"}
    for layer in layers:  # O and dV are hardly worse, dQ and dK are
        default, before = found[layer, "mxfp8_scores/strict"]["error"], gaussian["mxfp8_scores/strict"]["error"]
        assert all(default[t] < 1.25 * before[t] for t in ("o", "dv")) and default["dk"] > 1.5 * before["dk"]


def test_rotation_helps_two_formats_and_hurts_one():
    cosine = {
        (row["inputs"], row["who"]): row["cosine"]["o"]
        for row in load("closeness-h200")["rows"]
        if row["inputs"].startswith("outlier") and row["backend"] == "reference"
    }
    assert len(cosine) == 18
    for (inputs, who), plain in cosine.items():
        if "rotate" not in who:
            better = cosine[inputs, who.replace("bf16/strict", "bf16/strict,rotate=True")] > plain
            assert better == ("nvfp4" not in who), (inputs, who)


def test_parts_are_differences_of_medians_and_quotients_quotients():
    found = load("bench-more-h200")
    assert found["not_run"] == [] and found["failed"] == {}
    for row in found["share"]:
        middle = {name: statistics.median(samples) for name, samples in row["samples"].items()}
        assert row["ms"]["forward"] == pytest.approx(middle["forward"] - middle["encode"])
        assert row["ms"]["dq"] == pytest.approx(middle["dq"] - middle["encode_gradient"])
        quantised = middle["encode"] + middle["encode_gradient"]
        assert row["share"] == pytest.approx(quantised / middle["train"])
        assert row["gb_per_s"]["encode"] == pytest.approx(row["bytes"]["encode"] / row["ms"]["encode"] * 1e-6)
        assert row["check"]["faults"] == []
    for case in found["memory"]:
        held = {(call["who"], call["padded"]): call for call in case["calls"]}
        for who in ("flamia", "flash-attn-4"):
            assert case["padding"][who] == pytest.approx(held[who, True]["bytes"] / held[who, False]["bytes"])
            rows = held[who, True]["rows"] / held[who, False]["rows"]
            assert case["padding"][who] == pytest.approx(rows, rel=0.12)  # it is the rows that make it
    (model,) = found["model"]
    for variant in model["variants"].values():
        assert variant["tokens_per_s"] == pytest.approx(1e3 * model["tokens"] / statistics.median(variant["samples"]))


def test_skewed_packs_have_the_tokens_and_the_pairs_of_the_equal_ones():
    loads = load("bench-more-h200")["workloads"]
    sizes = {(w["tokens"], w["pairs"]) for w in loads if w["group"] == "skewed" or w["name"] == "16x4096"}
    assert len(sizes) == 1
    order = {
        (w["tokens"], w["pairs"], w["documents"]) for w in loads if w["group"] == "order" or w["name"] == "log-uniform"
    }
    assert len(order) == 1
    assert all(c["check"]["faults"] == [] for w in loads for c in w["contenders"].values())


def test_the_shares_that_were_tried_are_those_that_were_measured():
    rows = load("bias-cpu")["shares"]
    kept = {1 - m["o_bias"] for m in load("peers-h200")["mass"] if m["target"] == "cudnn:fp8" and m["length"] > 1024}
    tried = {row["share"] for row in rows} - {0.0, 1.0}
    assert len(tried) == len(kept) and all(min(abs(x - y) for y in kept) < 1e-4 for x in tried)
    means = [statistics.fmean(row["losses"]) for row in sorted(rows, key=lambda row: -row["share"])]
    assert means[1] == pytest.approx(means[0], abs=0.002) and means[1:] == sorted(means[1:])


@pytest.mark.parametrize("picture", DRAWN)
def test_pictures_are_drawn_from_the_committed_files(picture, tmp_path):
    pytest.importorskip("matplotlib")
    committed = (ROOT / "docs" / "figures" / picture).read_text()
    assert hashlib.sha256((RESULTS / f"{DRAWN[picture]}.json").read_bytes()).hexdigest() in committed
    subprocess.run([sys.executable, ROOT / "scripts" / "figures.py", tmp_path, picture], check=True, cwd=ROOT)
    assert (tmp_path / picture).read_text().count("<path") == committed.count("<path")
