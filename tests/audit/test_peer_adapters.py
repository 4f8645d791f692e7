"""How other people's attention is called: by the names of its parameters, or through adapters tried on stand-ins."""

import functools
import inspect
import sys
import types

import pytest
import torch
from audit import toys
from audit.peer_toys import KNOWN, narrowed, peer_of, swept, verdicts

from flamia.audit.controls import attend
from flamia.audit.peer_calls import function, named, names_of
from flamia.audit.peers import Options

# ------------------------------------------------------------------------------------------------------- how it calls


def recorded(fn):
    """A function with the signature of ``fn`` that keeps its keyword arguments and returns q."""

    def call(*args, **given):
        call.given = given
        return args[0]

    call.__signature__ = inspect.signature(fn)
    return call


def flash2(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal=False, window_size=(-1, -1),
    deterministic=False, return_attn_probs=False,
): ...  # fmt: skip
def flash4(
    q, k, v, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, causal=False,
    window_size=(None, None), return_lse=False,
): ...  # fmt: skip
def varlen(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, window_size=(-1, -1), enable_gqa=False
): ...  # fmt: skip


@pytest.mark.parametrize(
    "fn,options,expected",
    [
        (flash2, {"deterministic": True, "lse": True},
         {"causal": True, "deterministic": True, "return_attn_probs": True}),
        (flash2, {"causal": False, "windowed": True}, {"causal": False, "window_size": (40, 24)}),
        (flash4, {"windowed": True, "lse": True}, {"causal": True, "window_size": (40, 0), "return_lse": True}),
        (varlen, {}, {"window_size": (-1, 0), "enable_gqa": True}),
        (varlen, {"causal": False, "grouped": False}, {}),
        (varlen, {"causal": False, "windowed": True}, {"window_size": (40, 24), "enable_gqa": True}),
    ],
)  # fmt: skip
def test_signatures_are_filled_by_name(fn, options, expected):
    q, cu = torch.zeros(9, 4, 8), torch.tensor([0, 2, 2, 9], dtype=torch.int32)
    call = recorded(fn)
    named(call, names_of(call))(q, q, q, cu, Options(**options))
    cus = {name: x for name, x in call.given.items() if name.startswith("cu_")}
    assert len(cus) == 2 and all(torch.equal(x, cu) for x in cus.values())
    assert {x for name, x in call.given.items() if name.startswith("max_")} == {7}
    rest = {name: x for name, x in call.given.items() if not name.startswith(("cu_", "max_"))}
    assert rest == expected


def test_offsets_of_queries_and_of_keys_go_where_they_belong():
    q, k = torch.zeros(9, 4, 8), torch.zeros(12, 4, 8)
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32) for x in ([0, 2, 2, 9], [0, 3, 8, 12]))
    for fn, keys in ((flash2, "cu_seqlens_k max_seqlen_k"), (varlen, "cu_seq_k max_k")):
        call = recorded(fn)
        named(call, names_of(call))(q, k, k, (cu_q, cu_k), Options(cross=True))
        offsets, longest = keys.split()
        assert torch.equal(call.given[offsets], cu_k) and call.given[longest] == 5
        queries = offsets.replace("_k", "_q")
        assert torch.equal(call.given[queries], cu_q) and call.given[longest.replace("_k", "_q")] == 7

    def one_cu(q, k, v, cu_seqlens): ...

    with pytest.raises(NotImplementedError, match="offsets of keys"):
        named(one_cu, names_of(one_cu))(q, k, k, (cu_q, cu_k), Options(cross=True))
    assert function("m:f", one_cu).find()[1].cross == (False,)
    assert function("m:f", flash2).find()[1].cross == (False, True)


def test_unequal_lengths_are_swept_and_an_mask_of_the_wrong_corner_is_foreign():
    def flash(q, k, v, cu_seqlens_q, cu_seqlens_k, causal=True, corner="bottom"):
        return toys.with_lse(q, k, v, toys.aligned(cu_seqlens_q, cu_seqlens_k, corner=corner))[0]

    sweep = {"grouped": (True,), "causal": (True,), "cross": (False, True)}
    assert verdicts(swept(peer_of(flash, **sweep))) == {
        "packed causal GQA bf16": "clean", "packed causal GQA cross bf16": "clean",
    }  # fmt: skip
    top = functools.partial(flash, corner="top")
    assert verdicts(swept(peer_of(top, **sweep))) == {
        "packed causal GQA bf16": "clean", "packed causal GQA cross bf16": "undecided",
    }  # fmt: skip


