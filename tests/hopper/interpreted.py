"""What can run of the Hopper kernels without a GPU: the lists of work and the encoders, by Triton's interpreter, on tensors
of the CPU, through the same host code that a card gets. The attention kernels are left out (Gluon has no interpreter), and
codes are not compared (the interpreter's rounding to E4M3 is not the hardware's): tests/gpu does both.

A program of its own, since the interpreter is chosen before Triton is imported. Prints a line for each check that holds.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

import math
import sys
from dataclasses import replace
from types import SimpleNamespace

import torch

from flamia.formats import exp2_int
from flamia.hopper import launch
from flamia.packing import Documents
from flamia.quantize import quantize
from flamia.saved import RECORD

torch.set_num_threads(1)
RECIPE = launch.PLAIN
RECORDED: dict[str, dict] = {}


class Recorded:
    def __init__(self, kernel, runs: bool) -> None:
        self.kernel, self.runs = kernel, runs

    def __getitem__(self, grid):
        def call(*args, **options):
            names = self.kernel.arg_names
            RECORDED[self.kernel.__name__] = dict(zip(names, args)) | options
            if self.runs:
                self.kernel[grid](*args, **options)

        return call


for name in ("encode_kernel", "encode_gradient_kernel"):
    setattr(launch, name, Recorded(getattr(launch, name), True))
for name in ("forward_kernel", "dkv_kernel", "dq_kernel"):
    setattr(launch, name, Recorded(SimpleNamespace(arg_names=(), __name__=name), False))
launch.multiprocessors = lambda device: 132

# query lengths, key lengths, left, right
CASES = (
    ([300, 0, 1, 128], None, None, 0),
    ([257, 130], None, None, None),
    ([500, 20], None, 60, 20),
    ([100, 1, 300], [500, 129, 260], None, 0),
    ([300, 129], [100, 0], 3, 0),
    ([0, 0], None, None, 0),
)


def offsets(lengths) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def case(lq, lk, left, right, tail=5, heads=(2, 1), d=64):
    torch.manual_seed(0)
    documents = Documents(offsets(lq), offsets(lk or lq), left, right)
    tq, tk = sum(lq) + tail, sum(lk or lq) + tail
    q, k, v, do = (
        torch.randn(t, h, d).bfloat16() for t, h in ((tq, heads[0]), (tk, heads[1]), (tk, heads[1]), (tq, heads[0]))
    )
    return q, k, v, do, documents


def rows_of(lengths) -> list[int]:
    """Where the tokens of the documents lie in the padded buffers."""
    rows, base = [], 0
    for n in lengths:
        rows += range(base, base + n)
        base += -(-n // 128) * 128
    return rows


def blocks_of(own, other, documents, keys: bool):
    """Records by brute force: (row, valid, padded row, position, first, end) of every block, in order."""
    found, start, pad = [], 0, 0
    for n, m in zip(own, other):
        shift = n - m if keys else m - n
        for at in range(0, n, 128):
            valid = min(128, n - at)
            if keys:
                queries, blocks = torch.arange(m) + shift, torch.arange(at, at + valid)
                seen = documents.visible(queries, blocks).any(1).nonzero().flatten() // 64
            else:
                seen = (
                    documents.visible(torch.arange(at, at + valid) + shift, torch.arange(m)).any(0).nonzero().flatten()
                    // 128
                )
            span = (int(seen.min()), int(seen.max()) + 1) if len(seen) else None
            found.append((start + at, valid, pad + at, at if keys else at + shift, span))
        start, pad = start + n, pad + -(-n // 128) * 128
    return found


def check_lists() -> None:
    for lq, lk, left, right in CASES:
        q, k, v, _, documents = case(lq, lk, left, right)
        launch.forward(q, k, v, documents, RECIPE, 0.1)
        seen = RECORDED["encode_kernel"]
        counts = seen["COUNTS"].tolist()
        plan = launch.parts(launch.forward_saving(q, k, v, documents, RECIPE, 0.1)[3], q, k, documents).plan
        for keys, table, items, count in (
            (False, plan.q_blocks, plan.q_items, counts[0]), (True, plan.k_blocks, plan.k_items, counts[1]),
        ):  # fmt: skip
            own, other = (lk or lq, lq) if keys else (lq, lk or lq)
            want = blocks_of(own, other, documents, keys)
            assert count == len(want)
            records = table.view(-1, RECORD)[:count, :10].tolist()
            for record, (row, valid, pad, position, span) in zip(records, want):
                assert record[:4] == [row, valid, pad, position], (record, row, valid, pad, position)
                if span is None:
                    assert record[6] >= record[7], record
                else:
                    assert tuple(record[6:8]) == span, (record, span)
            listed = items.view(-1, RECORD)[:count, :10].tolist()
            assert sorted(listed) == sorted(records)
            steps = [record[7] - record[6] for record in listed]
            assert steps == sorted(steps, reverse=True)
        assert counts[3:7] == [0, sum(lq), 0, sum(lk or lq)]


def check_corrupted_offsets() -> None:
    """Nonsense, but inside: every record's rows lie in the buffers."""
    q, k, v, _, _ = case([300], None, None, 0, tail=0)
    bad = torch.tensor([5, -3, 10_000_000, 7, 2**31 - 1, -(2**31)], dtype=torch.int32)
    documents = Documents(bad, bad, None, 0)
    plan = launch.parts(launch.forward_saving(q, k, v, documents, RECIPE, 0.1)[3], q, k, documents).plan
    count = int(plan.counts[0])
    records = plan.q_blocks.view(-1, RECORD)[:count]
    assert 0 < count <= plan.q_capacity
    assert (records[:, 0] >= 0).all() and (records[:, 0] + records[:, 1] <= 300).all()
    assert (records[:, 2] + 128 <= 128 * plan.q_capacity).all()


