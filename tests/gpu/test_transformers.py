"""Hugging Face models on a card, attention by the kernels: steps beside the eager attention's, documents, windows, padding and
caches, the whole of it compiled, and what is refused. Wherever a result must not move, it must not move by a bit."""

from __future__ import annotations

import functools
import os
import subprocess
import sys

import pytest
import torch

if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
    pytest.skip("needs an NVIDIA Hopper GPU", allow_module_level=True)
pytest.importorskip("transformers", minversion="5.0")

from calls import error, no_waiting
from integrations.hf import model, positions, registered, tokens
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import DynamicCache
from transformers.masking_utils import causal_mask_function, create_causal_mask, create_sliding_window_causal_mask

from flamia import UnsupportedError
from flamia.integrations import transformers as integration

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fresh_compiler")]
KERNELS, REFERENCE = registered(None), registered(None, backend="reference")
BOUNDED = registered(None, max_documents=8)
LENGTHS = (133, 1, 270, 196)
TOKENS = sum(LENGTHS)
MOST = (0.08, 0.11)  # errors of logits and gradients: those of the 8-bit scores, through two layers
SIZES = {"hidden_size": 256, "intermediate_size": 512, "initializer_range": 0.05, "max_position_embeddings": 1024}
CHANGES = {
    "llama": {"head_dim": 64},
    "llama 128": {"head_dim": 128},
    "qwen2": {"head_dim": 64},  # biases of q, k and v
    "qwen3": {"head_dim": 128},  # norms of q and k
    "sliding": {"head_dim": 64, "sliding_window": 100},
    "mixed": {"head_dim": 64, "sliding_window": 100},  # every second layer
}


def build(kind: str, name: str = KERNELS, dtype: torch.dtype = torch.bfloat16, **more):
    return model(kind.split()[0], name, dtype, **SIZES, **CHANGES[kind], **more).to("cuda")


def draw(batch: int = 1, length: int = TOKENS, seed: int = 0) -> torch.Tensor:
    return tokens(batch, length, seed).cuda()


def places(*lengths: int) -> torch.Tensor:
    return positions(*lengths).cuda()


def step(net, ids, call=None, **options):
    """loss, logits, and all gradients in one vector, of one training step."""
    net.zero_grad()
    out = (net if call is None else call)(input_ids=ids, labels=ids, use_cache=False, **options)
    out.loss.backward()
    return out.loss.detach(), out.logits.detach(), torch.cat([p.grad.flatten() for p in net.parameters()])


@functools.cache
def exact_step(kind: str, rows: tuple[tuple[int, ...], ...]):
    """In float32 with transformers' eager attention and its own masks, from the same bfloat16 weights."""
    net = build(kind, "eager", torch.float32)
    net.load_state_dict(build(kind, "eager").state_dict())
    where = torch.cat([places(*lengths) for lengths in rows])
    return step(net, draw(len(rows)), position_ids=where)


# ------------------------------------------------------------------------------------------------------------- steps


@pytest.mark.parametrize("rows", [((TOKENS,), (TOKENS,)), (LENGTHS, (300, 300))], ids=["whole", "packed"])
@pytest.mark.parametrize("kind", list(CHANGES))
def test_a_step_is_the_eager_attention_s_within_the_recipe_s_error(kind, rows, kernel_calls):
    """And as near to it as the reference is, which rounds the same things in float64."""
    where = torch.cat([places(*lengths) for lengths in rows])
    exact = exact_step(kind, rows)
    ours = step(build(kind), draw(2), position_ids=where)
    assert len(kernel_calls) == 2
    theirs = step(build(kind, REFERENCE), draw(2), position_ids=where)
    assert len(kernel_calls) == 2
    assert abs(ours[0] - exact[0]) < 0.01
    for mine, reference, right, most in zip(ours[1:], theirs[1:], exact[1:], MOST, strict=True):
        right = right.double()
        assert 0.002 < error(mine, right) < most
        assert error(mine, right) < 1.1 * error(reference, right) + 0.002


