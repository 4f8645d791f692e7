"""What the forward keeps for the backward: its size and layout, and its way through the operators, autograd, compiled
graphs and checkpoints. No card is needed: a stand-in backend keeps V's bytes, and its backward has V from nowhere else."""

import functools
import types

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_ops import BACKWARD, CU, FORWARD, OPTIONS, attend, gradients, inputs, same
from torch._inductor import config as inductor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import flamia
import flamia.reference
from flamia import ops, saved
from flamia.packing import Documents

# ------------------------------------------------------------------------------------------------------------- layout


@given(st.lists(st.integers(0, 400), max_size=12))
def test_capacity_is_enough(lengths):
    rows = sum(lengths)
    assert sum(-(-n // 128) for n in lengths) <= saved.capacity(rows, len(lengths))


@pytest.mark.parametrize("rows, documents", [(128, 1), (129, 1), (129, 2), (4096, 4), (7, 7), (300, 200)])
def test_capacity_is_not_much_more_than_the_worst_documents_need(rows, documents):
    """All documents of one token, the last of the rest."""
    worst = sum(-(-n // 128) for n in [1] * (documents - 1) + [rows - documents + 1])
    assert worst <= saved.capacity(rows, documents) <= worst + 1 + documents // 128


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("shape", [(1, 1, 1, 1, 1), (300, 300, 3, 4, 2), (300, 77, 5, 8, 1), (4096, 5000, 1, 2, 2)])
def test_parts_are_aligned_and_fill_the_buffer(shape, dim):
    pytest.importorskip("triton")
    from flamia.hopper import launch

    tq, tk, count, hq, hk = shape
    q, k = torch.empty(tq, hq, dim), torch.empty(tk, hk, dim)
    cu = torch.zeros(count + 1, dtype=torch.int32)
    documents = Documents(cu, cu, None, 0)
    buffer = launch.empty_saved(q, k, documents)
    e = launch.parts(buffer, q, k, documents)
    read_by_tma, records = e[:-1], e.plan[:-2]
    start, at = buffer.data_ptr(), 0
    for part in (*read_by_tma, *records):
        assert part.data_ptr() - start == at
        assert at % (128 if any(part is x for x in read_by_tma) else 16) == 0
        at += part.numel() * part.element_size()
    assert at == buffer.numel()
    assert e.q_codes.numel() == hq * e.plan.q_capacity * 128 * dim
    assert e.plan.q_capacity == saved.capacity(tq, count) and e.plan.k_capacity == saved.capacity(tk, count)
    with pytest.raises(ValueError, match="its own forward saved"):
        launch.parts(buffer[:-4], q, k, documents)


def test_fakes_size_it_from_shapes_alone():
    """Only where kernels will run and somebody will differentiate; symbolic sizes stay symbolic."""
    options = (*OPTIONS[:3], "mxfp8_scores/strict", *OPTIONS[4:])
    with FakeTensorMode():
        q, k, v = (torch.empty(300, h, 64, device="cuda", dtype=torch.bfloat16) for h in (4, 2, 2))
        cu = torch.empty(4, device="cuda", dtype=torch.int32)
        kept = FORWARD(q, k, v, cu, cu, *options, -1, -1, True)[3]
        assert kept.shape == (saved.nbytes(300, 300, 3, 4, 2, 64),) and kept.dtype == torch.uint8
        assert FORWARD(q, k, v, cu, cu, *options, -1, -1, False)[3].numel() == 0
        reference = (*options[:4], "reference", options[5])
        assert FORWARD(q, k, v, cu, cu, *reference, -1, -1, True)[3].numel() == 0
        encodes_anew = (*options[:3], "mxfp8/strict", *options[4:])
        assert FORWARD(q, k, v, cu, cu, *encodes_anew, -1, -1, True)[3].numel() == 0
        dv = BACKWARD(q, None, q, k, None, *FORWARD(q, k, v, cu, cu, *options, -1, -1, True)[:3], cu, cu, *options,
                      True, True, True, kept)[2]  # fmt: skip
        assert dv.shape == v.shape


# ---------------------------------------------------------------------------------------------------- the way it takes


@pytest.fixture
def room(monkeypatch):
    """A backend that keeps V's bytes, in a buffer of the promised size, and gets V back from there."""
    import sys

    room = types.ModuleType("room")
    room.HANDLES, room.calls, room.sizes = frozenset({"saved"}), [], []

    def forward_saving(q, k, v, documents, *rest):
        room.calls.append("forward_saving")
        count = documents.cu_q.numel() - 1
        kept = torch.zeros(saved.nbytes(len(q), len(k), count, q.shape[1], k.shape[1], q.shape[2]), dtype=torch.uint8)
        kept[: v.numel() * 2] = v.contiguous().view(torch.uint8).flatten()
        return *flamia.reference.forward(q, k, v, documents, *rest), kept

    def forward(*args):
        room.calls.append("forward")
        return flamia.reference.forward(*args)

    def backward(do, dlse, q, k, v, o, *rest, saved=None):
        room.calls.append("backward" if saved is None else "backward with saved")
        if saved is not None:
            assert v is None
            shape = (*k.shape[:2], o.shape[2])
            v = saved[: shape[0] * shape[1] * shape[2] * 2].view(torch.bfloat16).view(shape)
        return flamia.reference.backward(do, dlse, q, k, v, o, *rest)

    room.forward, room.forward_saving, room.backward = forward, forward_saving, backward
    monkeypatch.setitem(sys.modules, "room", room)
    monkeypatch.setitem(ops.BACKENDS, "reference", "room")
    monkeypatch.setattr(ops, "_keeps", lambda x, backend, save, recipe: save)
    monkeypatch.setattr(ops, "keeps", lambda recipe: True)
    torch._dynamo.reset()
    with inductor.patch(force_disable_caches=True):  # a graph of the unpatched operator would be found on disk
        yield room
    torch._dynamo.reset()


def test_the_backward_gets_what_the_forward_saved(room, monkeypatch):
    tensors = inputs(grad=True)
    got = gradients(attend, tensors)
    assert room.calls == ["forward_saving", "backward with saved"]
    room.HANDLES = frozenset()
    monkeypatch.setattr(ops, "_keeps", lambda x, backend, save, recipe: False)
    assert same(got, gradients(attend, tensors))
    assert room.calls[2:] == ["forward", "backward"]


def test_nothing_is_saved_without_need(room):
    with torch.no_grad():
        attend(*inputs(grad=True))
    attend(*inputs())
    assert room.calls == ["forward", "forward"]
    q, k, v = inputs()
    attend(q, k, v.requires_grad_())
    assert room.calls[2:] == ["forward_saving"]


def test_v_is_not_kept_beside_its_codes(room):
    q, k, v = inputs(grad=True)
    kept = []

    def pack(x):
        kept.append(x.data_ptr())
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        o, _ = attend(q, k, v)
    assert q.data_ptr() in kept and k.data_ptr() in kept and v.data_ptr() not in kept
    o.sum().backward()


def test_two_backwards_over_one_forward(room):
    tensors = inputs(grad=True)
    o, _ = attend(*tensors)
    once = torch.autograd.grad(o.sum(), tensors, retain_graph=True)
    assert same(once, torch.autograd.grad(o.sum(), tensors))


def test_v_is_left_out_only_with_what_was_saved(room):
    q, k, v = inputs()
    o, lse, residual, kept = FORWARD(q, k, v, CU, CU, *OPTIONS, -1, -1, False)
    assert kept.numel() == 0
    for nothing in (None, kept):
        with pytest.raises(ValueError, match="v is None"):
            BACKWARD(o, None, q, k, None, o, lse, residual, CU, CU, *OPTIONS, True, True, True, nothing)
    assert BACKWARD(o, None, q, k, v, o, lse, residual, CU, CU, *OPTIONS, True, True, True, kept)[2].shape == v.shape


@pytest.mark.parametrize("grad", [False, True])
def test_opcheck_forward(room, grad):
    torch.library.opcheck(FORWARD, (*inputs(grad=grad), CU, CU, *OPTIONS, -1, -1, True))


def test_opcheck_backward(room):
    q, k, v = inputs()
    o, lse, residual, kept = FORWARD(q, k, v, CU, CU, *OPTIONS, -1, -1, True)
    arguments = (torch.randn_like(o), None, q, k, None, o, lse, residual, CU, CU, *OPTIONS, True, True, True, kept)
    torch.library.opcheck(BACKWARD, arguments)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_graphs_carry_it(room, backend):
    tensors = inputs(grad=True)
    expected = gradients(attend, tensors)
    room.calls.clear()
    compiled = torch.compile(attend, fullgraph=True, backend=backend)
    assert same(gradients(compiled, tensors), expected)
    assert room.calls == ["forward_saving", "backward with saved"]


def test_intermediates_in_a_compiled_graph_are_seen_to_need_gradients(room):
    tensors = inputs(grad=True)

    def block(q, k, v):
        return attend(q * 1.0, k * 1.0, v * 1.0)

    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    assert same(gradients(compiled, tensors), gradients(block, tensors))
    assert room.calls == ["forward_saving", "backward with saved"] * 2


def test_lengths_stay_dynamic(room):
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens, cu in ((130, (0, 3, 129)), (64, (0, 20, 63)), (300, (0, 100, 299))):
        tensors, cu = inputs(tokens, grad=True), torch.tensor(cu, dtype=torch.int32)
        got = gradients(lambda q, k, v, cu=cu: compiled(q, k, v, cu), tensors)
        assert same(got, gradients(lambda q, k, v, cu=cu: attend(q, k, v, cu), tensors))


def test_a_traced_size_is_an_expression_of_the_lengths(room):
    def call(q, k, v, cu):
        return FORWARD(q, k, v, cu, cu, *OPTIONS, -1, -1, True)[3]

    graph = make_fx(call, tracing_mode="symbolic")(*inputs(), CU)
    out = next(node for node in graph.graph.nodes if node.op == "output").args[0]
    assert out.meta["val"].shape[0].node.expr.free_symbols


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_recompute_it(room, reentrant):
    tensors = inputs(grad=True)
    plain = gradients(attend, tensors)
    room.calls.clear()
    leaves = [x.detach().requires_grad_() for x in tensors]
    o, lse = checkpoint(attend, *leaves, use_reentrant=reentrant)
    weight = torch.linspace(-1, 1, o.numel()).view_as(o).to(o.dtype)
    ((o * weight).sum() + 0.5 * lse.masked_fill(lse.isinf(), 0).sum()).backward()
    assert same([x.grad for x in leaves], plain)
    assert room.calls == ["forward" if reentrant else "forward_saving", "forward_saving", "backward with saved"]


def test_selective_checkpoints_save_it(room):
    tensors = inputs(grad=True)
    plain = gradients(attend, tensors)
    room.calls.clear()
    contexts = functools.partial(create_selective_checkpoint_contexts, flamia.SAVE_OPS)

    def block(q, k, v):
        return attend(q * 1.0, k * 1.0, v * 1.0)

    assert same(gradients(lambda *xs: checkpoint(block, *xs, use_reentrant=False, context_fn=contexts), tensors), plain)
    assert room.calls == ["forward_saving", "backward with saved"]
