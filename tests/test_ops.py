"""The operators as torch sees them: schemas, fakes, autograd, compilation, checkpointing, and choosing a backend."""

import functools
import subprocess
import sys
import types

import pytest
import torch
from helpers import same
from torch._dynamo.testing import CompileCounter
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import flamia
import flamia.reference
from flamia import Recipe, UnsupportedError, ops

pytestmark = pytest.mark.usefixtures("fresh_compiler")

FORWARD = torch.ops.flamia.attention_forward.default
BACKWARD = torch.ops.flamia.attention_backward.default
CU = torch.tensor([0, 3, 3, 40, 44], dtype=torch.int32)  # an empty document, a long one, and a tail of two rows
OPTIONS = (5, 0, 0.3, "mxfp8/strict", "auto", "checked")


def inputs(tokens=46, grad=False, seed=0):
    torch.manual_seed(seed)
    tensors = [torch.randn(tokens, heads, dim).bfloat16() for heads, dim in ((4, 16), (2, 16), (2, 8))]
    return [x.requires_grad_(grad) for x in tensors]


def attend(q, k, v, cu=CU, recipe=None):
    return flamia.attention_varlen(q, k, v, cu, causal=True, window=(20, 0), recipe=recipe, return_lse=True)


def gradients(function, tensors, **options):
    """Of a loss that reads O unevenly, and LSE where it is finite."""
    o, lse = function(*tensors)
    weight = torch.linspace(-1, 1, o.numel()).view_as(o).to(o.dtype)
    loss = (o * weight).sum() + 0.5 * lse.masked_fill(lse.isinf(), 0).sum()
    return torch.autograd.grad(loss, tensors, **options)


# ---------------------------------------------------------------------------------------------------- schema and fakes


def forward_arguments(case):
    q, k, v = inputs(grad=case == "grad")
    options = OPTIONS
    if case == "transposed":
        q = q.transpose(0, 1).contiguous().transpose(0, 1)
    if case == "compensated":
        options = (*OPTIONS[:3], "mxfp8/strict,delta=compensated", *OPTIONS[4:])
    return q, k, v, CU, CU, *options, -1, -1, True


@pytest.mark.parametrize("case", ["plain", "grad", "transposed", "compensated"])
def test_opcheck_forward(case):
    torch.library.opcheck(FORWARD, forward_arguments(case))


@pytest.mark.parametrize("case", ["plain", "no lse gradient", "only lse", "only dk", "compensated", "expanded"])
def test_opcheck_backward(case):
    q, k, v, cu_q, cu_k, *options, _, _, _ = forward_arguments(case)
    o, lse, residual, _ = FORWARD(q, k, v, cu_q, cu_k, *options, -1, -1, True)
    do, dlse = torch.randn_like(o), torch.randn_like(lse)
    if case == "expanded":
        do = do[:1, :1, :1].expand_as(o)
    do, dlse = (None if case == "only lse" else do), (None if case == "no lse gradient" else dlse)
    wanted = (False, True, False) if case == "only dk" else (True, True, True)
    torch.library.opcheck(BACKWARD, (do, dlse, q, k, v, o, lse, residual, cu_q, cu_k, *options, *wanted))


@pytest.mark.parametrize("recipe", ["mxfp8/strict", "bf16,rounding=False", "mxfp8/strict,delta=compensated"])
def test_fakes_promise_the_shapes_dtypes_and_strides_that_come(recipe):
    q, k, v = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in inputs())
    options = (*OPTIONS[:3], recipe, *OPTIONS[4:])
    real = FORWARD(q, k, v, CU, CU, *options, -1, -1, True)
    meta = FORWARD(*(x.to("meta") for x in (q, k, v, CU, CU)), *options, -1, -1, True)
    kept = (q, k, v, *real[:3], CU, CU)
    real += BACKWARD(real[0], None, *kept, *options, True, False, True)
    meta += BACKWARD(meta[0], None, *(x.to("meta") for x in kept), *options, True, False, True)
    for x, y in zip(real, meta, strict=True):
        assert (x.shape, x.dtype, x.stride()) == (y.shape, y.dtype, y.stride())
        assert x.is_contiguous()


# ------------------------------------------------------------------------------------------------------------ autograd


def test_nothing_is_differentiated_without_need():
    q, k, v = inputs(grad=True)
    with torch.no_grad():
        assert not attend(q, k, v)[0].requires_grad
    assert not attend(q.detach(), k.detach(), v.detach())[1].requires_grad


def test_second_derivative_is_refused_by_name():
    q, k, v = inputs(grad=True)
    (dq,) = torch.autograd.grad(attend(q, k, v)[0].square().sum(), q, create_graph=True)
    with pytest.raises(UnsupportedError, match="create_graph"):
        dq.sum().backward()


