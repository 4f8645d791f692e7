"""TorchTitan with flamia's inner attention: its debug model trains, its metadata are documents, its selective checkpointing
keeps the operator's outputs."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.fsdp
from helpers import same
from torch._dynamo.testing import CompileCounterWithBackend

pytest.importorskip("torchtitan", minversion="0.3", reason="TorchTitan 0.3 is not installed (it needs Python 3.11)")
if not hasattr(torch.distributed.fsdp, "DataParallelMeshDims"):  # torch 2.11; wanted for several GPUs only
    torch.distributed.fsdp.DataParallelMeshDims = object

from torchtitan.distributed import activation_checkpoint
from torchtitan.models.common.attention import (
    FlexAttention,
    VarlenAttention,
    VarlenMetadata,
    create_varlen_metadata_for_document,
)
from torchtitan.models.llama3 import model_registry

import flamia
import flamia.reference
from flamia import UnsupportedError
from flamia.integrations.torchtitan import Attention, AttentionConverter, SelectiveAC

STRICT = AttentionConverter.Config(recipe="mxfp8/strict")


def positions(*rows):
    return torch.stack([torch.cat([torch.arange(n) for n in lengths]) for lengths in rows])


def heads(batch, length, sizes=(16, 16), seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((4, sizes[0]), (2, sizes[0]), (2, sizes[1]))
    return [torch.randn(batch, length, *shape, generator=generator) for shape in shapes]


def debug_model(converter=STRICT, layers=2):
    torch.manual_seed(0)
    config = model_registry("debugmodel", attn_backend="varlen", converters=[converter] if converter else None).model
    config.layers = config.layers[:layers]
    for layer in config.layers:
        layer.attention.rope.max_seq_len = 256
    model = config.build()
    model.init_states(buffer_device=torch.device("cpu"))
    return model


def loss_of(model, lengths=((40, 24), (64,)), seed=0):
    tokens = torch.randint(0, 256, (2, 65), generator=torch.Generator().manual_seed(seed))
    where = positions(*lengths)
    logits = model(tokens[:, :-1], positions=where, attention_masks=model.get_attention_masks(positions=where))
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def gradients(model, **options):
    model.zero_grad()
    loss_of(model, **options).backward()
    return [p.grad.clone() for p in model.parameters()]


# ------------------------------------------------------------------------------------------------------- the module


@pytest.mark.parametrize("window", [(-1, 0), (-1, -1), (10, 0)])
def test_metadata_are_documents(window):
    q, k, v = heads(2, 50)
    metadata = create_varlen_metadata_for_document(positions((20, 1, 29), (50,)))
    module = Attention.Config(window_size=window, recipe="mxfp8/strict").build()
    o = module(q, k, v, attention_masks=metadata, scale=0.3, enable_gqa=True)
    expected = flamia.attention_varlen(
        *(x.flatten(0, 1).bfloat16() for x in (q, k, v)),
        torch.tensor([0, 20, 21, 50, 100], dtype=torch.int32),
        window=window,
        softmax_scale=0.3,
        recipe="mxfp8/strict",
    )
    assert o.dtype == torch.float32 and torch.equal(o.flatten(0, 1), expected.float())
    packed = module._forward_packed(*(x.flatten(0, 1) for x in (q, k, v)), attention_masks=metadata, scale=0.3)
    assert torch.equal(packed, expected.float())


def test_queries_and_keys_of_other_lengths_and_value_heads_of_another_size():
    q, k, v = heads(1, 30, (16, 8))
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32) for x in ((0, 4, 7), (0, 20, 30)))
    o = Attention.Config().build()(q[:, :7], k, v, attention_masks=VarlenMetadata(cu_q, cu_k, 4, 20))
    packed = (x[0].bfloat16() for x in (q[:, :7], k, v))
    assert torch.equal(o[0], flamia.attention_varlen(*packed, cu_q, cu_seqlens_k=cu_k, causal=True).float())


def test_sinks_through_the_out_transform_are_differentiated():
    """GPT-OSS: a learned sink takes its share of every row's sum, computed from the LSE."""
    q, k, v = (x.bfloat16().requires_grad_() for x in heads(1, 40))
    sink = torch.linspace(-1, 1, 4, requires_grad=True)
    metadata = create_varlen_metadata_for_document(positions((25, 15)))
    module = Attention.Config(recipe="bf16").build()
    module(
        q, k, v, attention_masks=metadata, out_transform=lambda o, lse: o * torch.sigmoid(lse - sink)[..., None]
    ).float().square().sum().backward()
    got = [x.grad for x in (q, k, v, sink)]
    leaves = [x.detach().float().requires_grad_() for x in (q, k, v)]
    scores = torch.einsum("qhd,khd->hqk", leaves[0][0], leaves[1][0].repeat_interleave(2, 1)) / 4
    document = (torch.arange(40) >= 25).long()
    seen = torch.ones(40, 40).tril().bool() & (document[:, None] == document)
    scores = scores.masked_fill(~seen, -math.inf)
    extended = torch.cat([scores, sink.detach()[:, None, None].expand(4, 40, 1)], -1)
    weights = extended.softmax(-1)[..., :-1]
    torch.einsum("hqk,khd->qhd", weights, leaves[2][0].repeat_interleave(2, 1)).square().sum().backward()
    for mine, exact in zip(got, leaves, strict=False):
        assert (mine.float() - exact.grad).norm() < 0.02 * exact.grad.norm()
    assert sink.grad.abs().min() > 0


