"""What is refused, and whether the refusal teaches: every message must name the argument, its value and the rule."""

import math
from functools import partial

import pytest
import torch

import flamia
from flamia import UnsupportedError, validation

BF16 = torch.bfloat16


def offsets(*values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype)


def inputs(tokens=16, heads=4, key_heads=2, dim=8, dtype=BF16):
    return [torch.randn(tokens, h, dim).to(dtype) for h in (heads, key_heads, key_heads)]


def refuses(call, *words, error=ValueError):
    with pytest.raises(error) as caught:
        call()
    for word in words:
        assert str(word) in str(caught.value), f"{word!r} is not in: {caught.value}"


# ---------------------------------------------------------------------------------------------------------- tensors


@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("wrong", [torch.float32, torch.float64, torch.float8_e4m3fn, torch.int8])
def test_other_dtypes_are_refused_with_the_cast_to_write(name, wrong):
    tensors = dict(zip("qkv", inputs()))
    tensors[name] = tensors[name].to(wrong)
    refuses(lambda: flamia.attention_varlen(**tensors, cu_seqlens=offsets(0, 16)), name, wrong, f"{name}.to(torch.")


# From flash-attention #1159, pytorch #165944: autocast made two of three tensors float32, and the error named neither.
@pytest.mark.parametrize("mix", ["bbf", "bfb", "fbb", "bff", "fbf", "ffb"])
def test_mixed_dtypes_name_the_tensor_and_the_dtype(mix):
    kinds = {"b": torch.bfloat16, "f": torch.float16}
    q, k, v = (x.to(kinds[kind]) for x, kind in zip(inputs(), mix))
    name, odd = ("k", k) if k.dtype != q.dtype else ("v", v)
    refuses(lambda: flamia.attention_varlen(q, k, v, offsets(0, 16)), f"q is {q.dtype}", f"{name} is {odd.dtype}")


def test_float32_from_autocast_is_refused_and_sixteen_bits_pass():
    q, k, v = inputs()
    with torch.autocast("cpu", dtype=BF16):
        q32 = q * torch.ones(8)  # an elementwise product with a float32 parameter, as in a norm, is not autocast
        refuses(lambda: flamia.attention_varlen(q32, k, v, offsets(0, 16)), "q must be bfloat16", "float32")
        inside = flamia.attention_varlen(q, k, v, offsets(0, 16))
    assert torch.equal(inside, flamia.attention_varlen(q, k, v, offsets(0, 16)))


def test_shapes():
    q, k, v = inputs()
    cu = offsets(0, 16)
    refuses(lambda: flamia.attention(q, k, v), "q must have shape (batch, tokens, heads, dim)", (16, 4, 8))
    refuses(lambda: flamia.attention_varlen(q[None], k, v, cu), "q must have shape (total tokens", (1, 16, 4, 8))
    refuses(lambda: flamia.attention_varlen(q, k[:15], v, cu), "k and v must agree", (15, 2, 8))
    refuses(lambda: flamia.attention_varlen(q, k, v[:, :1], cu), "k and v must agree", (16, 1, 8))
    refuses(lambda: flamia.attention_varlen(q[..., :6], k, v, cu), "same head dimension", 6, 8)
    refuses(lambda: flamia.attention_varlen(q[:, :3], k, v, cu), "multiple of the key heads", 3, 2)
    refuses(lambda: flamia.attention_varlen(q[:, :0], k, v, cu), "q must have at least one head")
    refuses(lambda: flamia.attention(q[None], k[None].expand(2, -1, -1, -1), v[None].expand(2, -1, -1, -1)), "batch")
    refuses(lambda: flamia.attention_varlen(q.tolist(), k, v, cu), "q must be a torch.Tensor", "list")


