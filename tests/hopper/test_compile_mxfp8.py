"""The kernels of the route `mxfp8` compiled ahead of time for sm_90a: tensor cores in use, registers mostly enough, shared
memory that the card has, and no trace of the assembler's fault that rounding.py goes around."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("triton")

from machine_code import CUOBJDUMP, compiled, nothing_unpacked_from_nowhere, pointers
from triton.compiler import ASTSource

from flamia.hopper.mxfp8.backward import dkv_kernel, dq_kernel
from flamia.hopper.mxfp8.encode import encode_gradient_kernel, encode_kernel
from flamia.hopper.mxfp8.forward import forward_kernel
from flamia.hopper.mxfp8.launch import DKV, DQ, FORWARD

pytestmark = pytest.mark.skipif(not CUOBJDUMP.exists(), reason="this Triton ships no cuobjdump")

TENSORS = pointers("Q QG K KG V VG G", "*bf16") | pointers("QF QM KF KM VF GF GM LSE LSE2 DELTA", "*fp32")
OUT = pointers("O DQ DK DV", "*bf16") | pointers("ITEMS COUNTS", "*i32") | pointers("exponent scale", "fp32")
KERNELS = {"forward": (forward_kernel, FORWARD), "dq": (dq_kernel, DQ), "dkv": (dkv_kernel, DKV)}
MASKS = {"causal": (False, True), "window": (True, True), "open": (False, False)}


CASES = [(128, True, mask) for mask in MASKS] + [(128, False, "causal"), (64, True, "causal"), (64, False, "window")]


@pytest.mark.parametrize("d, strict, mask", CASES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_attention(kernel, d, strict, mask, tmp_path):
    fn, tuning = KERNELS[kernel]
    left, right = MASKS[mask]
    constants = {"STRICT": strict, "LEFT": left, "RIGHT": right, "D": d}
    constants |= {name: value for name, value in tuning.items() if name.isupper()}
    options = {name: value for name, value in tuning.items() if name.islower()}
    sass = compiled(fn, TENSORS | OUT, constants, ASTSource, tmp_path, **options)
    products = len(
        re.findall(r"\bHMMA\b" if kernel == "dkv" else r"\bHGMMA\b", sass)
    )  # 32 keys are too few for a warpgroup
    assert products >= 24
    assert len(re.findall(r"\b(STL|LDL)\b", sass)) < 200
    nothing_unpacked_from_nowhere(sass)


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("strict", [True, False], ids=["strict", "fast"])
def test_encoders(strict, d, tmp_path):
    kinds = pointers("X G O ROUNDED GIVEN", "*bf16") | pointers("FACTOR MARK LSE DLSE LSE2 DELTA", "*fp32")
    kinds |= pointers("BLOCKS COUNTS", "*i32")
    for block in (True, False):
        made = [
            compiled(encode_kernel, kinds, {"SIDE": 0, "BLOCK": block, "STRICT": strict, "D": d}, ASTSource, tmp_path)
        ]
        for dlse in (True, False):
            constants = {"BLOCK": block, "STRICT": strict, "LEFT": True, "RIGHT": True, "HAS_DLSE": dlse, "D": d}
            made.append(compiled(encode_gradient_kernel, kinds, constants, ASTSource, tmp_path))
        for sass in made:
            assert not re.search(r"\b(STL|LDL)\b", sass)
            nothing_unpacked_from_nowhere(sass)
