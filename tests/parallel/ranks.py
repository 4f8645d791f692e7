"""What the ranks of a test do. Every function here runs in all processes of a gloo group, on one thread each."""

from __future__ import annotations

import os
import traceback
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from helpers import inputs, offsets, same_bits

import flamia
from flamia.bench.parallel import measure
from flamia.bench.workloads import Workload
from flamia.integrations.parallel import ContextParallel

LIMIT = timedelta(seconds=100)
"""For ranks to wait for one that has failed."""


def spawn(ranks: int, function, folder, *arguments) -> list[str]:
    """Run function(rank, *arguments) on every rank; returns what went wrong, by rank."""
    os.environ["OMP_NUM_THREADS"] = "1"
    mp.spawn(_run, (ranks, function, str(folder), arguments), nprocs=ranks)
    return [path.read_text() for path in sorted(folder.glob("failed-*"))]


def _run(rank: int, ranks: int, function, folder: str, arguments: tuple) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=ranks, timeout=LIMIT)
    try:
        function(rank, *arguments)
    except BaseException:
        with open(f"{folder}/failed-{rank}", "w") as file:
            file.write(traceback.format_exc())
    dist.barrier()
    dist.destroy_process_group()


# name: lengths, (heads, key heads), recipe, window
CASES = {
    "one long document": ((1111,), (4, 2), "mxfp8_scores/strict", None),
    "documents of all kinds": ((700, 1, 0, 129, 300, 64, 128, 0), (4, 2), "mxfp8_scores/strict", None),
    "fewer documents than ranks, one block": ((90,), (2, 1), "mxfp8_scores/strict", None),
    "many whole documents": ((200, 210, 190, 205, 195, 200, 150, 250), (2, 2), "mxfp8_scores/strict", None),
    "pieces that share a call": ((300, 300, 300), (2, 1), "mxfp8/strict", None),
    "window": ((900, 40, 300), (4, 2), "mxfp8_scores/strict", (150, 0)),
    "window of whole blocks": ((900, 300), (2, 1), "mxfp8_scores/strict", (127, 0)),
    "window as long as a document": ((1000, 300), (2, 1), "mxfp8_scores/strict", (1100, 0)),
    "window of nothing": ((500, 300), (2, 1), "mxfp8_scores/strict", (0, 0)),
    "16 bits": ((700, 300), (2, 1), "bf16/strict", None),
    "mxfp8": ((1000, 300), (4, 2), "mxfp8/strict", None),
    "mxfp8, window": ((1000, 300), (2, 1), "mxfp8/strict", (200, 0)),
    "mxfp8, rotated, running": ((800, 300), (2, 1), "mxfp8/strict,rotate=True,u_range=running", None),
    "4-bit scores": ((700, 300), (2, 1), "nvfp4_fp8/strict,dv_scale=boost", None),
    "fold": ((700, 300), (2, 1), "mxfp8/fold", None),
    "compensated": ((700, 300), (2, 1), "mxfp8_scores/strict,delta=compensated", None),
    "small blocks": ((500, 300), (2, 1), "mxfp8/strict,frontier_block=32", None),
    "scores as given": ((700, 300), (2, 1), "mxfp8_scores/strict,frontier_scores=bf16", None),
    "scores as given, window": ((900, 300), (2, 1), "mxfp8_scores/strict,frontier_scores=bf16", (200, 0)),
    "E in 16 bits": ((500, 300), (2, 1), "mxfp8_scores/strict,e_format=bf16,rotate=True", None),
}  # fmt: skip


def whole(q, k, v, do, dlse, cu, recipe, window):
    """One device: o, lse, dq, dk, dv."""
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    o, lse = flamia.attention_varlen(*leaves, cu, causal=True, window=window, recipe=recipe, return_lse=True)
    return o.detach(), lse.detach(), *torch.autograd.grad((o, lse), leaves, (do, dlse))


def shared(here, q, k, v, do, dlse):
    """The same, of this rank's rows, put together again on every rank."""
    leaves = [here.shard(x).requires_grad_() for x in (q, k, v)]
    o, lse = here.attention(*leaves, return_lse=True)
    gradients = torch.autograd.grad((o, lse), leaves, (here.shard(do), here.shard(dlse.t()).t()))
    rows = [o.detach(), lse.detach().t(), *gradients]
    o, lse, *gradients = (here.unshard(x, len(q)) for x in rows)
    return o, lse.t(), *gradients