def test_head_dimensions_up_to_256():
    q, k, v = inputs(tokens=2, dim=256)
    assert flamia.attention_varlen(q, k, v[..., :80], offsets(0, 2)).shape == (2, 4, 80)
    wide = torch.zeros(2, 1, 257, dtype=BF16)
    refuses(lambda: flamia.attention_varlen(wide, wide, wide, offsets(0, 2)), "of q", 256, 257, error=UnsupportedError)
    refuses(
        lambda: flamia.attention_varlen(q, k, wide.expand(2, 2, 257), offsets(0, 2)), "of v", error=UnsupportedError
    )
    refuses(lambda: flamia.attention_varlen(q, k, v[..., :0], offsets(0, 2)), "of v", 0, error=UnsupportedError)


def test_nested_and_sparse_are_refused():
    q, k, v = inputs()
    nested = torch.nested.nested_tensor([q[:4], q[4:]], layout=torch.jagged)
    refuses(lambda: flamia.attention_varlen(nested, k, v, offsets(0, 16)), "q", "strided", error=UnsupportedError)
    refuses(lambda: flamia.attention_varlen(q.to_sparse(), k, v, offsets(0, 16)), "q", "sparse", error=UnsupportedError)


def test_devices():
    q, k, v = inputs()
    refuses(lambda: flamia.attention_varlen(q, k.to("meta"), v, offsets(0, 16)), "k is on meta", "k.to('cpu')")
    refuses(lambda: flamia.attention_varlen(q, k, v, offsets(0, 16).to("meta")), "device of q", "cu_seqlens.to('cpu')")


# ---------------------------------------------------------------------------------------------------------- offsets

BAD_OFFSETS = {  # from sgl-flash-attn #47 and transformers #44911, where these ran: silent corruption, or a far crash
    "first is not 0": ((4, 16), "must start at 0, got 4; if these are lengths, write"),
    "negative first": ((-1, 16), "must start at 0, got -1"),
    "decreasing": ((0, 12, 8, 16), "entry 1 is 12, entry 2 is 8"),
    "decreasing at the end": ((0, 16, 15), "entry 1 is 16, entry 2 is 15"),
    "negative inside": ((0, -3, 16), "entry 0 is 0, entry 1 is -3"),
    "last beyond the buffer": ((0, 8, 768), "buffer of 16 rows, but its last entry is 768"),
    "one beyond the buffer": ((0, 17), "buffer of 16 rows, but its last entry is 17"),
}


@pytest.mark.parametrize("bad", BAD_OFFSETS)
@pytest.mark.parametrize("which", ["cu_seqlens", "cu_seqlens_k"])
def test_bad_offset_values(bad, which):
    values, message = BAD_OFFSETS[bad]
    good = offsets(*[0] * (len(values) - 1), 16)
    vectors = {"cu_seqlens": good, "cu_seqlens_k": good, which: offsets(*values)}
    refuses(lambda: flamia.attention_varlen(*inputs(), **vectors), which, message)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int16, torch.uint8, torch.float32, torch.bool])
def test_offsets_are_int32_and_the_refused_dtype_is_named(dtype):
    refuses(
        lambda: flamia.attention_varlen(*inputs(), offsets(0, 1, dtype=dtype)),
        "cu_seqlens",
        "int32",
        dtype,
        ".to(torch.int32)",
    )


def test_offset_shapes():
    for shape in ((), (1, 2), (0,)):
        cu = torch.zeros(shape, dtype=torch.int32)
        refuses(partial(flamia.attention_varlen, *inputs(), cu), "cu_seqlens must have shape", shape)
    refuses(lambda: flamia.attention_varlen(*inputs(), [0, 16]), "cu_seqlens", "tensor", "list")


