"""The library's own audit, on the card: the default recipe keeps every contract it claims, under each kind of mask."""

import pytest
import torch

if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
    pytest.skip("needs an NVIDIA Hopper GPU", allow_module_level=True)

import flamia

RECIPE = flamia.Recipe.parse("mxfp8_scores/strict")


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, (37, 0), (20, 5)], ids=["causal", "window", "two-sided"])
def test_the_default_recipe_is_isolated(window):
    causal = window is None or window[1] == 0
    claims = RECIPE.claims - (set() if causal else {"prefix", "truncate"})  # which only causal attention can keep

    def attention(q, k, v, cu_seqlens):
        return flamia.attention_varlen(q, k, v, cu_seqlens, causal=causal, window=window, recipe=RECIPE)

    report = flamia.audit(
        attention, causal=causal, window=window, heads=(4, 2), head_dim=64, device="cuda", effort="brief",
        claims=sorted(claims),
    )  # fmt: skip
    assert report.exit_code == 0, str(report)
