"""The studies on a card: the rounding kernel, the folded attention, and a step inside a CUDA graph."""

from dataclasses import replace

import pytest
import torch

from flamia.formats import E2M1, E4M3, round_to
from flamia.study.attention import Arithmetic, compare
from flamia.study.engine import EAGER_STEPS, Engine
from flamia.study.plan import LEAK, STUDIES, TORCH, Run
from flamia.study.text import Text
from flamia.train.model import Shape

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
CARD = torch.device("cuda")
SETTINGS = replace(
    LEAK.settings,
    shape=Shape(layers=2, width=256, heads=2, kv_heads=2, head_dim=128, hidden=512),
    steps=12,
    documents=2,
)


def test_the_rounding_kernel_rounds_as_the_reference_does():
    from flamia.study.rounding import rounded

    generator = torch.Generator(CARD).manual_seed(0)
    powers = torch.exp2(torch.randint(-14, 12, (300_001,), generator=generator, device=CARD).double())
    x = torch.randn(300_001, dtype=torch.float64, generator=generator, device=CARD) * powers
    for fmt in (E4M3, E2M1):
        assert torch.equal(rounded(x, fmt), round_to(x, fmt))
    assert torch.equal(rounded(x[:300_000].view(300, 1000).t(), E4M3), round_to(x[:300_000].view(300, 1000).t(), E4M3))


def test_the_folded_attention_is_the_references():
    recipes = sorted({str(r.arithmetic.forward) for s in STUDIES.values() for r in s.runs})
    assert max(compare(recipes, 512, CARD).values()) <= 2.0**-8  # sums of float64 in another order, rounded to bfloat16


def losses(run, monkeypatch, graph):
    generator = torch.Generator().manual_seed(0)
    pieces = torch.randint(97, 123, (40, SETTINGS.length), dtype=torch.uint8, generator=generator)
    engine = Engine(run, SETTINGS, Text(pieces, pieces, {}), CARD)
    if not graph:
        monkeypatch.setattr(engine, "capture", lambda: None)
    engine.first_steps()
    assert (engine.graph is not None) == graph, engine.why_no_graph
    for step in range(EAGER_STEPS, SETTINGS.steps):
        engine.advance(step)
    return engine.history[:, 0]


@pytest.mark.parametrize("attention", [TORCH, "kernels", "reference", "chance"])
def test_a_graph_makes_the_same_steps(attention, monkeypatch):
    run = {
        TORCH: Run("torch", TORCH, Arithmetic.of("bf16/strict")),
        "kernels": Run("kernels", "kernels", Arithmetic.of("mxfp8_scores/strict")),
        "reference": Run("reference", "reference", Arithmetic.of("nvfp4/fast")),
        "chance": Run("chance", "reference", Arithmetic.of("mxfp8/fold", fault=("random_u", 10))),
    }[attention]
    captured, plain = (losses(run, monkeypatch, graph) for graph in (True, False))
    assert captured[-1] < captured[0]
    assert torch.allclose(captured, plain, rtol=5e-3)  # gradients of embeddings are added in no fixed order