def test_half_given_packing_raises():
    """transformers #46634, #47170: packing information was dropped on the way, and documents attended to each other."""
    q, k, v = inputs()
    cu = offsets(0, 8, 16)
    refuses(lambda: flamia.attention_varlen(q, k, v, None), "cu_seqlens is missing")
    refuses(lambda: flamia.attention_varlen(q, k, v, None, cu_seqlens_k=cu), "cu_seqlens is missing")
    refuses(lambda: flamia.attention_varlen(q, k, v, cu, cu_seqlens_k=offsets(0, 16)), "same documents", "2 and 1")
    refuses(lambda: flamia.attention_varlen(q, k[:12], v[:12], cu), "16 rows", "12", "give cu_seqlens_k")
    refuses(lambda: flamia.flash_attn_varlen_func(q, k, v, cu, None, 8, 8), "cu_seqlens_k is missing")
    refuses(lambda: flamia.flash_attn_varlen_func(q, k, v, None, cu, 8, 8), "cu_seqlens_q is missing")
    with pytest.raises(TypeError):
        flamia.attention_varlen(q, k, v)
    with pytest.raises(TypeError):
        flamia.flash_attn_varlen_func(q, k, v, cu, cu)


def test_document_longer_than_the_hint():
    q, k, v = inputs()
    cu = offsets(0, 6, 16)
    refuses(lambda: flamia.flash_attn_varlen_func(q, k, v, cu, cu, 9, 10), "cu_seqlens_q", "document 1", 10, 9)
    refuses(lambda: flamia.flash_attn_varlen_func(q, k, v, cu, cu, 10, 9), "cu_seqlens_k", "document 1", 10, 9)
    for bad in (-1, True, 10.0, "10"):
        refuses(partial(flamia.flash_attn_varlen_func, q, k, v, cu, cu, bad, 10), "max_seqlen_q", repr(bad))


@pytest.mark.parametrize("values", [(0, 12, 8, 16), (3, 768), (-5, -2, 9), (2**31 - 1, -(2**31)), (0, 3, 3, 7)])
def test_clamped_offsets_stay_in_the_buffer(values):
    clamped = validation.clamp_offsets(offsets(*values), 10)
    assert clamped.dtype == torch.int32
    listed = clamped.tolist()
    assert listed[0] == 0 and listed == sorted(listed) and listed[-1] <= 10
    if values == (0, 3, 3, 7):
        assert listed == [0, 3, 3, 7]


def test_unchecked_bad_offsets_run_without_leaving_the_buffer():
    """What happens on a device by default, tried on the CPU: a wrong document, but no access outside a buffer."""
    q, k, v = inputs()
    good = flamia.attention_varlen(q, k, v, offsets(0, 12, 12, 16), causal=True)
    bad = flamia.attention_varlen(q, k, v, offsets(0, 12, 8, 768), causal=True, check_offsets=False)
    assert torch.equal(bad, good)
    refuses(lambda: flamia.attention_varlen(q, k, v, offsets(0, 16), check_offsets=1), "check_offsets", 1)


# ---------------------------------------------------------------------------------------------------------- options


def test_windows():
    q, k, v = inputs()
    cu = offsets(0, 16)
    for bad in (3, (1,), (1, 2, 3), (-2, 0), (0, -7), (1.0, 0), (True, 0), "ab", (torch.tensor(1), 0)):
        refuses(partial(flamia.attention_varlen, q, k, v, cu, window=bad), "window")
    refuses(lambda: flamia.attention_varlen(q, k, v, cu, window=40), "got 40", "are (39, 0)")
    refuses(lambda: flamia.flash_attn_func(q[None], k[None], v[None], window_size=(-2, 0)), "window_size", "left", -2)
    assert validation.window_sides(False, None) == validation.window_sides(False, (-1, None)) == (-1, -1)
    assert validation.window_sides(True, (4, 9)) == validation.window_sides(True, [4, -1]) == (4, 0)
    assert validation.window_sides(False, (4, 9)) == (4, 9)


@pytest.mark.parametrize("scale", [0.0, -1.0, math.inf, math.nan, True, "1", torch.tensor(1.0)])
def test_softmax_scale(scale):
    refuses(lambda: flamia.attention_varlen(*inputs(), offsets(0, 16), softmax_scale=scale), "softmax_scale")