def test_forward_mode_is_refused_and_not_answered_with_zeros():
    q, k, v = inputs()
    with pytest.raises(UnsupportedError, match="v is a dual tensor"):
        torch.func.jvp(lambda v: attend(q, k, v)[0], (v,), (v,))
    with torch.autograd.forward_ad.dual_level(), pytest.raises(UnsupportedError, match="q is a dual tensor"):
        attend(torch.autograd.forward_ad.make_dual(q, q), k, v)


def test_vmap_is_a_loop():
    batches = [torch.stack([x, 2 * x]) for x in inputs()]
    mapped = torch.func.vmap(lambda q, k, v: attend(q, k, v)[0])(*batches)
    assert same(mapped, [attend(*(x[i] for x in batches))[0] for i in range(2)])


def test_offsets_edited_between_forward_and_backward_are_noticed():
    q, k, v = inputs(grad=True)
    cu = CU.clone()
    o, _ = attend(q, k, v, cu)
    cu[1] = 2
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()


@pytest.fixture
def room(monkeypatch):
    """A backend that records what it is given; the test sets HANDLES, and the reference does the work."""
    room = types.ModuleType("room")
    room.HANDLES, room.seen = frozenset(), []

    def forward(*args):
        room.seen.append(args)
        return flamia.reference.forward(*args)

    def backward(*args, **choice):
        room.seen.append((*args, choice))
        return flamia.reference.backward(*args)

    room.forward, room.backward = forward, backward
    monkeypatch.setitem(sys.modules, "room", room)
    monkeypatch.setitem(ops.BACKENDS, "reference", "room")
    return room


def test_gradients_that_are_not_wanted_are_not_asked_of_a_backend_that_can_leave_them_out(room):
    q, k, v = inputs()
    for handles, expected in ((frozenset(), {}), ({"subset"}, {"wanted": (False, True, False)})):
        room.HANDLES = handles
        o, _ = attend(q, k.detach().requires_grad_(), v)
        room.seen.clear()
        o.sum().backward()
        assert [args[-1] for args in room.seen] == [expected]


def test_backends_get_what_they_do_not_handle_themselves(room):
    """Strides and bad offsets reach a backend only if it says that it handles them."""
    q, k, v = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in inputs())
    cu = torch.tensor([0, 3, 2, 44], dtype=torch.int32)
    flamia.attention_varlen(q, k, v, cu, check_offsets=False)
    assert all(x.is_contiguous() for x in room.seen[-1][:3])
    assert room.seen[-1][3].cu_q.tolist() == [0, 3, 3, 44]
    room.HANDLES = {"strides", "offsets"}
    room.forward = lambda *args: room.seen.append(args) or (q.new_empty(46, 4, 8), torch.empty(4, 46), q.new_empty(0))
    flamia.attention_varlen(q, k, v, cu, check_offsets=False)
    assert room.seen[-1][0] is not None and not room.seen[-1][0].is_contiguous()
    assert room.seen[-1][3].cu_q.tolist() == [0, 3, 2, 44]


# --------------------------------------------------------------------------------------------------------- compilation


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_first_compiled_call_is_one_graph_and_equals_eager(backend):
    tensors = inputs(grad=True)
    compiled = torch.compile(attend, fullgraph=True, backend=backend)
    assert same(compiled(*tensors), attend(*tensors))
    assert same(gradients(compiled, tensors), gradients(attend, tensors))


def test_compiled_transposed_inputs():
    """pytorch/torchtitan #3776: stand-ins that promised the input's strides, where the real outputs are contiguous."""
    tensors = inputs(grad=True)

    def call(q, k, v):
        o, lse = attend(*(x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k, v)))
        return o.view(-1, 2).flatten(), lse.view(-1)  # view: fails on other strides than those promised

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert same(compiled(*tensors), call(*tensors))


def test_lengths_are_dynamic_and_are_not_baked_in():
    counter = CompileCounter()
    compiled = torch.compile(attend, fullgraph=True, backend=counter)
    for tokens, cu in ((10, (0, 3, 9)), (17, (0, 17, 17)), (64, (0, 20, 63)), (5, (0, 1, 5))):
        tensors, cu = inputs(tokens), torch.tensor(cu, dtype=torch.int32)
        assert same(compiled(*tensors, cu), attend(*tensors, cu))
    assert counter.frame_count <= 2  # the first length, then any


def test_max_seqlen_does_not_recompile():
    counter = CompileCounter()

    def call(q, k, v, longest):
        return flamia.flash_attn_varlen_func(q, k, v, CU, CU, longest, longest, causal=True)

    compiled = torch.compile(call, fullgraph=True, backend=counter)
    for longest in (37, 38, 64, 100, torch.tensor(50), torch.tensor(51)):
        assert torch.equal(compiled(*inputs(), longest), call(*inputs(), None))
    assert counter.frame_count <= 3  # an int, any int, a tensor


