"""The Hopper kernels compiled ahead of time for sm_90a, on a machine that needs no GPU.

What a compiler release can silently take away is checked in the machine code: that the 8-bit and the 16-bit tensor-core
instructions are there, that ptxas did not serialise them (a wait after every product), that no loop touches local
memory, and that the weights are made between the start and the join of a product, not behind it.
"""

from __future__ import annotations

import re

import pytest

triton = pytest.importorskip("triton")

from machine_code import (  # noqa: E402
    CUOBJDUMP,
    compiled,
    nothing_unpacked_from_nowhere,
    pointers,
    product_loops,
    resources,
)
from triton.compiler import ASTSource  # noqa: E402
from triton.experimental.gluon import language as gl  # noqa: E402
from triton.experimental.gluon._runtime import GluonASTSource  # noqa: E402

from flamia.hopper import quantize, schedule  # noqa: E402
from flamia.hopper.compat import parse_version  # noqa: E402
from flamia.hopper.dkv import dkv_kernel  # noqa: E402
from flamia.hopper.dq import dq_kernel  # noqa: E402
from flamia.hopper.forward import LAG, PEAK, forward_kernel  # noqa: E402
from flamia.hopper.launch import PLAIN, TUNING  # noqa: E402
from flamia.integrations import parallel_kernels, parallel_rows  # noqa: E402

pytestmark = pytest.mark.skipif(not CUOBJDUMP.exists(), reason="this Triton ships no cuobjdump")

FP8, BF16, FP32 = ("fp8e4nv", 8), ("bf16", 16), ("fp32", 32)


