"""A Hugging Face model with flamia's attention: it trains as with its own, keeps documents apart, honours windows and
padding, decodes through the cache what it was trained to do, and refuses what it cannot."""

import functools

import pytest
import torch
from integrations.hf import config, error, model, positions, registered, tokens
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import AutoModelForCausalLM, DynamicCache

import flamia
from flamia import UnsupportedError
from flamia.integrations import transformers as integration

STRICT = registered("mxfp8/strict")
SHARP = registered("bf16")


def step(net, ids, **options):
    """(loss, logits, all gradients in one vector) of one training step."""
    net.zero_grad()
    options = {"labels": ids, "use_cache": False, **options}
    out = net(input_ids=ids, **options)
    out.loss.backward()
    return out.loss.item(), out.logits.detach(), torch.cat([p.grad.flatten() for p in net.parameters()])


@functools.cache
def exact_step(kind):
    """In float32 with transformers' own attention, from the same bfloat16 weights."""
    net = model(kind, "eager", torch.float32)
    net.load_state_dict(model(kind, "eager").state_dict())
    return step(net, tokens(2, 150))


# --------------------------------------------------------------------------------------------------------- a step


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "sliding", "mixed"])
def test_bf16_is_as_exact_as_the_eager_attention(kind):
    """Two layers of 16-bit arithmetic around it make about 1%; the attention may add nothing to that."""
    exact = exact_step(kind)
    eager, ours = (step(model(kind, name), tokens(2, 150)) for name in ("eager", SHARP))
    for mine, theirs, right in zip(ours[1:], eager[1:], exact[1:]):
        assert error(mine, right) < 1.25 * error(theirs, right) < 0.025


@pytest.mark.parametrize("kind", ["llama", "qwen3", "mixed"])
@pytest.mark.parametrize(
    ("recipe", "logits", "gradients"),
    [("mxfp8/strict", 0.025, 0.035), (None, 0.06, 0.09), ("nvfp4_fp8/strict", 0.055, 0.07)],
)
def test_a_step_equals_the_exact_one_within_the_recipe_s_error(kind, recipe, logits, gradients):
    exact, ours = exact_step(kind), step(model(kind, registered(recipe)), tokens(2, 150))
    assert abs(ours[0] - exact[0]) < 0.01
    assert 0.005 < error(ours[1], exact[1]) < logits
    assert error(ours[2], exact[2]) < gradients


def test_it_learns():
    net = model("llama", STRICT)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    losses = []
    for _ in range(8):
        losses.append(step(net, tokens(1, 60))[0])
        optimizer.step()
    assert losses[-1] < 0.7 * losses[0]


def test_under_autocast_a_float32_model_runs_and_without_it_is_told_what_to_do():
    net = model("llama", SHARP, torch.float32)
    net.load_state_dict(model("llama", SHARP).state_dict())
    with pytest.raises(ValueError, match=r"float32 .* torch\.bfloat16"):
        step(net, tokens(2, 150))
    with torch.autocast("cpu", torch.bfloat16):
        _, logits, gradients = step(net, tokens(2, 150))
    exact = exact_step("llama")
    assert error(logits, exact[1]) < 0.02 and error(gradients, exact[2]) < 0.03


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_has_the_same_bits(reentrant):
    net, ids = model("mixed", STRICT), tokens(1, 90)
    packed = {"position_ids": positions(33, 57)}
    plain = step(net, ids, **packed)
    net.gradient_checkpointing_enable({"use_reentrant": reentrant})
    net.train()
    assert torch.equal(step(net, ids, **packed)[2], plain[2])


# ------------------------------------------------------------------------------------------------------- documents

LENGTHS = (33, 1, 70, 46)


@pytest.mark.parametrize("use_cache", [False, True])
@pytest.mark.parametrize("kind", ["llama", "mixed"])
def test_packed_positions_are_documents(kind, use_cache):
    """A document's logits do not change by a bit with the others. transformers' own masks forget documents once there is
    a cache, which a configuration has by default."""
    net, ids, other = model(kind, STRICT), tokens(1, 150), tokens(1, 150, seed=1)
    other[:, 34:104] = ids[:, 34:104]
    call = functools.partial(net, position_ids=positions(*LENGTHS), use_cache=use_cache)
    with torch.no_grad():
        first, second, alone = call(ids).logits, call(other).logits, net(ids[:, 34:104]).logits
    assert torch.equal(first[:, 34:104], second[:, 34:104])
    assert not torch.equal(first[:, 104:], second[:, 104:])
    assert error(first[:, 34:104], alone) < 0.01  # other shapes: other roundings in the linear layers


