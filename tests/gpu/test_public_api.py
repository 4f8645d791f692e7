"""The public functions on a card: which backend runs, and that nothing around it (views, compilation, checkpoints, graphs,
devices, bad offsets) changes a bit. What the kernels compute is checked in test_route.py."""

import pytest
import torch

if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
    pytest.skip("needs an NVIDIA Hopper GPU", allow_module_level=True)

import functools

from calls import same
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import flamia
from flamia import UnsupportedError, hopper, ops, saved
from flamia.hopper import launch
from flamia.packing import Documents

RECIPE = "mxfp8_scores/strict"
D = 128


def at(*values):
    return torch.tensor(values, dtype=torch.int32, device="cuda")


CU = at(0, 300, 300, 333, 700)


def tensors(tokens=720, heads=(4, 2), dim=D):
    torch.manual_seed(0)
    shapes = [(tokens, h, dim) for h in (heads[0], heads[1], heads[1], heads[0])]
    return [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes]


def run(q, k, v, do, cu=CU, call=None, **options):
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    options = {"causal": True, "recipe": RECIPE, "return_lse": True, **options}
    o, lse = (call or flamia.attention_varlen)(*leaves, cu, **options)
    return [o, lse, *torch.autograd.grad(o, leaves, do)]


def test_auto_is_the_kernels():
    q, k, v, do = tensors()
    got = run(q, k, v, do)
    o, lse, _ = hopper.forward(q, k, v, Documents(CU, CU, None, 0), flamia.Recipe.parse(RECIPE), D**-0.5)
    assert torch.equal(got[0], o) and torch.equal(got[1], lse)
    assert same(run(q, k, v, do, backend="hopper"), got)


def test_kernels_are_near_the_reference_on_the_same_card():
    given = tensors()
    for x, y in zip(run(*given), run(*given, backend="reference"), strict=True):
        x, y = (z.double().nan_to_num(neginf=0.0) for z in (x, y))
        assert (x - y).norm() < 2**-7 * y.norm()


@pytest.mark.parametrize("odd", ["recipe", "head size", "dtype"])
def test_what_has_no_kernel_raises_and_names_the_way_out(odd):
    given = tensors(dim=96 if odd == "head size" else D)
    if odd == "dtype":
        given = [x.to(torch.float16) for x in given]
    with pytest.raises(UnsupportedError, match="backend='reference'"):
        run(*given, recipe="nvfp4/strict" if odd == "recipe" else RECIPE)


@pytest.mark.parametrize("name", ["q", "k", "v", "do"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, 2.0**100])
def test_the_tail_is_zero_and_never_used(name, value):
    given = tensors()
    clean = run(*given)
    given[("q", "k", "v", "do").index(name)][700:] = value
    assert same(run(*given), clean)
    assert not any(x[700:].any() for x in (clean[0], *clean[2:]))


def test_views():
    given = tensors()
    clean = run(*given)
    heads_first = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in given]
    fused = torch.cat([x.flatten(1) for x in given], 1).split([x[0].numel() for x in given], 1)
    odd = [torch.cat([x.new_zeros(1), x.flatten()])[1:].view_as(x) for x in given]
    for views in (heads_first, [x.unflatten(1, y.shape[1:]) for x, y in zip(fused, given)], odd):
        assert same(run(*views), clean)
    summed = [x.detach().requires_grad_() for x in given[:3]]
    flamia.attention_varlen(*summed, CU, causal=True, recipe=RECIPE).sum().backward()
    assert same([x.grad for x in summed], run(*given[:3], torch.ones_like(given[3]))[2:])


def test_subsets_of_gradients():
    given = tensors()
    full = run(*given)[2:]
    for wanted in ((True, False, False), (False, True, False), (False, False, True), (True, False, True)):
        leaves = [x.detach().requires_grad_(want) for x, want in zip(given, wanted)]
        flamia.attention_varlen(*leaves, CU, causal=True, recipe=RECIPE).backward(given[3])
        for leaf, want, expected in zip(leaves, wanted, full):
            assert torch.equal(leaf.grad, expected) if want else leaf.grad is None


def test_offsets():
    q, k, v, do = tensors()
    assert same(run(q, k, v, do, check_offsets=True), run(q, k, v, do))
    with pytest.raises(ValueError, match="must not decrease"):
        run(q, k, v, do, at(0, 300, 200, 700), check_offsets=True)
    run(q, k, v, do, at(5, -3, 10_000_000, 7, 2**31 - 1, -(2**31)))
    torch.cuda.synchronize()
    with pytest.raises(ValueError, match="device of q"):
        run(q, k, v, do, CU.cpu())


