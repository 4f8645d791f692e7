"""The public functions agree with each other, with float64 attention, and with what their docstrings promise."""

import inspect
import math
import subprocess
import sys

import pytest
import torch

import flamia
from flamia import Recipe


def inputs(batch=2, queries=37, keys=37, heads=(4, 2), dims=(16, 8), dtype=torch.bfloat16):
    torch.manual_seed(0)
    shapes = ((queries, heads[0], dims[0]), (keys, heads[1], dims[0]), (keys, heads[1], dims[1]))
    return [torch.randn(batch, *shape).to(dtype) for shape in shapes]


def float64_attention(q, k, v, scale=None, left=None, right=None):
    """(B, T, H, D) by the definition: O and LSE in float64."""
    group = q.shape[2] // k.shape[2]
    q, k, v = q.double(), k.double().repeat_interleave(group, 2), v.double().repeat_interleave(group, 2)
    s = torch.einsum("bihd,bjhd->bhij", q, k) * (scale or q.shape[-1] ** -0.5)
    distance = torch.arange(k.shape[1]) - (torch.arange(q.shape[1]) + k.shape[1] - q.shape[1])[:, None]
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    hidden |= distance < -left if left is not None else False
    hidden |= distance > right if right is not None else False
    s = s.masked_fill(hidden, -math.inf)
    return torch.einsum("bhij,bjhd->bihd", s.softmax(-1).nan_to_num(0), v), s.logsumexp(-1)


def packed(x):
    return x.flatten(0, 1)


def even(batch, tokens):
    return torch.arange(0, (batch + 1) * tokens, tokens, dtype=torch.int32)


@pytest.mark.parametrize("lengths", [(37, 37), (5, 37), (37, 5)])
@pytest.mark.parametrize(
    "causal, window", [(False, None), (True, None), (True, (9, 3)), (False, (4, 6)), (False, (-1, 2))]
)
def test_sixteen_bits_are_attention_by_the_definition(lengths, causal, window):
    q, k, v = inputs(queries=lengths[0], keys=lengths[1])
    left, right = window or (None, None)
    right = 0 if causal else right
    expected, expected_lse = float64_attention(q, k, v, 0.3, None if left == -1 else left, right)
    options = {"causal": causal, "window": window, "softmax_scale": 0.3, "return_lse": True}
    o, lse = flamia.attention(q, k, v, recipe="bf16", **options)
    assert torch.allclose(o.double(), expected, atol=2**-6, rtol=2**-6)  # P and O are rounded to BF16, values are O(1)
    assert torch.allclose(lse.double(), expected_lse, atol=1e-5)  # LSE is not: float32


@pytest.mark.parametrize("recipe", ["mxfp8/strict", "mxfp8/fast", "nvfp4_fp8/fold", "bf16"])
@pytest.mark.parametrize("lengths", [(37, 37), (5, 37), (37, 5)])
def test_a_batch_is_a_pack_of_equal_documents(recipe, lengths):
    q, k, v = inputs(queries=lengths[0], keys=lengths[1])
    options = {"causal": True, "window": (20, 0), "recipe": recipe, "return_lse": True}
    o, lse = flamia.attention(q, k, v, **options)
    p, packed_lse = flamia.attention_varlen(
        packed(q), packed(k), packed(v), even(2, lengths[0]), cu_seqlens_k=even(2, lengths[1]), **options
    )
    assert o.shape == (2, lengths[0], 4, 8) and o.dtype == q.dtype and o.is_contiguous()
    assert lse.shape == (2, 4, lengths[0]) and lse.dtype == torch.float32 and lse.is_contiguous()
    assert p.shape == (2 * lengths[0], 4, 8) and packed_lse.shape == (4, 2 * lengths[0])
    assert torch.equal(packed(o), p)
    assert torch.equal(lse.transpose(0, 1).flatten(1), packed_lse)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_both_dtypes_run_and_gradients_have_them(dtype):
    tensors = [x.requires_grad_() for x in inputs(dtype=dtype)]
    o = flamia.attention(*tensors, causal=True)
    assert o.dtype == dtype
    for x, dx in zip(tensors, torch.autograd.grad(o.float().square().sum(), tensors), strict=True):
        assert dx.dtype == dtype and dx.shape == x.shape and dx.isfinite().all() and dx.any()


def test_one_value_unless_lse_is_asked_for():
    q, k, v = inputs()
    for call in (flamia.attention, flamia.flash_attn_func):
        assert isinstance(call(q, k, v), torch.Tensor)
        assert len(call(q, k, v, return_lse=True)) == 2
    assert len(flamia.flash_attn_func(q, k, v, return_attn_probs=True)) == 2


def test_recipes_by_object_text_and_default():
    q, k, v = inputs(queries=200, keys=200)
    default = flamia.attention(q, k, v, causal=True)
    fast = flamia.attention(q, k, v, causal=True, recipe=Recipe.fast())
    assert torch.equal(default, flamia.attention(q, k, v, causal=True, recipe="mxfp8_scores/strict"))
    assert torch.equal(default, flamia.attention(q, k, v, causal=True, recipe=Recipe.strict()))
    assert torch.equal(fast, flamia.attention(q, k, v, causal=True, recipe="mxfp8/fast"))
    assert not torch.equal(default, fast)