def test_documents_keep_the_gradients_of_others_out():
    net, ids = model("llama", STRICT), tokens(1, 150)
    embedded = net.get_input_embeddings()(ids).detach().requires_grad_()
    net(inputs_embeds=embedded, position_ids=positions(*LENGTHS)).logits[:, 34:104].float().square().sum().backward()
    inside = embedded.grad[:, 34:104]
    assert inside.any() and embedded.grad.abs().sum() == inside.abs().sum()


def attend(name, module, mask, q, k, v, **options):
    return integration._interfaces()[0]._global_mapping[name](module, q, k, v, mask, scaling=0.25, **options)[0]


def heads(length, seed=0, batch=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(batch, h, length, 16, generator=generator).bfloat16() for h in (4, 2, 2)]


@pytest.mark.parametrize("kind", ["llama", "sliding"])
def test_packed_equals_separate_bit_for_bit(kind):
    net = model(kind, STRICT)
    layer, window = net.model.layers[0].self_attn, getattr(net.config, "sliding_window", None)
    q, k, v = heads(150)
    mask = mask_of(net, positions(*LENGTHS))
    packed = attend(STRICT, layer, mask, q, k, v, sliding_window=window)
    at = 0
    for length in LENGTHS:
        one = (x[:, :, at : at + length] for x in (q, k, v))
        alone = attend(STRICT, layer, mask_of(net, positions(length)), *one, sliding_window=window)
        assert torch.equal(packed[:, at : at + length], alone)
        at += length


def mask_of(net, position_ids, batch=1, padding=None, cache=None):
    """The mask that transformers has built for this model by its own helper."""
    from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

    create = create_causal_mask
    if getattr(net.config, "sliding_window", None) is not None:
        create = create_sliding_window_causal_mask
    embeds = torch.zeros(batch, position_ids.shape[1], 64, dtype=torch.bfloat16)
    return create(net.config, embeds, padding, cache, position_ids=position_ids)