def test_what_cannot_be_done_is_refused():
    q, k, v = heads(1, 30)
    module = Attention.Config().build()
    with pytest.raises(ValueError, match="must be VarlenMetadata, got NoneType"):
        module(q, k, v, attention_masks=None)
    metadata = create_varlen_metadata_for_document(positions((30,)))
    with pytest.raises(UnsupportedError, match="score_mod is not supported"):
        module(q, k, v, attention_masks=metadata, score_mod=abs)
    with pytest.raises(ValueError, match="must start at 0"):
        continued = torch.cat([torch.arange(5, 15), torch.arange(20)])[None]  # TorchTitan's loaders count from 0
        module(q, k, v, attention_masks=create_varlen_metadata_for_document(continued))
    with pytest.raises(ValueError, match="no route 'mxfp9'"):
        Attention.Config(recipe="mxfp9").build()
    with pytest.raises(ValueError, match="backend"):
        Attention.Config(backend="tpu").build()
    with pytest.raises(UnsupportedError, match="backend='hopper'"):
        Attention.Config(backend="hopper").build()(q, k, v, attention_masks=metadata)


# ----------------------------------------------------------------------------------------------------- the converter


def test_every_varlen_attention_is_replaced_and_keeps_its_window():
    config = model_registry("debugmodel", attn_backend="varlen").model
    config.layers[1].attention.inner_attention = VarlenAttention.Config(window_size=(7, 0))
    converted = AttentionConverter.Config(recipe="bf16", backend="reference").build().convert(config)
    inner = [layer.attention.inner_attention for layer in converted.layers]
    assert all(type(x) is Attention.Config and (x.recipe, x.backend) == ("bf16", "reference") for x in inner)
    assert [x.window_size for x in inner] == [(-1, 0), (7, 0), *[(-1, 0)] * 4]
    inner = VarlenAttention.Config(param_init={"a": 1}, sharding_config=object())
    alone = STRICT.build().convert(inner)
    assert (alone.param_init, alone.sharding_config) == (inner.param_init, inner.sharding_config)
    assert type(STRICT.build().convert(VarlenAttention.Config(window_size=(3, 0)))) is Attention.Config


def test_a_model_for_flex_attention_is_refused():
    with pytest.raises(ValueError, match=r"has FlexAttention: build the model with attn_backend='varlen'"):
        STRICT.build().convert(model_registry("debugmodel", attn_backend="flex").model)
    with pytest.raises(ValueError, match="no VarlenAttention to replace in FlexAttention"):
        STRICT.build().convert(FlexAttention.Config())


def test_torchtitan_takes_it_for_a_varlen_attention():
    """By these checks TorchTitan builds metadata, and refuses its context parallelism."""
    assert issubclass(Attention, VarlenAttention) and issubclass(Attention.Config, VarlenAttention.Config)
    assert isinstance(debug_model().get_attention_masks(positions=positions((40, 24))), VarlenMetadata)


# ------------------------------------------------------------------------------------------------------------ a model


def test_the_debug_model_trains():
    model = debug_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(4):
        loss = loss_of(model)
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < 0.7 * losses[0]


def test_selective_checkpointing_keeps_what_the_forward_computed(forward_calls):
    plain = gradients(debug_model())
    counts = {}
    for policy in (SelectiveAC, activation_checkpoint.SelectiveAC, activation_checkpoint.FullAC):
        model = debug_model()
        policy.Config().build().apply(model)
        forward_calls.clear()
        assert same(gradients(model), plain)
        counts[policy] = len(forward_calls)
    assert list(counts.values()) == [2, 4, 4]  # two layers; TorchTitan's own list computes them again


def test_compiled_blocks_do_not_recompile_when_packings_change():
    """As TorchTitan compiles: every block by itself, whole graphs. The number of documents becomes dynamic."""
    torch._dynamo.reset()
    packings = [((40, 24), (64,)), ((1, 63), (32, 32)), ((64,), (64,)), ((10, 20, 34), (64,)), ((8,) * 8, (16,) * 4)]
    model = debug_model()
    expected = [gradients(model, lengths=lengths) for lengths in packings]
    counter = CompileCounterWithBackend("aot_eager")
    for name, block in model.layers.named_children():
        model.layers.register_module(name, torch.compile(block, fullgraph=True, backend=counter))
    for lengths, plain in zip(packings, expected, strict=True):
        assert same(gradients(model, lengths=lengths), plain)
    assert counter.frame_count <= 2  # the first number of documents, then any; blocks share a graph
    torch._dynamo.reset()


def test_torchtitan_s_trainer(tmp_path):
    script = Path(__file__).with_name("titan_run.py")
    run = subprocess.run(
        [sys.executable, script, tmp_path, "llama3", "cpu"], capture_output=True, text=True, timeout=250
    )
    assert run.returncode == 0, run.stderr[-3000:]
    losses = json.loads(run.stdout.splitlines()[-1])
    assert len(losses) == 4 and losses[-1] < losses[0] - 0.3