def test_batches():
    q, k, v, do = (x[:600].view(2, 300, *x.shape[1:]) for x in tensors())
    o, lse = flamia.attention(q, k, v, causal=True, recipe=RECIPE, return_lse=True)
    packed = run(*(x.flatten(0, 1) for x in (q, k, v, do)), at(0, 300, 600))
    assert torch.equal(o.flatten(0, 1), packed[0]) and torch.equal(lse.transpose(0, 1).flatten(1), packed[1])


def test_compiled_checkpointed_and_under_autocast():
    given = tensors()
    plain = run(*given)
    compiled = torch.compile(flamia.attention_varlen, fullgraph=True)
    assert same(run(*given, call=compiled), plain)

    def recomputed(*args, **options):
        return checkpoint(lambda *xs: flamia.attention_varlen(*xs, **options), *args, use_reentrant=False)

    assert same(run(*given, call=recomputed), plain)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert same(run(*given), plain)


def test_a_captured_graph_follows_the_offsets():
    """Forward and backward through the public function: no wait for the device, nothing baked in."""
    given = tensors()
    cu = CU.clone()
    run(*given, cu)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(*given, cu)
    for offsets in (CU, at(0, 10, 200, 500, 720), at(0, 0, 0, 0, 400)):
        cu.copy_(offsets)
        graph.replay()
        assert same(captured, run(*given, offsets))


class Counted:
    """A kernel that counts its launches."""

    def __init__(self, kernel):
        self.kernel, self.launches = kernel, 0

    def __getitem__(self, grid):
        self.launches += 1
        return self.kernel[grid]


def test_a_training_call_encodes_once(monkeypatch):
    """The forward saves its codes for the backward: through autograd, a compiled graph and selective checkpointing. Plain
    checkpointing makes them twice, and a call that nobody differentiates keeps nothing."""
    given = tensors()
    counted = Counted(launch.encode_kernel)
    monkeypatch.setattr(launch, "encode_kernel", counted)
    contexts = functools.partial(create_selective_checkpoint_contexts, flamia.SAVE_OPS)

    def checkpointed(*args, context_fn=None, **options):
        more = {} if context_fn is None else {"context_fn": context_fn}
        return checkpoint(lambda *xs: flamia.attention_varlen(*xs, **options), *args, use_reentrant=False, **more)

    plain = run(*given)
    for call, launches in (
        (flamia.attention_varlen, 1),
        (torch.compile(flamia.attention_varlen, fullgraph=True), 1),
        (functools.partial(checkpointed, context_fn=contexts), 1),
        (checkpointed, 2),
    ):
        counted.launches = 0
        assert same(run(*given, call=call), plain)
        assert counted.launches == launches, call


def test_what_is_saved_has_the_promised_size():
    q, k, v, do = tensors()
    options = (-1, 0, 0.1, RECIPE, "auto", "clamped")
    forward, backward = ops.attention_forward, ops.attention_backward
    o, lse, residual, kept = forward(q, k, v, CU, CU, *options, -1, -1, True)
    assert kept.shape == (saved.nbytes(720, 720, 4, 4, 2, D),)
    assert forward(q, k, v, CU, CU, *options, -1, -1, False)[3].numel() == 0
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")  # the rest compares memory nobody wrote
    torch.library.opcheck(forward, (q, k, v, CU, CU, *options, -1, -1, True), test_utils=checks)
    arguments = (do, None, q, k, None, o, lse, residual, CU, CU, *options, True, True, True, kept)
    torch.library.opcheck(backward, arguments)
    without = (do, None, q, k, v, *arguments[5:-1], None)
    assert same(backward(*arguments), backward(*without))


def test_nobody_waits_for_the_device():
    given = tensors()
    cases = (
        (given, {}),
        (given, {"window": (100, 0)}),
        ([x.transpose(0, 1).contiguous().transpose(0, 1) for x in given], {}),
    )
    for xs, options in cases:
        run(*xs, **options)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for xs, options in cases:
            run(*xs, **options)
        with pytest.raises(RuntimeError, match="synchronizing"):
            run(*given, check_offsets=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_zero_tokens():
    for cu in (at(0), at(0, 0)):
        assert [x.shape[-1] for x in run(*tensors(0), cu)] == [D, 0, D, D, D]