def tensordesc(dtype: tuple[str, int], block: list[int]) -> str:
    name, bits = dtype
    layout = gl.NVMMASharedLayout(0 if len(block) == 1 else min(128, block[1] * bits // 8), bits, len(block))
    return f"tensordesc<{name}{block},{layout!r}>"


def descriptors(kernel: str, d: int, tuning: dict) -> dict[str, str]:
    rows, vector, groups = tensordesc(FP8, [64, d]), tensordesc(FP32, [64]), tensordesc(FP32, [32])
    if kernel == "forward":
        keys, values = tensordesc(FP8, [128, d]), tensordesc(BF16, [128, d])
        return {"q_desc": rows, "a_desc": vector, "k_desc": keys, "v_desc": values, "f_desc": tensordesc(FP32, [128]),
                "g_desc": groups, "qb_desc": tensordesc(BF16, [64, d]), "kb_desc": values}  # fmt: skip
    n = tuning["BM" if kernel == "dkv" else "BN"]
    codes, wide, factors = tensordesc(FP8, [n, d]), tensordesc(BF16, [n, d]), tensordesc(FP32, [n])
    kinds = {
        "dkv": (("k", "v"), ("kf", "vf"), ("q", "g"), ("qb", "clean", "gb"), ("f", "l", "d")),
        "dq": (("q", "g"), ("a", "l", "d"), ("k", "v"), ("kb", "clean"), ("kf", "vf"), ("kg",)),
    }[kernel]
    types = (rows, vector, codes, wide, factors, groups)
    edge = {"dkv": "kb_desc", "dq": "qb_desc"}[kernel]
    found = {f"{name}_desc": kind for names, kind in zip(kinds, types) for name in names}
    return found | {edge: tensordesc(BF16, [64, d])}


def spills(window: bool, frontier: bool) -> int:
    """How often a step without a mask may touch local memory: 3.9 puts a register away and reads it back in some, and
    windows with scores as given have two or three loops more that want registers of their own."""
    return (0 if parse_version(triton.__version__) < (3, 7) else 2) + (2 if window and frontier else 0)


def usual_path(kernel: str, body: list[str]) -> list[str]:
    """A step of the forward up to where it may make its scores again, from zero."""
    if kernel != "forward":
        return body
    fresh = [i for i, text in enumerate(body) if "GMMA" in text and "RZ" in text]  # the first of each S
    return body[: fresh[1]] if len(fresh) > 1 else body


KERNELS = {"forward": forward_kernel, "dkv": dkv_kernel, "dq": dq_kernel}
POINTERS = {
    "O": "*bf16",
    "REST": "*bf16",
    "LSE": "*fp32",
    "DQ": "*bf16",
    "DK": "*bf16",
    "DV": "*bf16",
    "ITEMS": "*i32",
    "COUNTS": "*i32",
    "scale": "fp32",
    "unit": "fp32",
}


def attention_kernel(kernel: str, d: int, window: bool, frontier: bool, tmp_path, remainder: bool = False) -> str:
    tuning = dict(TUNING[kernel, d])
    constants = dict(tuning, D=d, LEFT=window, FRONTIER=frontier)
    constants |= {"BN": 128, "REMAINDER": remainder} if kernel == "forward" else {}
    types = {**POINTERS, **descriptors(kernel, d, tuning)}
    return compiled(KERNELS[kernel], types, constants, GluonASTSource, tmp_path)


def test_the_lag_is_the_recipes():
    """The kernels say that they compute this recipe, and have its lag as a number of their own."""
    assert LAG.value == PLAIN.lag and PEAK.value <= 2.0**PLAIN.lag


EVERY = pytest.mark.parametrize(
    "kernel, d, window, frontier",
    [(k, d, window, edge) for k in KERNELS for d in (64, 128) for edge in (False, True) for window in (False, True)],
)


@EVERY
def test_registers(kernel, d, window, frontier, tmp_path):
    """Three groups of 128 threads start with a third of the 65,536 registers of a multiprocessor each; then the producer
    gives up what the two consumers take."""
    sass = attention_kernel(kernel, d, window, frontier, tmp_path)
    assert 3 * 128 * resources(tmp_path)["REG"] <= 65536
    split = {int(value, 16) for value in re.findall(r"USETMAXREG\S*\s+(?:\S+,\s*)?(0x[0-9a-f]+)", sass)}
    assert {24, 240} <= split  # 128 * (2 * 240 + 24) of them


@EVERY
def test_attention_kernels(kernel, d, window, frontier, tmp_path):
    sass = attention_kernel(kernel, d, window, frontier, tmp_path)
    loops = product_loops(sass)
    at_once = kernel == "forward" and frontier and not window  # the one masked step is the first, and no loop
    assert len(loops) >= (2 if at_once else 4), "two consumers, each with a loop of whole and a loop of masked steps"
    for body in loops:
        text = "\n".join(body)
        assert "HGMMA" in text
        assert "QGMMA" in text or (
            kernel == "forward" and frontier
        )  # both of its products have 16 bits at the frontier
        assert text.count("DEPBAR") <= 4, "ptxas waits after every product: something crosses the end of a step"
    usual = [usual_path(kernel, body) for body in loops]
    whole = [body for body in usual if sum("FSEL" in t for t in body) < 8]  # a mask selects for each weight
    assert sum("QGMMA" in text for body in whole for text in body) >= 4
    assert len(whole) == 2
    for body in whole:
        spilled = sum(bool(re.search(r"\b(STL|LDL)\b", t)) for t in body)
        assert spilled <= spills(window, frontier), "a loop touches local memory"
        if kernel == "forward":
            assert sum("FMNMX" in t for t in body) < 8, "the usual step looks for a maximum"
            last = max(i for i, t in enumerate(body) if "DEPBAR" in t)
            made = sum("MUFU.EX2" in t for t in body[:last])
            assert made >= 64, "the weights are made behind the join, where no product runs"


@pytest.mark.parametrize("d", [64, 128])
def test_the_remainder_of_o_is_written_behind_the_loops(d, tmp_path):
    with_it, without = (attention_kernel("forward", d, False, 0, tmp_path, rest) for rest in (True, False))
    assert [len(body) for body in product_loops(with_it)] == [len(body) for body in product_loops(without)]


SMALL = {
    **pointers("CU_Q CU_K SCRATCH Q_BLOCKS K_BLOCKS Q_ITEMS K_ITEMS COUNTS TURNS", "*i32"),
    **pointers("X OUT Q K V G O REST VD GB Q_CLEAN K_CLEAN DQ DK DV", "*bf16"),
    **pointers("LSE DLSE QF KF VF KG LSE2 DELTA", "*fp32"),
    **pointers("QC KC VC GC", "*fp8e4nv"),
    **pointers("CODES SCALES", "*u8"),
    "TOKENS": "*i64",
    **pointers("factor sign", "fp32"),
}


SCHEDULES = [{"Q_STEP": 64, "SHIFT_Q": q, "SHIFT_K": k, "CHUNK": 1024} for q, k in ((0, 0), (0, 1), (3, 4))]
WIRE = {"ROWS": parallel_rows.ROWS}
ENCODERS = [{"D": d, "ROWS": quantize.ROWS} for d in (64, 128)]


@pytest.mark.parametrize(
    "fn, constants, warps",
    [
        *((schedule.schedule_kernel, constants, 8) for constants in SCHEDULES),
        *((quantize.encode_kernel, constants, 4) for constants in ENCODERS),
        *(
            (quantize.encode_gradient_kernel, {**constants, "HAS_DLSE": dlse, "REMAINDER": rest}, 4)
            for constants in ENCODERS
            for dlse, rest in ((False, False), (True, False), (False, True))
        ),
        *((parallel_kernels.encode_kernel, {**WIRE, "D": d, "BAD": 127}, 4) for d in (64, 128)),
        *((parallel_kernels.decode_kernel, {**WIRE, "D": d, "CODE": 94, "INSTEAD": 29.0}, 4) for d in (64, 128)),
    ],
)
def test_small_kernels(fn, constants, warps, tmp_path):
    sass = compiled(fn, SMALL, constants, ASTSource, tmp_path, warps)
    assert not re.search(r"\b(STL|LDL)\b", sass)
    nothing_unpacked_from_nowhere(sass)