def draw(lengths, heads, dim=16, tail=0):
    """q, k, v, dO, dLSE with tokens of very different magnitude, and zeros among them."""
    rows = sum(lengths) + tail
    q, k, v, do = inputs(rows, heads, dim, seed=len(lengths))
    size = torch.exp2(torch.randint(-3, 4, (4, rows, 1, 1), generator=torch.Generator().manual_seed(1)))
    do = do * size[3] * (size[2] < 4)
    dlse = torch.randn(heads[0], rows, generator=torch.Generator().manual_seed(2))
    return (q * size[0]).bfloat16(), (k * size[1]).bfloat16(), (v * size[2]).bfloat16(), do.bfloat16(), dlse


def equal_to_one_device(rank: int, names: list[str]) -> None:
    for name in names:
        lengths, heads, recipe, window = CASES[name]
        q, k, v, do, dlse = draw(lengths, heads, tail=3)
        here = ContextParallel(offsets(lengths), recipe=recipe, window=window)
        got = shared(here, q, k, v, do, dlse)
        rows = sum(lengths)
        want = whole(q, k, v, do, dlse, offsets(lengths), recipe, window)
        for what, x, y in zip(("o", "lse", "dq", "dk", "dv"), got, want, strict=True):
            x, y = (z[..., :rows] if what == "lse" else z for z in (x, y))
            assert same_bits(x, y), f"{name}: {what} differs, {here.plan}, {here.plan.pieces}"


def all_of(rank: int, functions) -> None:
    """Several tests for the price of one start."""
    for function in functions:
        function(rank)


def tokens_that_are_not_finite(rank: int) -> None:
    lengths = (900, 300)
    q, k, v, do, dlse = draw(lengths, (4, 2))
    for x, row, value in ((k, 100, torch.nan), (v, 700, torch.inf), (q, 450, -torch.inf), (do, 1000, torch.nan)):
        x[row, 0, 3] = value
    v[600, 1] = do[200, 3] = torch.finfo(v.dtype).max  # its code stands for more than the format holds
    for recipe in ("mxfp8_scores/strict", "mxfp8/strict"):
        here = ContextParallel(offsets(lengths), recipe=recipe, window=(300, 0))
        want = whole(q, k, v, do, dlse, offsets(lengths), recipe, (300, 0))
        for x, y in zip(shared(here, q, k, v, do, dlse), want, strict=True):
            assert y.isnan().any() and not y.isnan().all() and same_bits(x, y)


def parts_of_a_call(rank: int) -> None:
    """Subsets of gradients, no LSE, a scale, float16, recomputation, values of another width than keys."""
    lengths = (700, 100)
    q, k, v, do, _ = (x.half() for x in draw(lengths, (4, 2)))
    v, do = v[..., :8].contiguous(), do[..., :8].contiguous()
    here, cu = ContextParallel(offsets(lengths)), offsets(lengths)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    o = flamia.attention_varlen(*leaves, cu, causal=True, softmax_scale=0.3)
    want = torch.autograd.grad(o, leaves, do)
    for wanted in ((True, False, False), (False, True, False), (False, False, True), (True, True, True)):
        mine = [here.shard(x).requires_grad_(want) for x, want in zip((q, k, v), wanted)]
        for recomputed in (False, True):

            def call(*xs):
                return here.attention(*xs, softmax_scale=0.3)

            got = torch.utils.checkpoint.checkpoint(call, *mine, use_reentrant=False) if recomputed else call(*mine)
            assert same_bits(here.unshard(got.detach()), o.detach())
            chosen = [i for i in range(3) if wanted[i]]
            gradients = torch.autograd.grad(got, [mine[i] for i in chosen], here.shard(do))
            for i, x in zip(chosen, gradients):
                assert same_bits(here.unshard(x), want[i])