def check_factors() -> None:
    for lq, lk, left, right in CASES[:4]:
        q, k, v, _, documents = case(lq, lk, left, right)
        for x in (q, k, v):
            x *= torch.exp2(torch.randint(-60, 60, (len(x), 1, 1)).float()).bfloat16()
        q[2] = 0
        launch.forward(q, k, v, documents, RECIPE, -0.3)
        seen = RECORDED["encode_kernel"]
        factor = torch.tensor(0.3 * launch.LOG2E, dtype=torch.float32).double()
        for x, name, side, lengths, times in (
            (q, "QF", "q", lq, factor), (k, "KF", "k", lk or lq, -1.0), (v, "VF", "k", lk or lq, 1.0),
        ):  # fmt: skip
            want = quantize(x, "e4m3:coarse", documents, side).exponent[: sum(lengths)]
            got = seen[name].view(x.shape[1], -1)[:, rows_of(lengths)].T
            assert torch.equal(got.double(), exp2_int(want) * times), name


def check_common_factors() -> None:
    """One factor for 32 tokens where all have it; zeros agree with any; 0 where two differ, where one is not finite, and where
    the factor is one with which the order of multiplication could show."""
    q, k, v, _, documents = case([200, 96], None, None, 0, tail=0, heads=(1, 1))
    k[40] *= 64  # the second group
    k[70] = 0  # the third
    k[96:128] = 0  # the fourth
    k[140, 0, 3] = math.nan  # the fifth
    k[200:] = torch.randn(96, 1, 64).clamp(-3, 3).bfloat16()
    k[200:, 0, 5] = 3
    k[200:232] *= 2.0**8  # the second document, whose largest elements are 768, 3 * 2^-64 and 3 * 2^-60
    k[232:264] *= 2.0**-64
    k[264:296] *= 2.0**-60
    launch.forward(q, k, v, documents, RECIPE, -0.3)
    seen = RECORDED["encode_kernel"]
    factors = seen["KF"].view(-1)
    a, c, f, g = factors[[0, 64, 160, 192]].tolist()
    assert factors[[256, 288, 320]].tolist() == [-16, -(2.0**-68), -(2.0**-64)]
    want = [[a, 0, c, -1], [c, -1], [0, f, g, -1], [g, -1], [0, 0, -(2.0**-64), -1], [-(2.0**-64), -1]]
    # of 64 tokens each: their two groups, and where it is used the next two
    assert [some[: len(due)].tolist() for some, due in zip(seen["KG"].view(-1, 4), want)] == want


