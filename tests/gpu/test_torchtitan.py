"""TorchTitan's debug models on a card, attention by the kernels: a step beside exact attention's, documents, windows and sinks,
what its checkpointing keeps and computes again, and training with compiled blocks.

TorchTitan 0.3.0 imports one name that torch 2.11 lacks, `DataParallelMeshDims`, for models on several GPUs; here, on one, a
stand-in takes its place.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest
import torch
import torch.distributed.fsdp

if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
    pytest.skip("needs an NVIDIA Hopper GPU", allow_module_level=True)
pytest.importorskip("torchtitan", minversion="0.3")
if not hasattr(torch.distributed.fsdp, "DataParallelMeshDims"):
    torch.distributed.fsdp.DataParallelMeshDims = object

from calls import draw, error, same
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torchtitan.distributed import activation_checkpoint
from torchtitan.models import llama3, qwen3
from torchtitan.models.common.attention import VarlenAttention, create_varlen_metadata_for_document

from flamia import UnsupportedError
from flamia.integrations.torchtitan import Attention, AttentionConverter, SelectiveAC

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fresh_compiler")]
KERNELS = AttentionConverter.Config()
REFERENCE = AttentionConverter.Config(backend="reference")
EXACT = AttentionConverter.Config(backend="reference", recipe="bf16")
PACKED = ((200, 1, 311), (100, 412))


def positions(*rows: tuple[int, ...]) -> torch.Tensor:
    return torch.stack([torch.cat([torch.arange(n) for n in lengths]) for lengths in rows]).cuda()


def debug_model(converter=KERNELS, registry=qwen3, window=(-1, 0)):
    """Two layers, the second with that window; Qwen3's have 16 query heads, 8 key heads, of size 128."""
    torch.manual_seed(0)
    config = registry.model_registry("debugmodel", attn_backend="varlen").model
    config.layers = config.layers[:2]
    config.layers[1].attention.inner_attention = VarlenAttention.Config(window_size=window)
    config = converter.build().convert(config)
    with torch.device("cuda"):
        model = config.build()
    model.init_states(buffer_device=torch.device("cuda"))
    return model


def batch(seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (2, 513), generator=torch.Generator().manual_seed(seed)).cuda()


def logits_of(model, tokens, rows=PACKED):
    where = positions(*rows)
    masks = model.get_attention_masks(positions=where)
    with torch.autocast("cuda", torch.bfloat16):
        return model(tokens, positions=where, attention_masks=masks)


def step(model, rows=PACKED, seed: int = 0):
    """loss, logits, and all gradients in one vector, of one training step."""
    model.zero_grad()
    logits = logits_of(model, batch(seed)[:, :-1], rows)
    loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch(seed)[:, 1:].flatten())
    loss.backward()
    return loss.detach(), logits.detach(), torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.mark.parametrize("window", [(-1, 0), (63, 0)])
def test_a_step_is_the_exact_one_within_the_recipe_s_error(window, kernel_calls):
    """And as near to it as the reference is, which rounds the same things in float64."""
    ours = step(debug_model(window=window))
    assert len(kernel_calls) == 2
    reference, exact = (step(debug_model(converter, window=window)) for converter in (REFERENCE, EXACT))
    assert len(kernel_calls) == 2
    assert abs(ours[0] - exact[0]) < 0.01
    for mine, other, right, most in zip(ours[1:], reference[1:], exact[1:], (0.08, 0.11), strict=True):
        right = right.double()
        assert 0.001 < error(mine, right) < most
        assert error(mine, right) < 1.1 * error(other, right) + 0.002


@pytest.mark.parametrize("window", [(-1, 0), (63, 0)])
@torch.no_grad()
def test_documents_do_not_see_each_other(window):
    model, tokens, other = debug_model(window=window), batch()[:, :-1], batch(1)[:, :-1]
    other[0, 201:], other[1, :100] = tokens[0, 201:], tokens[1, :100]
    first, second = logits_of(model, tokens), logits_of(model, other)
    assert torch.equal(first[0, 201:], second[0, 201:]) and torch.equal(first[1, :100], second[1, :100])
    assert not torch.equal(first[1, 100:], second[1, 100:])
    assert error(logits_of(model, tokens, ((512,), (512,)))[0, 201:], first[0, 201:].double()) > 0.02


