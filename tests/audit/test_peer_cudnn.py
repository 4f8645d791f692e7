"""The cuDNN adapter against a stand-in of the frontend: that its lines run and mean what they say, not that cuDNN does."""

import sys
import types

import pytest
import torch
from audit.peer_toys import KNOWN, swept

from flamia.audit.peer_cudnn import BACKWARD, FORWARD, power
from flamia.audit.peers import Axes, Options, Peer

LOG: list[str] = []


class Symbol:
    """A tensor of a graph: hashable, with the setters that an output needs."""

    def __init__(self, name="", dim=None):
        self.name, self.dim = name, dim

    def set_output(self, _):
        return self

    def set_dim(self, dim):
        self.dim = dim
        return self

    set_stride = set_data_type = set_output


def masked(causal, s):
    seen = torch.ones(s, s, dtype=torch.bool)
    return seen.tril() if causal else seen


class Graph:
    """A stand-in for ``cudnn.pygraph``: float64 attention on codes and scales, rounded to E4M3 where cuDNN rounds."""

    def __init__(self, **kinds):
        assert set(kinds) == {"io_data_type", "intermediate_data_type", "compute_data_type", "handle"}
        self.steps = []

    def tensor(self, name, dim, stride, data_type):
        return Symbol(name, dim)

    def sdpa_fp8(self, generate_stats, attn_scale, **given):
        self.causal = given.pop("right_bound", None) == 0 and given.pop("diagonal_alignment") == "top-left"
        assert set(given) == {"q", "k", "v", *FORWARD} and generate_stats and attn_scale == given["q"].dim[-1] ** -0.5
        self.given, self.scale = given, attn_scale
        self.out = Symbol("o"), Symbol("stats"), Symbol("amax_s"), Symbol("amax_o")
        return self.out

    def sdpa_fp8_backward(self, attn_scale, use_deterministic_algorithm, **given):
        self.causal = given.pop("right_bound", None) == 0 and given.pop("diagonal_alignment") == "top-left"
        assert set(given) == {"q", "k", "v", "o", "dO", "stats", *BACKWARD}
        if given["q"].dim[-1] != 32:
            raise NotSupported("d != 32 is not supported in the backward")
        LOG.append(f"backward deterministic={use_deterministic_algorithm}")
        self.given, self.scale = given, attn_scale
        self.out = tuple(Symbol(n) for n in ("dQ", "dK", "dV", "amax_dQ", "amax_dK", "amax_dV", "amax_dP"))
        return self.out

    def __getattr__(self, name):
        if name in ("validate", "build_operation_graph", "create_execution_plans", "check_support", "build_plans"):
            return lambda *_: self.steps.append(name)
        raise AttributeError(name)

    def get_workspace_size(self):
        return 0

    def execute(self, pack, workspace, handle):
        assert len(self.steps) == 5 and workspace.dtype == torch.uint8 and len(workspace) == 1 and handle == "handle"
        given = {n: pack[x].double() for n, x in self.given.items()}

        def operand(name):
            x = given[name].transpose(1, 2) * given[f"descale_{name}"].flatten()  # (b, h, s, d)
            return x.repeat_interleave(given["q"].shape[2] // x.shape[1], 1)

        q, k, v = map(operand, "qkv")
        s = (q @ k.mT * self.scale).masked_fill(~masked(self.causal, q.shape[2]), -torch.inf)
        p = s.softmax(-1)
        put = {x.name: pack[x] for x in self.out}
        if "o" in put:
            o = (p @ v).transpose(1, 2) * given["scale_o"].flatten()
            put["o"].copy_(o.clamp(-448, 448))
            put["stats"].copy_(s.logsumexp(-1, keepdim=True))
            put["amax_o"].copy_((p @ v).abs().amax().reshape(1, 1, 1, 1))
            return
        do, o = operand("dO"), operand("o")
        ds = p * (do @ v.mT - (do * o).sum(-1, keepdim=True))
        code = (ds * given["scale_dP"].flatten()).clamp(-448, 448).to(torch.float8_e4m3fn).double()
        ds = code * given["descale_dP"].flatten()
        put["amax_dP"].copy_(ds.abs().amax().reshape(1, 1, 1, 1))
        group = q.shape[1] // put["dK"].shape[2]
        grads = {"dQ": ds @ k * self.scale, "dK": ds.mT @ q * self.scale, "dV": p.mT @ do}
        for name, x in grads.items():
            x = x if name == "dQ" else x.unflatten(1, (-1, group)).sum(2)
            put[f"amax_{name}"].copy_(x.abs().amax().reshape(1, 1, 1, 1))
            put[name].copy_((x.transpose(1, 2) * given[f"scale_{name}"].flatten()).clamp(-448, 448))


class NotSupported(Exception):
    """Of no class that says "refused", as the library's own."""


@pytest.fixture
def frontend(monkeypatch):
    made = types.ModuleType("cudnn")
    vars(made).update(
        pygraph=Graph, create_handle=lambda: "handle", heur_mode=types.SimpleNamespace(A="a", FALLBACK="f"),
        data_type=types.SimpleNamespace(FP8_E4M3="e4m3", FLOAT="float"),
        diagonal_alignment=types.SimpleNamespace(TOP_LEFT="top-left"),
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "cudnn", made)
    LOG.clear()


def peer(name, **axes):
    call, _ = KNOWN[name].build()
    given = {"packing": ("batched",), "windowed": (False,), "grouped": (True,), "dtype": (torch.bfloat16,)} | axes
    return Peer(name, "", lambda: (call, Axes(**given)))


def sweep(name, head_dim, **axes):
    from flamia.audit.peer_report import audit_peers

    return audit_peers([peer(name, **axes)], effort="spot", head_dim=head_dim)


def test_with_constant_scales_a_row_local_kernel_is_clean(frontend):
    result = sweep("cudnn:fp8", 32, causal=(True, False), deterministic=(False, True))
    assert {row.verdict for row in result.rows} == {"clean"} and all(0.001 < row.error < 0.2 for row in result.rows)
    assert all(("prefix", "dQ", "do") in row.report.tried for row in result.rows if row.options.causal)
    assert set(LOG) == {"backward deterministic=False", "backward deterministic=True"}


def test_scales_from_the_call_leak_through_the_caller(frontend):
    (row,) = sweep("cudnn:fp8-current", 32, causal=(True,)).rows
    assert row.verdict == "leak" and row.report.statuses["prefix"] == row.report.statuses["document"] == "leak"
    assert {f.tensor for f in row.report.findings if f.contract == "prefix"} >= {"O", "dQ"}


def test_where_the_backward_refuses_o_is_audited_alone_in_its_words(frontend):
    (row,) = sweep("cudnn:fp8", 16, causal=(True,)).rows
    assert row.verdict == "clean" and not row.report.masses  # spot reads no sums
    assert "NotSupported: d != 32 is not supported" in row.gradients
    assert all(tensor == "O" for _, tensor, _ in row.report.tried)


def test_gradients_are_those_of_attention(frontend):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 40, h, 32).bfloat16().requires_grad_() for h in (4, 2, 2))
    do = torch.randn(2, 40, 4, 32).bfloat16()
    for name in ("cudnn:fp8", "cudnn:fp8-current"):
        call, _ = KNOWN[name].build()
        o, lse = call(q, k, v, None, Options("batched", lse=True))
        got = torch.autograd.grad(o, (q, k, v), do)
        exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
        heads = [x.transpose(1, 2) for x in exact]
        ref = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True).transpose(1, 2)
        for a, b in zip((o, *got), (ref, *torch.autograd.grad(ref, exact, do.double()))):
            assert (a.double() - b).norm() / b.norm() < 0.1
        assert lse.shape == (2, 4, 40) and not lse.requires_grad


def test_powers_of_two_fill_the_format():
    amax = torch.tensor([448.0, 449.0, 1.0, 2.0**-20, 0.0, torch.inf])
    scale = power(amax)
    assert scale.tolist() == [1.0, 0.5, 256.0, 2.0**28, 1.0, 1.0]
    assert (amax[:4] * scale[:4] <= 448).all() and (amax[:4] * scale[:4] > 224).all()


def test_without_the_library_the_peer_says_so():
    assert "cudnn" not in sys.modules
    assert KNOWN["cudnn:fp8"].find().startswith("ModuleNotFoundError") and swept(KNOWN["cudnn:fp8"]).exit_code == 2