def test_offsets_given_as_transformers_flash_attention_takes_them():
    net, ids = model("llama", STRICT), tokens(1, 150)
    by_positions = step(net, ids, position_ids=positions(*LENGTHS))
    cu = torch.tensor([0, 33, 34, 104, 150])
    arguments = {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": 70, "max_length_k": 70}
    flat = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    by_offsets = step(net, ids, position_ids=flat, **arguments)
    assert torch.equal(by_positions[2], by_offsets[2])
    with pytest.raises(ValueError, match="come together"):
        step(net, ids, cu_seq_lens_q=cu)


def test_documents_of_every_row_of_a_batch():
    net, ids = model("llama", STRICT), tokens(2, 40)
    rows = torch.cat([positions(10, 30), positions(25, 15)])
    with torch.no_grad():
        both = net(ids, position_ids=rows).logits
        each = torch.cat([net(ids[i : i + 1], position_ids=rows[i : i + 1]).logits for i in range(2)])
        whole = net(ids).logits
    assert error(both, each) < 0.01 and error(both, whole) > 0.1


def test_most_documents_change_no_bit_and_too_many_are_an_error():
    net, bounded, ids = (
        model("llama", STRICT),
        model("llama", registered("mxfp8/strict", max_documents=5)),
        tokens(1, 150),
    )
    packed = {"position_ids": positions(*LENGTHS)}
    assert torch.equal(step(net, ids, **packed)[2], step(bounded, ids, **packed)[2])
    with pytest.raises(UnsupportedError, match="max_documents=5"):
        step(bounded, ids, position_ids=positions(*LENGTHS[:3], 40, 5, 1))


# --------------------------------------------------------------------------------------------------------- padding


@pytest.mark.parametrize("kind", ["llama", "mixed"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_seen_by_nobody(kind, side):
    net, ids, other = model(kind, STRICT), tokens(2, 50), tokens(2, 50, seed=1)
    padding = torch.ones(2, 50, dtype=torch.long)
    padded = slice(0, 12) if side == "left" else slice(38, None)
    padding[1, padded] = 0
    real = ids.clone()
    ids[1, padded] = other[1, padded]
    where = (padding.cumsum(-1) - 1).clamp_min(0)
    with torch.no_grad():
        first, second = (net(x, attention_mask=padding, position_ids=where).logits for x in (ids, real))
        alone = net(real[1:, padding[1].bool()]).logits
        eager = model(kind, "eager")(real, attention_mask=padding, position_ids=where).logits
    assert torch.equal(first[padding.bool()], second[padding.bool()])
    assert error(first[1:, padding[1].bool()], alone) < 0.01
    assert error(first[padding.bool()], eager[padding.bool()]) < 0.03


def test_padding_without_positions():
    net, ids, other = model("llama", STRICT), tokens(2, 50), tokens(2, 50, seed=1)
    padding = torch.ones(2, 50, dtype=torch.long)
    padding[1, :12] = 0
    other[padding.bool()] = ids[padding.bool()]
    with torch.no_grad():
        first, second = (net(x, attention_mask=padding).logits[padding.bool()] for x in (ids, other))
    assert torch.equal(first, second)


def test_padding_hides_no_documents():
    """Both at once: transformers' own masks look at the padding only."""
    net, ids, other = model("llama", STRICT), tokens(1, 50), tokens(1, 50, seed=1)
    other[:, 20:] = ids[:, 20:]
    padding = torch.ones(1, 50, dtype=torch.long)
    padding[:, 45:] = 0
    with torch.no_grad():
        first, second = (net(x, attention_mask=padding, position_ids=positions(20, 25, 5)).logits for x in (ids, other))
    assert torch.equal(first[:, 20:], second[:, 20:])


# -------------------------------------------------------------------------------------------------------- decoding


def greedy(net, ids, count, **options):
    options = {"max_new_tokens": count, "do_sample": False, "pad_token_id": 0, **options}
    return net.generate(ids, **options)[:, ids.shape[1] :]


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("kind", ["llama", "mixed"])
def test_generation_equals_recomputing_everything(kind, cache):
    """Also with a row that is padded on the left, and over the edge of the window."""
    net, ids = model(kind, STRICT).eval(), tokens(2, 30)
    padding = torch.ones_like(ids)
    padding[1, :9] = 0
    options = {"attention_mask": padding, "disable_compile": True}
    cached = greedy(net, ids, 12, cache_implementation=cache, **options)
    plain = greedy(net, ids, 12, use_cache=False, **options)
    assert torch.equal(cached, plain)
    assert len(set(plain[0].tolist())) > 3  # not one token for ever


@pytest.mark.parametrize("kind", ["llama", "sliding"])
def test_a_decoded_token_has_the_bits_of_the_whole_sequence(kind):
    net = model(kind, STRICT)
    layer, window = net.model.layers[0].self_attn, getattr(net.config, "sliding_window", None)
    q, k, v = heads(140, batch=2)
    padding = torch.ones(2, 140, dtype=torch.long)
    padding[1, :20] = 0
    where = (padding.cumsum(-1) - 1).clamp_min(0)
    whole = attend(STRICT, layer, mask_of(net, where, 2, padding), q, k, v, sliding_window=window)
    cache = DynamicCache(config=net.config)
    for first, last in ((0, 60), (60, 128), (128, 129), (129, 140)):
        new = slice(first, last)
        mask = mask_of(net, where[:, new], 2, padding[:, :last], cache)
        keys, values = cache.update(k[:, :, new], v[:, :, new], 0)
        part = attend(
            STRICT, layer, mask, q[:, :, new], keys, values, sliding_window=window, position_ids=where[:, new]
        )
        assert keys.shape[2] == (last if window is None else min(last, last - first + window - 1))
        if window is None or first == 0:
            assert torch.equal(part, whole[:, new])
        else:  # a cache of the window's tokens forgets where blocks begin
            assert error(part, whole[:, new]) < 0.03


@pytest.mark.parametrize("kind", ["llama", "sliding"])
def test_a_packed_prefill_is_not_gone_on_with(kind):
    """Its cache holds keys of all documents, which nothing tells apart. (Under a window they are soon forgotten.)"""
    net, ids = model(kind, STRICT).eval(), tokens(1, 30)
    cache = DynamicCache(config=net.config)
    net(ids, position_ids=positions(12, 18), past_key_values=cache)
    with pytest.raises(UnsupportedError, match="fewer tokens than the cache holds"):
        net(ids[:, :1], position_ids=torch.tensor([[18]]), past_key_values=cache)


def test_the_audit_of_a_whole_model_is_clean():
    report = flamia.audit_model(model("llama", STRICT), effort="spot")
    assert report.verdict == "clean", str(report)
    assert {"prefix", "batch", "decode"} <= {contract for contract, _ in report.tried}


# ----------------------------------------------------------------------------------------------------- compilation


@pytest.mark.parametrize(("kind", "most"), [("llama", None), ("mixed", 8)])
def test_one_graph_for_all_packings(kind, most, fresh_compiler):
    net, ids = model(kind, registered("mxfp8/strict", max_documents=most)), tokens(1, 150)
    packings = [(150,), LENGTHS, (1, 149), (10, 20, 30, 90), (75, 75)]
    plain = [step(net, ids, position_ids=positions(*lengths))[2] for lengths in packings]
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(net, fullgraph=True, backend=counter)
    for lengths, expected in zip(packings, plain, strict=True):
        out = compiled(input_ids=ids, labels=ids, use_cache=False, position_ids=positions(*lengths))
        net.zero_grad()
        out.loss.backward()
        assert torch.equal(torch.cat([p.grad.flatten() for p in net.parameters()]), expected)
    assert counter.frame_count == 1
    if most is not None:
        with pytest.raises(RuntimeError, match="max_documents=8"):
            compiled(input_ids=ids, labels=ids, use_cache=False, position_ids=positions(*[10] * 8, 70))
        assert counter.frame_count == 1


# --------------------------------------------------------------------------------------------------------- refusals


def test_dropout_and_soft_caps_are_refused():
    net = model("llama", SHARP, attention_dropout=0.1)
    net.eval()(tokens(1, 8))
    with pytest.raises(UnsupportedError, match=r"attention_dropout = 0\.0"):
        net.train()(tokens(1, 8))
    with pytest.raises(UnsupportedError, match="softcap is not supported"):
        model("gemma2", SHARP)(tokens(1, 8))
    model("gemma2", SHARP, attn_logit_softcapping=None)(tokens(1, 8))
    with pytest.raises(UnsupportedError, match="output_attentions"):
        attend(SHARP, model("llama", SHARP).model.layers[0].self_attn, None, *heads(8), output_attentions=True)


def test_head_sizes_are_checked():
    with pytest.raises(UnsupportedError, match=r"1\.\.256, got 272"):
        model("llama", SHARP, head_dim=272)(tokens(1, 8))


def test_masks_that_are_not_documents_are_refused():
    net, ids = model("llama", SHARP), tokens(1, 30)
    for mask in (torch.zeros(1, 1, 30, 30), torch.ones(1, 1, 30, 30, dtype=torch.bool)):
        with pytest.raises(UnsupportedError, match="cannot be honoured: give a padding mask"):
            net(ids, attention_mask=mask)
    gap = torch.ones(1, 30, dtype=torch.long)
    gap[:, 10:12] = 0
    with pytest.raises(UnsupportedError, match="attention_mask has a gap"):
        net(ids, attention_mask=gap)
    with pytest.raises(UnsupportedError, match=r"position_ids of shape \(3, 1, 30\)"):
        attend(SHARP, net.model.layers[0].self_attn, None, *heads(30), position_ids=torch.zeros(3, 1, 30))


def test_a_bidirectional_model_is_refused():
    net = AutoModelForCausalLM.from_config(config("llama", is_causal=False), attn_implementation=SHARP).bfloat16()
    with pytest.raises(UnsupportedError, match="not causal attention"):
        net(tokens(1, 30))


def test_names_and_options_are_checked():
    for name in ("sdpa", "flash_attention_2", "my/attention", "flex_attention", "", None):
        with pytest.raises(ValueError, match="name="):
            integration.register(name=name)
    with pytest.raises(ValueError, match="no route 'mxfp9'"):
        integration.register("mxfp9/strict", "another")
    for most in (0, -1, 2.0, True):
        with pytest.raises(ValueError, match="max_documents"):
            integration.register(max_documents=most)
    with pytest.raises(ValueError, match="backend"):
        integration.register(backend="tpu")
    assert integration.register() == "flamia" and integration.register("bf16") == "flamia"


def test_an_unsupported_backend_is_named():
    with pytest.raises(UnsupportedError, match="backend='hopper'"):
        model("llama", registered(None, backend="hopper"))(tokens(1, 8))


@torch.inference_mode()
def test_inference_tensors_are_read_again():
    """They count no changes, so positions edited in place must not meet the offsets of before."""
    bits = integration._plain(1, 6, 6, torch.device("cpu"))
    positions = torch.arange(6)[None]
    before = integration.documents(bits, positions, 6, None)[0].tolist()
    positions[0, 3:] -= 3
    after = integration.documents(bits, positions, 6, None)[0].tolist()
    assert after != before and 3 in after
