"""Which calls the kernels say that they compute, and what they say of the others. Nothing here needs a GPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from flamia.hopper import launch, routes
from flamia.packing import Documents
from flamia.recipe import Recipe
from flamia.validation import UnsupportedError


def reason(
    recipe: str, monkeypatch, dim: int = 128, dtype: torch.dtype = torch.bfloat16, generation: int = 9
) -> str | None:
    monkeypatch.setattr(launch, "generation", lambda device: generation)
    x = SimpleNamespace(shape=(8, 2, dim), device=torch.device("cuda", 0), dtype=dtype)
    return routes.supports(x, x, x, Recipe.parse(recipe), None)


@pytest.mark.parametrize("recipe", ["mxfp8_scores", "mxfp8_scores/fold", "mxfp8_scores/fast"])
def test_the_three_presets_of_the_default_route_are_one(recipe, monkeypatch):
    """Its scales belong to one token each, so there is nothing that `fast` could save: same tables, same kernels."""
    assert reason(recipe, monkeypatch) is None
    mine, plain = Recipe.parse(recipe), launch.PLAIN
    assert (mine.full, mine.frontier, mine.lag, mine.dq_accumulator) == (
        plain.full, plain.frontier, plain.lag, plain.dq_accumulator,
    )  # fmt: skip


@pytest.mark.parametrize(
    "options", ["delta=compensated", "frontier_scores=bf16", "delta=compensated,frontier_scores=bf16"]
)
def test_what_of_its_options_has_kernels(options, monkeypatch):
    assert reason(f"mxfp8_scores/strict,{options}", monkeypatch) is None


@pytest.mark.parametrize("recipe", ["mxfp8/strict", "mxfp8/fast,dq_accumulator=fp32"])
def test_the_route_mxfp8_has_kernels(recipe, monkeypatch):
    assert reason(recipe, monkeypatch) is None
    assert routes.HEAD_DIMS == launch.HEAD_DIMS


@pytest.mark.parametrize(
    "recipe, options, says",
    [
        ("nvfp4/strict", {}, "route 'nvfp4' has no Hopper kernel"),
        ("mxfp8/fast", {}, "'mxfp8/fast,dq_accumulator=fp32'"),
        ("mxfp8/fold", {}, "the kernels compute 'mxfp8_scores/strict'"),
        ("mxfp8/strict,boost=5", {}, "'mxfp8/strict'"),
        ("mxfp8_scores/strict,delta=centered", {}, "delta=compensated or without"),
        ("mxfp8_scores/strict,o_v=e4m3:token", {}, "delta=compensated or without"),
        ("mxfp8_scores/fold,frontier_scores=bf16", {}, "with frontier_scores=bf16"),
        ("mxfp8_scores", {"dim": 80}, "64 or 128"),
        ("mxfp8_scores", {"dtype": torch.float16}, "bfloat16"),
        ("mxfp8_scores", {"generation": 10}, "Hopper"),
    ],
)
def test_what_has_no_kernel_is_told(recipe, options, says, monkeypatch):
    assert says in (reason(recipe, monkeypatch, **options) or "")


@pytest.mark.parametrize("left, right, edge", [(None, None, False), (None, 0, True), (200, 0, True)])
def test_where_scores_are_made_of_what_was_given(left, right, edge):
    cu = torch.tensor([0, 300], dtype=torch.int32)
    assert launch.has_edge(launch.EDGE, Documents(cu, cu, left, right)) is edge
    assert launch.has_edge(launch.PLAIN, Documents(cu, cu.clone(), left, right)) is False


@pytest.mark.parametrize("left, right", [(200, 40), (None, 40), (200, None)])
def test_other_masks_are_refused_there(left, right):
    cu = torch.tensor([0, 300], dtype=torch.int32)
    with pytest.raises(UnsupportedError, match="under a causal mask"):
        launch.has_edge(launch.EDGE, Documents(cu, cu, left, right))


def test_keys_with_offsets_of_their_own_are_refused_there():
    """Blocks of queries would not lie on blocks of keys, and which are which is on the device."""
    cu = torch.tensor([0, 300], dtype=torch.int32)
    with pytest.raises(UnsupportedError, match="cu_seqlens_k"):
        launch.has_edge(launch.EDGE, Documents(cu, cu + 0, None, 0))
    assert not launch.has_edge(launch.EDGE, Documents(cu, cu + 0, None, None))  # no mask, no edge
    assert launch.has_edge(launch.EDGE, Documents(cu, cu + 0, None, 0, aligned=True))  # somebody vouches for it