def test_it_learns_what_the_eager_attention_learns():
    losses = {}
    for name in (KERNELS, "eager"):
        net, ids = build("llama", name), draw()
        optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
        losses[name] = []
        for _ in range(12):
            losses[name].append(step(net, ids, position_ids=places(*LENGTHS))[0].item())
            optimizer.step()
    for mine, theirs in zip(losses[KERNELS][:5], losses["eager"][:5], strict=True):  # later ones part: they overfit
        assert abs(mine - theirs) < 0.02 * theirs
    assert max(x[-1] / x[0] for x in losses.values()) < 0.2


def test_a_float32_model_under_autocast():
    net = build("llama", dtype=torch.float32)
    net.load_state_dict(build("llama").state_dict())
    rows = ((TOKENS,), (TOKENS,))
    with pytest.raises(ValueError, match=r"float32 .* torch\.bfloat16"):
        step(net, draw(2))
    with torch.autocast("cuda", torch.bfloat16):
        got = step(net, draw(2), position_ids=places(TOKENS).expand(2, -1))
    exact = exact_step("llama", rows)
    assert all(error(x, y.double()) < most for x, y, most in zip(got[1:], exact[1:], MOST, strict=True))


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_has_the_same_bits(reentrant, kernel_calls):
    net, packed = build("mixed").train(), {"position_ids": places(*LENGTHS)}
    plain = step(net, draw(), **packed)
    net.gradient_checkpointing_enable({"use_reentrant": reentrant})
    kernel_calls.clear()
    assert torch.equal(step(net, draw(), **packed)[2], plain[2])
    assert len(kernel_calls) == 4


# --------------------------------------------------------------------------------------------------------- documents


@pytest.mark.parametrize("name", [KERNELS, BOUNDED], ids=["any number", "bounded"])
@pytest.mark.parametrize("use_cache", [False, True])
@pytest.mark.parametrize("kind", ["llama", "mixed"])
def test_packed_positions_are_documents(kind, use_cache, name):
    net, ids, other = build(kind, name), draw(), draw(seed=1)
    own = slice(134, 404)
    other[:, own] = ids[:, own]
    call = functools.partial(net, position_ids=places(*LENGTHS), use_cache=use_cache)
    with torch.no_grad():
        first, second, whole = call(ids).logits, call(other).logits, net(ids).logits
    assert torch.equal(first[:, own], second[:, own])
    assert not torch.equal(first[:, 404:], second[:, 404:])
    assert error(whole[:, own], first[:, own].double()) > 0.1  # without the positions they are one


def test_gradients_of_other_documents_are_zero():
    net, own = build("llama"), slice(134, 404)
    embedded = net.get_input_embeddings()(draw()).detach().requires_grad_()
    net(inputs_embeds=embedded, position_ids=places(*LENGTHS)).logits[:, own].float().square().sum().backward()
    outside = embedded.grad.clone()
    outside[:, own] = 0
    assert embedded.grad[:, own].any() and not outside.any()