def test_a_function_of_yours_is_swept_as_far_as_its_signature_goes():
    def plain(q, k, v, cu):
        return attend(q, k, v, cu, causal=False)

    _, axes = function("m:f", plain, causal=False).find()
    assert {o.causal for o in axes.combinations()} == {False} and len(axes.combinations()) == 6
    result = swept(peer_of(plain, causal=(False,)))
    assert result.verdict == "clean" and "prefix" not in result.rows[0].report.claims


def test_torch_is_told_of_determinism_in_the_backward_too():
    told = set()

    class Telling(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            told.add(torch.are_deterministic_algorithms_enabled())
            return grad

    def telling(q, k, v, cu_seqlens):
        return Telling.apply(attend(q, k, v, cu_seqlens))

    swept(peer_of(telling, build=lambda q, k, v, cu, options: telling(q, k, v, cu), deterministic=(True,)))
    assert told == {True} and not torch.are_deterministic_algorithms_enabled()


def test_what_is_asked_and_not_named_is_refused():
    call = named(flash4, names_of(flash4))
    with pytest.raises(NotImplementedError, match="no parameter for determinism"):
        call(*[torch.zeros(3, 4, 8)] * 3, torch.tensor([0, 3]), Options(deterministic=True))


# ------------------------------------------------------------------- adapters that need a GPU, against stand-ins of them


def module(monkeypatch, name, **contents):
    parts = name.split(".")
    for n in range(1, len(parts)):
        above = ".".join(parts[:n])
        if above not in sys.modules:
            monkeypatch.setitem(sys.modules, above, types.ModuleType(above))
    made = types.ModuleType(name)
    vars(made).update(contents)
    monkeypatch.setitem(sys.modules, name, made)


def test_the_transformer_engine_adapter_speaks_its_language(monkeypatch):
    """Against a stand-in with the public signature: that the lines run, not that the library does."""

    class DotProductAttention(torch.nn.Module):
        def __init__(self, heads, dim, *, num_gqa_groups, attention_dropout, attn_mask_type, qkv_format, window_size):
            super().__init__()
            self.mask, self.format, self.window = attn_mask_type, qkv_format, window_size
            assert (heads, num_gqa_groups, dim, attention_dropout) == (4, 2, 16, 0.0)

        def forward(self, q, k, v, cu_seqlens_q=None, cu_seqlens_kv=None, max_seqlen_q=None, max_seqlen_kv=None):
            assert inside == ["MXFP8"] and self.format == ("bshd" if cu_seqlens_q is None else "thd")
            assert self.mask == ("causal" if cu_seqlens_q is None else "padding_causal") and self.window == (-1, 0)
            if cu_seqlens_q is None:
                cu = torch.tensor([0, q.shape[1]])
                return torch.stack([attend(q[b], k[b], v[b], cu) for b in range(len(q))]).flatten(2)
            return attend(q, k, v, cu_seqlens_q).flatten(1)

    class Autocast:
        def __init__(self, enabled, recipe):
            self.recipe = recipe

        def __enter__(self):
            inside.append(self.recipe)

        def __exit__(self, *error):
            inside.pop()

    inside = []
    module(monkeypatch, "transformer_engine.pytorch", DotProductAttention=DotProductAttention, autocast=Autocast)
    module(
        monkeypatch, "transformer_engine.common.recipe", MXFP8BlockScaling=lambda fp8_dpa: "MXFP8" if fp8_dpa else ""
    )
    result = swept(narrowed("te:mxfp8", packing=("packed", "batched")))
    assert verdicts(result) == {"packed causal GQA bf16": "clean", "batched causal GQA bf16": "clean"}


def test_the_torchao_adapter_patches_nothing_itself(monkeypatch):
    applied = []
    module(
        monkeypatch, "torchao.prototype.attention.api", apply_low_precision_attention=lambda m: applied.append(m) or m
    )
    result = swept(narrowed("torchao", packing=("loop",)))
    assert len(applied) == 1 and result.rows[0].verdict in ("clean", "undecided") and result.rows[0].error < 0.02


def test_adapters_that_nobody_ran_say_so():
    never = ("flash:2", "flash:3", "te:mxfp8", "te:current", "te:delayed", "te:16bit")
    for name in (*never, "torchao"):
        assert KNOWN[name].caution.startswith("never run")
    for name in ("sdpa:flash", "flash:4", "cudnn:fp8", "cudnn:fp8-current", "flex:eager", "flamia:mxfp8/strict"):
        assert not KNOWN[name].caution
