"""Closeness at size: the truth is the other truth, everybody is compared on the same tensors, captured files are read as
they are described, and what cannot be asked says so in its row."""

import json

import pytest
import torch

from flamia import Recipe, accuracy, closeness
from flamia.closeness import ROTATIONS, Sample, by_peer, by_reference, captured, drawn, exact, measure

LENGTHS = (70, 9)


def grouped(lengths=LENGTHS, heads=4, kv_heads=2, dim=32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    rows = sum(lengths)
    tensors = (torch.randn(rows, h, dim, generator=generator).bfloat16() for h in (heads, kv_heads, kv_heads, heads))
    return Sample("s", tuple(tensors), lengths)


def test_the_truth_is_that_of_each_document():
    sample = grouped()
    found = exact(sample, 0.2)
    start = 0
    for n in LENGTHS:
        part = tuple(x[start : start + n] for x in sample.tensors)
        for got, want in zip(found, accuracy.exact(*part, 0.2)):
            torch.testing.assert_close(got[start : start + n], want, rtol=1e-10, atol=1e-12)
        start += n


def test_the_measure_is_that_of_accuracy():
    inputs, truth = accuracy.solved("gaussian", tokens=200, heads=2, kv_heads=1, head_dim=32)
    want = accuracy.measure("mxfp8/strict", "gaussian", truth=(inputs, truth)).to_dict()
    sample = Sample("gaussian", inputs, (200,))
    found = by_reference(Recipe.parse("mxfp8/strict"), sample, exact(sample, 32**-0.5), 32**-0.5)
    for name in ("error", "cosine", "residual", "residual_rounded", "shares"):
        assert found[name] == pytest.approx(want[name], rel=1e-6), name


def test_a_peer_is_compared_on_the_same_tensors():
    sample = grouped()
    expected = exact(sample, 32**-0.5)
    ours = by_reference(Recipe.strict(), sample, expected, 32**-0.5)
    assert by_peer("flamia", sample, expected)["error"] == ours["error"]


def test_drawn_inputs_depend_on_the_seed_alone_and_outliers_on_their_factor():
    a, b = (drawn("gaussian", LENGTHS, 2, 64, "cpu") for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(a.tensors, b.tensors)) and a.offsets().tolist() == [0, 70, 79]
    plain, ten, forty = (drawn(f"outlier_channels{f}", LENGTHS, 2, 64, "cpu").tensors[1] for f in ("", ":10", ":40"))
    assert torch.equal(plain, ten)
    ratio = forty[..., 0].double().std() / ten[..., 0].double().std()
    assert 3.9 < ratio < 4.1 and torch.equal(forty[..., 1], ten[..., 1])


def test_rotation_helps_four_bits_with_one_scale_for_32_features():
    sample = drawn("outlier_channels:20", (200,), 2, 128, "cpu")
    expected = exact(sample, 128**-0.5)
    found = [by_reference(Recipe.parse(r), sample, expected, 128**-0.5)["cosine"]["o"] for r in ROTATIONS]
    mxfp8, _, nvfp4, _, mxfp4, mxfp4_rotated = found
    assert mxfp8 > nvfp4 > mxfp4 and mxfp4_rotated > mxfp4 + 0.02


def layer(lengths, seed):
    q, k, v, do = grouped(lengths, seed=seed).tensors
    cu = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    return {"q": q, "k": k, "v": v, "do": do, "cu_seqlens": cu}


def test_captured_activations_are_cut_to_whole_documents(tmp_path):
    path = tmp_path / "a.pt"
    torch.save({"0": layer((70, 9, 30), 1), "5": layer((120, 5), 2)}, path)
    first, last = captured(path, 80, "cpu")
    assert (first.name, first.lengths) == ("captured:0", (70, 9)) and len(first.tensors[0]) == 79
    assert (last.name, last.lengths) == ("captured:5", (120,))  # one whole document, however long
    torch.save({"0": {"q": torch.zeros(1)}}, path)
    with pytest.raises(ValueError, match="layer '0' lacks k, v, do, cu_seqlens"):
        list(captured(path, 80, "cpu"))


def test_the_activations_that_a_study_keeps_are_read(tmp_path):
    """Kept by the study's own function: layers, and beside them one packing for all."""
    from dataclasses import replace

    from flamia.study import plan, run
    from flamia.study.engine import Engine, activations
    from flamia.study.text import Text

    settings = replace(plan.LEAK.settings, shape=run.TINY, length=128, documents=3, steps=8, final_documents=3)
    pieces = torch.randint(97, 122, (3, 128), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    engine = Engine(plan.LEAK.runs[0], settings, Text(pieces, pieces, {}), torch.device("cpu"))
    kept = activations(engine, (0, 1), (1,), 2)
    path = tmp_path / "a.pt"
    torch.save(kept, path)
    first, last = captured(path, 10**6, "cpu")
    assert (first.name, last.name) == ("captured:0", "captured:1") and first.lengths == last.lengths == (128, 128)
    assert torch.equal(last.tensors[3], kept["layers"][1]["do"]) and last.tensors[0].shape == (256, 1, 32)
    assert by_reference(Recipe.bf16(), last, exact(last, 32**-0.5), 32**-0.5)["error"]["dq"] < 0.05
    short = next(captured(path, 128, "cpu"))
    assert short.lengths == (128,)
    torch.save(kept | {"cu_seqlens": torch.tensor([0, 128, 300])}, path)
    with pytest.raises(ValueError, match="layer 0 has 256 tokens where its cu_seqlens end at 300"):
        list(captured(path, 80, "cpu"))


def test_a_peer_that_is_not_here_and_what_there_is_no_time_for_say_so():
    rows = list(measure([grouped()], 60.0, ["cudnn-fp8"], ["bf16"]))
    assert [r["who"] for r in rows] == ["bf16/strict", "cudnn-fp8"]
    assert rows[0]["error"]["o"] < 0.01 and "one length" in rows[1]["refused"]
    assert [r["not_run"] for r in measure([grouped()], -1.0, [], ["bf16"])] == ["no time"]


def test_the_command(tmp_path, capsys):
    path = tmp_path / "a.pt"
    torch.save({"3": layer((40,), 1)}, path)
    out = tmp_path / "there" / "c"
    small = ["--documents", "1", "--length", "64", "--heads", "1", "--head-dim", "32", "--inputs", "gaussian"]
    closeness.main([*small, "--recipes", "bf16;mxfp8/fast", "--activations", str(path), "--out", str(out)])
    found = json.loads((tmp_path / "there" / "c.json").read_text())
    assert [(r["inputs"], r["who"]) for r in found["rows"]] == [
        (kind, who) for kind in ("gaussian", "captured:3") for who in ("bf16/strict", "mxfp8/fast")
    ]
    assert found["machine"] and "captured:3" in capsys.readouterr().out
    for wrong in ("uniform", "gaussian:3", "outlier_channels:x"):
        with pytest.raises(SystemExit, match="unknown"):
            closeness.main(["--inputs", wrong])
    with pytest.raises(SystemExit, match="'cudnn-fp9' is unknown: take flamia"):
        closeness.main(["--peers", "cudnn-fp9"])