def what_crosses_the_wire(rank: int) -> None:
    heads, dim = (4, 2), 16
    sent: list[int] = []

    class Counted(ContextParallel):
        def _gather(self, data, most):
            sent.append(data.numel() * data.element_size())
            return super()._gather(data, most)

    def bytes_sent(lengths, recipe):
        q, k, v, do, _ = draw(lengths, heads, dim)
        here = Counted(offsets(lengths), recipe=recipe)
        sent.clear()
        leaves = [here.shard(x).requires_grad_() for x in (q, k, v)]
        o = here.attention(*leaves)
        forward = sum(sent)
        o.backward(here.shard(do))
        return [forward, sum(sent) - forward], here

    got, here = bytes_sent((1024,), "mxfp8_scores/strict")
    assert here.tokens == 512
    code, wide, hq, hk = dim + 1, 2 * dim, *heads
    assert got == [512 * 2 * hk * code, 512 * (hk * (wide + code) + hq * (wide + code + wide + 4))]
    got, _ = bytes_sent((1024,), "mxfp8/strict")
    assert got == [512 * 2 * hk * wide, 512 * (2 * hk * wide + hq * (3 * wide + 4))]
    _, here = bytes_sent((300, 300, 300), "mxfp8_scores/strict")
    assert sum(piece.end < 300 for piece in here.plan.of_rank(0)) == 3
    assert rank or [call.window for call in here.columns_calls[-2:]] == [
        (-1, 128),
        (-1, 256),
    ]  # two pieces share a call
    got, here = bytes_sent((200, 200), "mxfp8_scores/strict")
    assert got == [0, 0] and not here.plan.shared  # whole documents: nothing crosses


def errors_teach(rank: int) -> None:
    def refused(message, error=ValueError, *arguments, **options):
        try:
            ContextParallel(*arguments, **options)
        except error as found:
            assert message in str(found), found
        else:
            raise AssertionError(f"not refused: {message}")

    cu = offsets((300, 200))
    unsupported = flamia.UnsupportedError
    refused("does not promise 'truncate'", unsupported, cu, recipe="mxfp8/fast")
    refused("is causal", unsupported, cu, causal=False)
    refused("centered", unsupported, cu, recipe="mxfp8/strict,delta=centered")
    refused("int32", ValueError, cu.long())
    refused("must not decrease", ValueError, torch.tensor([0, 5, 3, 9], dtype=torch.int32))
    refused("other cu_seqlens, recipe or window than ranks", ValueError, offsets((300, 200 + rank)))
    refused("other cu_seqlens, recipe or window than ranks", ValueError, cu, window=(100 + rank, 0))
    here = ContextParallel(cu)
    x = torch.zeros(500, 2, 16, dtype=torch.bfloat16)
    for call, message in (
        (lambda: here.attention(x, x, x), f"the {here.tokens} rows that rank {rank} holds"),
        (lambda: here.shard(x[:100]), "takes the whole buffer, 500 rows"),
        (lambda: here.unshard(x), f"the {here.tokens} rows"),
        (lambda: here.attention(*[here.shard(x)] * 3, backend="none"), "backend must be"),
    ):
        try:
            call()
        except ValueError as found:
            assert message in str(found), found
        else:
            raise AssertionError(f"not refused: {message}")


class Everywhere:
    """Context-parallel attention of whole buffers, for an audit that runs on every rank with one seed."""

    def __init__(self, recipe: str, window) -> None:
        self.options = {"recipe": recipe, "window": window}

    def __call__(self, q, k, v, cu):
        here = ContextParallel(cu, **self.options)
        with torch.no_grad():
            return here.unshard(here.attention(*(here.shard(x) for x in (q, k, v))), len(q))

    def backward(self, q, k, v, cu, do):
        here = ContextParallel(cu, **self.options)
        with torch.enable_grad():
            leaves = [here.shard(x).requires_grad_() for x in (q, k, v)]
            gradients = torch.autograd.grad(here.attention(*leaves), leaves, here.shard(do))
        return tuple(here.unshard(x, len(q)) for x in gradients)


def audited(rank: int) -> None:
    for recipe in ("mxfp8_scores/strict", "mxfp8/strict"):
        report = flamia.audit(Everywhere(recipe, None), effort="spot", heads=(2, 1), head_dim=16)
        assert report.exit_code == 0, str(report)


def benchmarked(rank: int) -> None:
    """The benchmark checks the bits before it times anything."""
    workload = Workload("300+2x40", (300, 40, 40), 2, 1, 16)
    found = measure(workload, 1, torch.device("cpu"))
    assert found["ranks"] == 2 and found["train"]["ratio"][0] > 0 and found["forward"]["all_ms"] > 0
    right = ContextParallel.attention
    ContextParallel.attention = lambda self, *tensors: right(self, *tensors) + rank  # on one rank of the two
    try:
        measure(workload, 1, torch.device("cpu"))
    except SystemExit as stopped:
        assert "nothing is timed" in str(stopped)
    else:
        raise AssertionError("timed what is wrong")
    finally:
        ContextParallel.attention = right