def test_offsets_given_and_a_bound_change_no_bit():
    ids, by_positions = draw(), step(build("llama"), draw(), position_ids=places(*LENGTHS))[2]
    cu = torch.tensor([0, *LENGTHS]).cumsum(0).cuda()
    flat = places(*LENGTHS)
    given = {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": 270, "max_length_k": 270}
    assert torch.equal(step(build("llama"), ids, position_ids=flat, **given)[2], by_positions)
    assert torch.equal(step(build("llama", BOUNDED), ids, position_ids=flat)[2], by_positions)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", ["llama", "mixed"])
def test_padding_is_seen_by_nobody(kind, side):
    net, ids, other = build(kind), draw(2, 300), draw(2, 300, seed=1)
    padding = torch.ones(2, 300, dtype=torch.long, device="cuda")
    padding[1, slice(0, 70) if side == "left" else slice(230, None)] = 0
    real = padding.bool()
    other[real] = ids[real]
    where = (padding.cumsum(-1) - 1).clamp_min(0)
    with torch.no_grad():
        first, second = (net(x, attention_mask=padding, position_ids=where).logits for x in (ids, other))
        eager = build(kind, "eager")(ids, attention_mask=padding, position_ids=where).logits
    assert torch.equal(first[real], second[real])
    assert error(first[real], eager[real].double()) < MOST[0]


# ------------------------------------------------------------------------------------------------------------ caches


def heads(batch: int, length: int) -> list[torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    options = {"dtype": torch.bfloat16, "device": "cuda", "generator": generator}
    return [torch.randn(batch, h, length, 64, **options) for h in (4, 2, 2)]


def attend(layer, mask, q, k, v, name=KERNELS, **options):
    function = integration._interfaces()[0]._global_mapping[name]
    return function(layer, q, k, v, mask, scaling=0.125, **options)[0]


def mask_of(net, where, padding, cache=None):
    """The mask that transformers has built for this model by its own helper."""
    windowed = getattr(net.config, "sliding_window", None) is not None
    create = create_sliding_window_causal_mask if windowed else create_causal_mask
    embeds = torch.zeros(*where.shape, 64, dtype=torch.bfloat16, device="cuda")
    return create(net.config, embeds, padding, cache, position_ids=where)


@pytest.mark.parametrize("kind", ["llama", "sliding"])
def test_a_decoded_token_has_the_bits_of_the_whole_sequence(kind):
    net = build(kind)
    layer, window = net.model.layers[0].self_attn, getattr(net.config, "sliding_window", None)
    q, k, v = heads(2, 340)
    padding = torch.ones(2, 340, dtype=torch.long, device="cuda")
    padding[1, :20] = 0
    where = (padding.cumsum(-1) - 1).clamp_min(0)
    whole = attend(layer, mask_of(net, where, padding), q, k, v, sliding_window=window, position_ids=where)
    cache = DynamicCache(config=net.config)
    for first, last in ((0, 160), (160, 328), (328, 329), (329, 340)):
        new = slice(first, last)
        mask = mask_of(net, where[:, new], padding[:, :last], cache)
        keys, values = cache.update(k[:, :, new], v[:, :, new], 0)
        part = attend(layer, mask, q[:, :, new], keys, values, sliding_window=window, position_ids=where[:, new])
        if window is None or first == 0:
            assert torch.equal(part, whole[:, new])
        else:  # a cache of the window's tokens forgets where blocks begin
            assert error(part, whole[:, new].double()) < 0.03


@pytest.mark.parametrize("kind", ["llama", "mixed"])
def test_generation_through_the_cache(kind):
    """Linear layers round otherwise for one token than for many, so logits are compared, not greedy tokens."""
    net, ids = build(kind).eval(), draw(2, 150)
    out = net.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, pad_token_id=0,
        return_dict_in_generate=True, output_logits=True, disable_compile=True,
    )  # fmt: skip
    with torch.no_grad():
        whole = net(out.sequences, use_cache=False).logits[:, 149:-1].double()
    cached = torch.stack(out.logits, 1)
    assert error(cached, whole) < MOST[0]
    assert error(cached.roll(1, 1), whole) > 0.2  # other tokens' logits would be noticed


# ---------------------------------------------------------------------------------------------------------- compiled


def test_compiled_packings_change_without_a_wait():
    net, ids = build("llama", BOUNDED, num_hidden_layers=1), draw()  # one layer: half the time to compile
    packings = [places(TOKENS), places(*LENGTHS), places(128, 128, 344), places(*[100] * 6)]
    plain = [step(net, ids, position_ids=where) for where in packings]
    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(net, fullgraph=True, backend=counter)
    step(net, ids, compiled, position_ids=packings[0])
    with no_waiting():
        results = [step(net, ids, compiled, position_ids=where) for where in packings]
    assert counter.frame_count == 1
    for got, want in zip(results, plain, strict=True):
        errors = [
            error(x, y.double()) for x, y in zip(got, want, strict=True)
        ]  # inductor rounds elsewhere than eager code
        assert max(errors) < 0.05, errors
    assert error(plain[0][1], plain[3][1].double()) > 0.1  # a stale packing would be noticed


def test_with_a_bound_neither_mask_nor_attention_waits():
    """Eagerly too; around them transformers looks once at position_ids itself."""
    layer = build("llama", BOUNDED).model.layers[0].self_attn
    q, k, v = heads(1, TOKENS)
    padding = torch.ones(1, TOKENS, dtype=torch.bool, device="cuda")
    packings = [places(*LENGTHS), places(200, 400)]

    def call(where, wait):
        mask = integration.mask(1, TOKENS, causal_mask_function, TOKENS, 0, 0, padding, device="cuda", wait=wait)
        return attend(layer, mask, q, k, v, name=KERNELS if wait else BOUNDED, position_ids=where)

    want = [call(where, True) for where in packings]
    with no_waiting():
        got = [call(where, False) for where in packings]
    assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True)) and not torch.equal(*got)