def test_flags_and_names():
    q, k, v = inputs()
    cu = offsets(0, 16)
    refuses(lambda: flamia.attention_varlen(q, k, v, cu, causal=0.125), "causal must be True or False", 0.125)
    refuses(lambda: flamia.attention_varlen(q, k, v, cu, return_lse=1), "return_lse", 1)
    refuses(lambda: flamia.attention_varlen(q, k, v, cu, backend="cuda"), "backend", "'cuda'", "hopper", "reference")
    refuses(lambda: flamia.attention_varlen(q, k, v, cu, recipe="mxfp9/strict"), "mxfp9")
    refuses(lambda: flamia.attention_varlen(q, k, v, cu, recipe="MXFP8/strict"), "no route", "did you mean 'mxfp8'?")
    refuses(lambda: flamia.attention_varlen(q, k, v, cu, recipe="mxfp8/strct"), "no preset", "mean 'strict'?")
    refuses(lambda: flamia.attention_varlen(q, k, v, cu, recipe="mxfp8,lagg=2"), "no option 'lagg'", "mean 'lag'?")
    refuses(lambda: flamia.Recipe.strict("mxfp8", lagg=2), "no option 'lagg'", "mean 'lag'?", error=TypeError)
    refuses(lambda: flamia.attention_varlen(q, k, v, cu, recipe=flamia.Recipe.strict), "method", "Recipe.strict()")
    refuses(lambda: flamia.attention_varlen(q, k, v, cu, recipe=8), "recipe", "int")


UNSUPPORTED = {
    "dropout_p": 0.1,
    "softcap": 30.0,
    "alibi_slopes": torch.ones(4),
    "learnable_sink": torch.zeros(4),
    "block_table": torch.zeros(1, 1, dtype=torch.int32),
    "seqused_k": torch.zeros(1, dtype=torch.int32),
    "qv": torch.zeros(1),
    "q_descale": torch.ones(1),
    "attention_chunk": 64,
    "score_mod": lambda score: score,
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_flash_arguments_that_cannot_be_honoured(name):
    q, k, v = (x[None] for x in inputs())
    refuses(lambda: flamia.flash_attn_func(q, k, v, **{name: UNSUPPORTED[name]}), name, error=UnsupportedError)
    cu = offsets(0, 16)
    refuses(
        lambda: flamia.flash_attn_varlen_func(q[0], k[0], v[0], cu, cu, 16, 16, **{name: UNSUPPORTED[name]}),
        name,
        error=UnsupportedError,
    )


def test_unknown_keywords_are_type_errors():
    q, k, v = (x[None] for x in inputs())
    with pytest.raises(TypeError, match="dropout_probability"):
        flamia.flash_attn_func(q, k, v, dropout_probability=0.1)


def test_positional_arguments_of_another_version_raise():
    """flash-attention 2 has dropout_p in fourth place: read as a scale of 0, then a scale as `causal`."""
    q, k, v = (x[None] for x in inputs())
    for of_version_2 in ((0.0, 0.35, True), (0.1, 0.35, True), (0.1, None, True), (0.1,), (0.0,), (1,)):
        call = partial(flamia.flash_attn_func, q, k, v, *of_version_2)
        refuses(call, "fourth place", "softmax_scale=", of_version_2[0])
    refuses(lambda: flamia.flash_attn_func(q, k, v, 0.1, causal=True), "fourth place", "dropout_p")
    with pytest.raises(TypeError):
        flamia.flash_attn_func(q, k, v, None, True, (-1, -1), 0.0)
    named = flamia.flash_attn_func(q, k, v, softmax_scale=0.1, causal=True)
    assert torch.equal(flamia.flash_attn_func(q, k, v, 0.1, True), named)
    assert torch.equal(flamia.flash_attn_func(q, k, v, None), flamia.flash_attn_func(q, k, v))


# --------------------------------------------------------------------------------------------------------- backends


def test_hopper_on_the_cpu_says_why_and_what_to_do():
    refuses(
        lambda: flamia.attention_varlen(*inputs(), offsets(0, 16), backend="hopper"),
        "backend='hopper'", "cpu", "backend='reference'", error=UnsupportedError,
    )  # fmt: skip


def test_unsupported_is_a_value_error():
    assert issubclass(UnsupportedError, ValueError)