def test_checkpointing_has_the_same_bits_and_ours_runs_attention_once(kernel_calls):
    plain, counts = step(debug_model()), {}
    for policy in (SelectiveAC, activation_checkpoint.SelectiveAC, activation_checkpoint.FullAC):
        model = debug_model()
        policy.Config().build().apply(model)
        kernel_calls.clear()
        assert same(step(model), plain)
        counts[policy] = len(kernel_calls)
    assert list(counts.values()) == [2, 4, 4]  # two layers; TorchTitan's own list computes them again


def test_it_trains_compiled_with_selective_checkpointing():
    """Blocks compiled as TorchTitan does, whole graphs; packings change from step to step, and how many documents there are."""
    model, eager = debug_model(), debug_model()
    for net in (model, eager):
        SelectiveAC.Config().build().apply(net)
    counter = CompileCounterWithBackend("inductor")
    for name, block in model.layers.named_children():
        model.layers.register_module(name, torch.compile(block, fullgraph=True, backend=counter))
    losses = {}
    for net in (model, eager):
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
        losses[net] = []
        for rows in (((512,), (512,)), PACKED, ((1, 511), (256, 256)), ((100, 412), (128, 128, 256))) * 3:
            losses[net].append(step(net, rows)[0].item())
            optimizer.step()
    assert counter.frame_count <= 2  # the first number of documents, then any; blocks share a graph
    assert max(x[-1] / x[0] for x in losses.values()) < 0.8
    for compiled, plain in zip(losses[model][:5], losses[eager][:5], strict=True):
        assert abs(compiled - plain) < 0.02 * plain


def test_sinks_through_the_out_transform_are_differentiated():
    """GPT-OSS: a learned sink takes its share of every row's sum, computed from the LSE."""
    q, k, v, _, _ = draw(400, 400, (4, 2), 64)
    q, k, v = (x[None].requires_grad_() for x in (q, k, v))
    sink = torch.linspace(-1, 1, 4, device="cuda").requires_grad_()
    metadata = create_varlen_metadata_for_document(positions((250, 150)))

    def transform(o, lse):
        return o * torch.sigmoid(lse - sink)[..., None]

    o = Attention.Config().build()(q, k, v, attention_masks=metadata, out_transform=transform)
    got = [o, *torch.autograd.grad(o.float().square().sum(), (q, k, v, sink))]

    leaves = [x.detach().double().requires_grad_() for x in (q, k, v, sink)]
    keys, values = (x[0].repeat_interleave(2, 1) for x in leaves[1:3])
    scores = torch.einsum("qhd,khd->hqk", leaves[0][0], keys) / 8
    document = (torch.arange(400, device="cuda") >= 250).long()
    seen = torch.ones(400, 400, device="cuda").tril().bool() & (document[:, None] == document)
    scores = scores.masked_fill(~seen, -torch.inf)
    weights = torch.cat([scores, leaves[3][:, None, None].expand(4, 400, 1)], -1).softmax(-1)[..., :-1]
    exact = torch.einsum("hqk,khd->qhd", weights, values)
    want = [exact, *torch.autograd.grad(exact.square().sum(), leaves)]
    assert all(error(x.reshape(y.shape), y) < 0.1 for x, y in zip(got, want, strict=True))
    assert got[-1].abs().min() > 0


def test_torchtitan_s_trainer(tmp_path):
    """Its data loader, FSDP on one rank, optimizer and selective checkpointing, around Qwen3's debug model."""
    for name in ("datasets", "torchdata", "tensorboard"):
        pytest.importorskip(name, reason="TorchTitan's trainer needs it")
    script = pathlib.Path(__file__).parents[1] / "integrations" / "titan_run.py"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, script, tmp_path, "qwen3", "cuda"]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert run.returncode == 0, run.stderr[-3000:]
    losses = json.loads(run.stdout.splitlines()[-1])
    assert len(losses) == 4 and losses[-1] < losses[0] - 0.3


def test_a_head_size_without_a_kernel_is_told():
    """The Llama debug model's is 16."""
    with pytest.raises(UnsupportedError, match="backend='reference'"):
        logits_of(debug_model(registry=llama3), batch()[:, :-1])