def test_default_scale_and_causal_window():
    q, k, v = inputs()
    assert torch.equal(flamia.attention(q, k, v), flamia.attention(q, k, v, softmax_scale=0.25))
    causal = flamia.attention(q, k, v, causal=True)
    for window in (None, (-1, -1), (None, 0), (36, 5), (1000, 1000)):
        assert torch.equal(causal, flamia.attention(q, k, v, causal=True, window=window))
    assert torch.equal(causal, flamia.attention(q, k, v, window=(-1, 0)))


# ------------------------------------------------------------------------------------ flash-attention's names and order


def test_names_and_order_are_flash_attentions():
    positional = {
        flamia.flash_attn_func: "q k v softmax_scale causal window_size",
        flamia.flash_attn_varlen_func: "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k",
    }
    for function, names in positional.items():
        parameters = inspect.signature(function).parameters.values()
        assert [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD] == names.split()


def test_drop_ins_equal_the_functions_they_rename():
    q, k, v = inputs()
    expected = flamia.attention(q, k, v, causal=True, window=(9, 0), softmax_scale=0.3)
    assert torch.equal(flamia.flash_attn_func(q, k, v, 0.3, True, (9, -1)), expected)
    cu = even(2, 37)
    varlen = flamia.flash_attn_varlen_func(
        packed(q), packed(k), packed(v), cu, cu, 37, 37, softmax_scale=0.3, causal=True, window_size=(9, 0)
    )
    assert torch.equal(varlen, packed(expected))


HINTS = [
    {"deterministic": True},
    {"deterministic": False},
    {"num_splits": 4},
    {"pack_gqa": True},
    {"sm_margin": 8},
    {"dropout_p": 0.0, "softcap": 0.0, "alibi_slopes": None, "attention_chunk": 0, "block_table": None, "qv": None},
]


@pytest.mark.parametrize("hints", HINTS, ids=lambda hints: next(iter(hints)))
def test_hints_and_switched_off_features_change_no_bit(hints):
    q, k, v = inputs()
    assert torch.equal(
        flamia.flash_attn_func(q, k, v, causal=True, **hints), flamia.flash_attn_func(q, k, v, causal=True)
    )


@pytest.mark.parametrize("longest", [37, 38, 4096, None, torch.tensor(37), torch.tensor(1)])
def test_max_seqlen_changes_no_bit(longest):
    q, k, v = (packed(x) for x in inputs())
    cu = even(2, 37)
    expected = flamia.attention_varlen(q, k, v, cu, causal=True)
    assert torch.equal(flamia.flash_attn_varlen_func(q, k, v, cu, cu, longest, longest, causal=True), expected)


# ----------------------------------------------------------------------------------------------------- the environment


def test_ambient_settings_change_no_bit():
    """Autocast, default dtype and matmul precision are the caller's: they must not reach into the arithmetic."""
    tensors = [x.requires_grad_() for x in inputs(queries=150, keys=150)]

    def run():
        o, lse = flamia.attention(*tensors, causal=True, return_lse=True)
        return o, lse, *torch.autograd.grad(o, tensors, torch.ones_like(o))

    plain = run()
    default, precision = torch.get_default_dtype(), torch.get_float32_matmul_precision()
    try:
        for dtype in (torch.float64, torch.bfloat16):
            torch.set_default_dtype(dtype)
            assert all(torch.equal(x, y) for x, y in zip(run(), plain, strict=True)), dtype
        torch.set_default_dtype(default)
        torch.set_float32_matmul_precision("medium")
        assert all(torch.equal(x, y) for x, y in zip(run(), plain, strict=True))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert all(torch.equal(x, y) for x, y in zip(run(), plain, strict=True))
    finally:
        torch.set_default_dtype(default)
        torch.set_float32_matmul_precision(precision)


def test_inference_mode():
    q, k, v = inputs()
    with torch.inference_mode():
        assert torch.equal(flamia.attention(q, k, v), flamia.attention(q, k, v))


def test_audit_is_a_function_and_a_package(monkeypatch):
    from flamia.audit import audit_callable, audit_recipes

    assert sys.modules["flamia.audit"] is flamia.audit and audit_recipes is flamia.audit.audit_recipes
    monkeypatch.setattr(flamia.audit, "audit_callable", lambda *args, **options: (args, options))
    assert flamia.audit(len, seed=3) == ((len,), {"seed": 3}) and callable(audit_callable)


def test_audit_is_there_without_being_imported():
    code = "import flamia; print('flamia.audit' in __import__('sys').modules, callable(flamia.audit))"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.split() == ["False", "True"]


def test_public_names():
    for name in flamia.__all__:
        assert name in dir(flamia) and getattr(flamia, name) is not None
    with pytest.raises(AttributeError, match="attend"):
        flamia.attend  # noqa: B018