# ---------------------------------------------------------------------------------------------------------- refusals


def test_masks_that_cannot_be_honoured_are_refused():
    net, ids = build("llama"), draw(1, 30)
    for mask in (torch.zeros(1, 1, 30, 30), torch.ones(1, 1, 30, 30, dtype=torch.bool)):
        with pytest.raises(UnsupportedError, match="cannot be honoured: give a padding mask"):
            net(ids, attention_mask=mask.cuda())
    gap = torch.ones(1, 30, dtype=torch.long, device="cuda")
    gap[:, 10:12] = 0
    with pytest.raises(UnsupportedError, match="attention_mask has a gap"):
        net(ids, attention_mask=gap)
    with pytest.raises(UnsupportedError, match="not causal attention"):
        build("llama", is_causal=False)(ids)
    with pytest.raises(UnsupportedError, match=r"attention_dropout = 0\.0"):
        build("llama", attention_dropout=0.1).train()(ids)


def test_a_packed_prefill_is_not_gone_on_with():
    net, cache = build("llama").eval(), DynamicCache()
    net(draw(1, 30), position_ids=places(12, 18), past_key_values=cache)
    with pytest.raises(UnsupportedError, match="fewer tokens than the cache holds"):
        net(draw(1, 1), position_ids=torch.tensor([[18]], device="cuda"), past_key_values=cache)


@pytest.mark.parametrize("odd", ["head size", "recipe", "dtype"])
def test_what_has_no_kernel_says_so_and_names_the_reference(odd):
    name = registered("nvfp4/strict") if odd == "recipe" else KERNELS
    more = {"head_dim": 80} if odd == "head size" else {"head_dim": 64}
    net = model("llama", name, torch.float16 if odd == "dtype" else torch.bfloat16, **SIZES, **more).cuda()
    with pytest.raises(UnsupportedError, match="backend='reference'"):
        net(draw(1, 30))


def test_more_documents_than_the_bound_end_the_process():
    """The host does not look, so the device does; it cannot go on afterwards, hence a process of its own."""
    script = (
        "import torch; from flamia.integrations.transformers import offsets_of\n"
        "starts = (torch.arange(60, device='cuda') % 20 == 0)\n"
        "print(offsets_of(starts, MOST).tolist())"
    )
    for most, fits in ((3, True), (2, False)):
        command = [sys.executable, "-c", script.replace("MOST", str(most))]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
        assert (run.returncode == 0) is fits, run.stderr[-2000:]
        assert "[0, 20, 40, 60]" in run.stdout if fits else "assert" in run.stderr