def check_what_is_not_finite() -> None:
    q, k, v, _, documents = case([300], None, None, 0)
    k[7, 0, 3] = torch.nan
    q[11, 1, 3] = torch.inf
    launch.forward(q, k, v, documents, RECIPE, 0.1)
    seen = RECORDED["encode_kernel"]
    assert seen["COUNTS"][2] == 1
    assert seen["KF"].isnan()[:300].nonzero().flatten().tolist() == [7]
    assert seen["QF"].view(2, -1)[1, :300].isnan().nonzero().flatten().tolist() == [11]
    codes = seen["KC"].view(-1, 64)[:300].float()
    assert not codes[7].any() and codes[6].any()


def check_rows_outside_documents() -> None:
    q, k, v, do, documents = case([130, 7], [40, 9], None, 0, tail=150)
    o, lse, residual, saved = launch.forward_saving(q, k, v, documents, RECIPE, 0.1)
    assert not o[137:].any() and (lse[:, 137:] == -math.inf).all()
    dq, dk, dv = launch.backward(do, None, q, k, None, o, lse, residual, documents, RECIPE, 0.1, saved=saved)
    assert not dq[137:].any() and not dk[49:].any() and not dv[49:].any()


def check_gradients() -> None:
    """LSE less the exponent, D in units of the scale, and counts for the two passes; what was saved is only read."""
    for with_dlse, recipe in ((False, RECIPE), (True, RECIPE), (False, replace(RECIPE, delta="compensated"))):
        q, k, v, do, documents = case([130, 0, 7], None, None, 0)
        do *= torch.exp2(torch.randint(-30, 30, (len(do), 1, 1)).float()).bfloat16()
        _, _, residual, saved = launch.forward_saving(q, k, v, documents, recipe, 0.1)
        residual = torch.randn(residual.shape).bfloat16() / 256
        o, lse = torch.randn(q.shape).bfloat16(), torch.randn(2, len(q))
        lse[0, 3] = -math.inf
        dlse = torch.randn(len(q), 2).T if with_dlse else None
        kept = saved.clone()
        launch.backward(do, dlse, q, k, None, o, lse, residual, documents, recipe, 0.1, saved=saved)
        assert torch.equal(saved, kept)
        seen, rows = RECORDED["encode_gradient_kernel"], rows_of([130, 0, 7])
        want = quantize(do, "e4m3:coarse", documents, "q")
        exponent = want.exponent[:137].double()
        codes = seen["GC"].view(2, -1, 64)[:, rows].transpose(0, 1).double()
        exact = o.double() + residual.double() if residual.numel() else o.double()
        delta = (codes * exact[:137]).sum(-1)
        if with_dlse:
            delta -= dlse.T[:137].double() / exp2_int(want.exponent[:137])
        expected = lse.T[:137].double() * launch.LOG2E - exponent
        delta[3, 0], expected[3, 0] = 0, math.inf
        got = [seen[name].view(2, -1)[:, rows].T.double() for name in ("LSE2", "DELTA")]
        assert torch.allclose(got[0], expected, rtol=1e-6, atol=1e-6)
        assert torch.allclose(got[1], delta, rtol=1e-5, atol=1e-5)
        counts = launch.parts(saved, q, k, documents).plan.counts
        assert seen["TURNS"][:7].tolist() == counts[:7].tolist() and not seen["TURNS"][7:].any()


def main() -> None:
    for name, check in list(globals().items()):
        if name.startswith("check_"):
            check()
            print(name, flush=True)


if __name__ == "__main__":
    sys.exit(main())
