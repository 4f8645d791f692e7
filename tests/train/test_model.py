"""The decoder: documents do not touch, positions restart, the seed decides the weights."""

import pytest
import torch
import torch.nn.functional as F

from flamia.train import Decoder, Shape, attention_for
from flamia.train.data import IGNORED, pack
from flamia.train.model import rotary, turn

SHAPE = Shape(layers=2, width=32, heads=4, kv_heads=2, head_dim=16, hidden=48)


def documents(*lengths: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(256, (n,), generator=generator, dtype=torch.uint8) for n in lengths]


def test_the_same_seed_gives_the_same_weights():
    a, b, c = Decoder(SHAPE, 3), Decoder(SHAPE, 3), Decoder(SHAPE, 4)
    assert all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters()))
    assert not torch.equal(a.head.weight, c.head.weight)
    assert (
        a.size
        == sum(x.numel() for x in a.parameters())
        == 2 * 256 * 32 + 2 * (32 * 128 + 64 * 32 + 3 * 32 * 48 + 64) + 32
    )


def test_the_first_loss_is_that_of_guessing():
    loss = Decoder(SHAPE).loss(pack(documents(64, 64)), attention_for("bf16"))
    assert loss.item() == pytest.approx(torch.tensor(256.0).log().item(), abs=0.05)


def test_a_packed_document_reads_as_it_would_alone():
    model, attend = Decoder(SHAPE), attention_for("mxfp8/strict")
    parts = documents(70, 1, 150)
    together = model(pack(parts), attend)
    alone = torch.cat([model(pack([part]), attend) for part in parts])
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)


def test_torchs_attention_is_the_same_function():
    model, parts = Decoder(SHAPE), documents(70, 1, 150)
    ours, torchs = (model(pack(parts), attention_for(name)) for name in ("bf16", "torch"))
    torch.testing.assert_close(ours, torchs, rtol=0.02, atol=2e-3)


def test_the_loss_is_over_all_bytes_but_the_last_of_each_document():
    model, attend = Decoder(SHAPE), attention_for("bf16")
    parts = documents(40, 25)
    logits = [model(pack([part]), attend) for part in parts]
    expected = torch.stack(
        [
            F.cross_entropy(row, target)
            for part, rows in zip(parts, logits)
            for row, target in zip(rows[:-1], part[1:].long())
        ]
    ).mean()
    batch = pack(parts)
    assert (batch.targets == IGNORED).sum() == 2
    torch.testing.assert_close(model.loss(batch, attend), expected, rtol=1e-5, atol=1e-5)


def test_a_later_byte_moves_no_earlier_prediction():
    model, attend = Decoder(SHAPE), attention_for("mxfp8/strict")
    text = documents(180)[0]
    changed = text.clone()
    changed[133:] = changed[133:].flip(0) ^ 255
    before, after = model(pack([text]), attend), model(pack([changed]), attend)
    assert torch.equal(before[:133], after[:133]) and not torch.equal(before[133:], after[133:])


def test_rotary_positions_make_scores_depend_on_distance_alone():
    q, k = torch.randn(1, 1, 16, generator=torch.Generator().manual_seed(0)).double(), torch.ones(1, 1, 16).double()

    def score(i: int, j: int) -> torch.Tensor:
        a, b = (turn(x, *(t.double() for t in rotary(torch.tensor([n]), 16))) for x, n in ((q, i), (k, j)))
        return (a * b).sum()

    torch.testing.assert_close(score(9, 4), score(105, 100), rtol=1e-5, atol=1e-5)
    assert not torch.isclose(score(9, 4), score(9, 5))


def test_every_weight_learns():
    model = Decoder(SHAPE)
    model.loss(pack(documents(100, 60)), attention_for("mxfp8/strict")).backward()
    silent = [name for name, weight in model.named_parameters() if weight.grad is None or not weight.grad.any()]
    assert silent == []


@pytest.mark.parametrize("change", [{"kv_heads": 3}, {"head_dim": 15}, {"layers": 0}])
def test_impossible_shapes_are_refused(change):
    name, value = next(iter(change.items()))
    with pytest.raises(ValueError, match=f"{name} = {value}"):
        Shape(**change)
