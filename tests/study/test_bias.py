"""A share of O: what is multiplied, that nothing else is, and what the command writes."""

import json

import pytest
import torch

from flamia.study import bias


def test_every_row_keeps_its_share_and_its_type():
    given = torch.randn(5, 2, 8).bfloat16()
    attend = bias.keeping(lambda q, k, v, cu: q, 0.5)
    assert torch.equal(attend(given, given, given, None), given * 0.5)
    assert attend(given, given, given, None).dtype == torch.bfloat16
    assert not bias.keeping(lambda q, k, v, cu: q, 0.0)(given, given, given, None).any()


def test_the_command(tmp_path, capsys):
    folder = tmp_path / "text"
    folder.mkdir()
    for index in range(60):
        (folder / f"{index:02}.py").write_text(f"def mask_{index}(query, key): return query @ key.T\n" * 12)
    out = tmp_path / "there" / "b.json"
    bias.main(["--tiny", "--steps", "8", "--text", str(folder), "--shares", "1,0.5,0", "--out", str(out)])
    found = json.loads(out.read_text())
    assert [row["share"] for row in found["shares"]] == [1.0, 0.5, 0.0] and found["settings"]["steps"] == 8
    one, half, none = (row["losses"] for row in found["shares"])
    assert len(one) == len(half) == len(none) == 2 and len({*one, *half, *none}) == 6
    assert found["attention"] == "bf16" and str(out) in capsys.readouterr().out
    with pytest.raises(SystemExit, match="separated by commas"):
        bias.main(["--shares", "all"])
    with pytest.raises(SystemExit, match="has at least"):
        bias.main(["--steps", "1"])