@pytest.mark.parametrize("form", ["text", "object", "made inside", "default"])
def test_recipes_reach_the_compiled_operator(form, monkeypatch):
    seen = []
    choose = ops._choose
    monkeypatch.setattr(ops, "_choose", lambda *args: seen.append(args[4]) or choose(*args))
    expected = Recipe.fast("mxfp8", lag=1)
    recipe = {"text": str(expected), "object": expected, "default": None}.get(form)

    def call(q, k, v):
        if form == "made inside":
            return attend(q, k, v, recipe=Recipe.fast("mxfp8", lag=1))
        return attend(q, k, v, recipe=recipe)

    torch.compile(call, fullgraph=True, backend="eager")(*inputs())
    assert seen == [Recipe.strict() if form == "default" else expected]


def test_equal_recipes_share_a_graph_and_others_do_not():
    counter = CompileCounter()
    compiled = torch.compile(attend, fullgraph=True, backend=counter)
    for recipe in (Recipe.strict(), Recipe.strict(), Recipe.fast(), Recipe.fast(), Recipe.strict()):
        assert same(compiled(*inputs(), recipe=recipe), attend(*inputs(), recipe=recipe))
    assert counter.frame_count == 2


def test_bad_offsets_are_seen_by_a_compiled_call():
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    cu = CU.clone()
    compiled(*inputs(), cu)
    cu[2] = 41
    with pytest.raises(ValueError, match="must not decrease"):
        compiled(*inputs(), cu)


# ------------------------------------------------------------------------------------------------------- checkpointing


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_call_equals_the_plain_one(reentrant, forward_calls):
    tensors = inputs(grad=True)
    plain = gradients(attend, tensors, retain_graph=False)
    forward_calls.clear()

    def checkpointed(*xs):
        return checkpoint(attend, *xs, use_reentrant=reentrant)

    leaves = [x.detach().requires_grad_() for x in tensors]
    o, lse = checkpointed(*leaves)
    weight = torch.linspace(-1, 1, o.numel()).view_as(o).to(o.dtype)
    ((o * weight).sum() + 0.5 * lse.masked_fill(lse.isinf(), 0).sum()).backward()
    assert same([x.grad for x in leaves], plain)
    assert len(forward_calls) == 2  # once, and once more for the backward


def test_selective_checkpointing_saves_the_operator(forward_calls):
    tensors = inputs(grad=True)
    plain = gradients(attend, tensors)
    forward_calls.clear()
    contexts = functools.partial(create_selective_checkpoint_contexts, flamia.SAVE_OPS)

    def block(q, k, v):
        return attend(q * 1.0, k * 1.0, v * 1.0)  # something to recompute beside what is saved

    selective = gradients(lambda *xs: checkpoint(block, *xs, use_reentrant=False, context_fn=contexts), tensors)
    assert same(selective, plain)
    assert len(forward_calls) == 1


# ------------------------------------------------------------------------------------------------------------ backends


def test_import_loads_no_backend():
    code = """if True:
        import sys, torch
        before = set(sys.modules)
        import flamia
        heavy = ("triton", "torch._dynamo", "flamia.reference", "flamia.hopper", "flamia.audit")
        print([name for name in set(sys.modules) - before if name.startswith(heavy)])
    """
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == "[]"


def on_a_gpu(x):
    """Enough of a CUDA tensor to choose a backend for, on a machine without one."""
    return types.SimpleNamespace(device=torch.device("cuda"), shape=x.shape, dtype=x.dtype)


def choose(name, reason, monkeypatch):
    kernels = types.ModuleType("flamia.hopper")
    kernels.supports = lambda q, k, v, recipe, window: reason
    monkeypatch.setitem(sys.modules, "flamia.hopper", kernels)
    return ops._choose(name, *map(on_a_gpu, inputs()), Recipe.strict(), (-1, 0)), kernels


@pytest.mark.parametrize("name", ["auto", "hopper"])
def test_a_gpu_gets_its_kernels(name, monkeypatch):
    chosen, kernels = choose(name, None, monkeypatch)
    assert chosen is kernels


@pytest.mark.parametrize("name", ["auto", "hopper"])
def test_what_kernels_cannot_do_raises_and_is_never_replaced(name, monkeypatch):
    with pytest.raises(UnsupportedError) as error:
        choose(name, "head dimension 16 has no kernel", monkeypatch)
    for words in ("head dimension 16 has no kernel", "mxfp8_scores/strict", "(46, 4, 16)", "backend='reference'"):
        assert words in str(error.value)


@pytest.mark.parametrize("name", ["auto", "hopper"])
def test_missing_kernels_say_which_module(name, monkeypatch):
    def missing(module):
        raise ModuleNotFoundError(f"No module named {module!r}", name="triton")

    monkeypatch.setattr(ops.importlib, "import_module", missing)
    with pytest.raises(UnsupportedError, match=r"'triton' is missing.*backend='reference'"):
        ops._choose(name, *map(on_a_gpu, inputs()), Recipe.strict(), (-1, 0))


def test_the_reference_runs_on_a_gpu_only_when_asked_for():
    assert ops._choose("reference", *map(on_a_gpu, inputs()), Recipe.strict(), (-1, 0)) is flamia.reference
