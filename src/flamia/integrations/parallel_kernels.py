"""The two kernels of parallel_rows.py, in a module of their own because it imports Triton."""

from __future__ import annotations

import triton
import triton.language as tl

from flamia.hopper.quantize import LARGEST, _amax, _codes, _exponent, _power


@triton.jit(do_not_specialize=["rows"])
def encode_kernel(X, CODES, SCALES, rows, D: tl.constexpr, ROWS: tl.constexpr, BAD: tl.constexpr):
    """A token of one head is a row of X (rows, D), bfloat16. Its E4M3 codes and its scale's exponent + 127, a byte each."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at = row[:, None] * D + tl.arange(0, D)[None, :]
    x = tl.load(X + at, mask=(row < rows)[:, None], other=0.0)
    amax = _amax(x)
    bad = amax >= 0x7F80
    e = tl.where(bad, 0, _exponent(amax))
    codes = _codes(x, e, bad).to(tl.uint8, bitcast=True)
    codes = tl.where(codes == 0x80, 0, codes)  # zeros have no sign
    codes = tl.where(bad[:, None], BAD, codes)
    tl.store(CODES + at, codes.to(tl.uint8), mask=(row < rows)[:, None])
    tl.store(SCALES + row, (e + 127).to(tl.uint8), mask=row < rows)


@triton.jit(do_not_specialize=["rows", "heads"])
def decode_kernel(CODES, SCALES, TOKENS, OUT, rows, heads, CODE: tl.constexpr, INSTEAD: tl.constexpr, D: tl.constexpr,
                  ROWS: tl.constexpr):  # fmt: skip
    """OUT (rows, D): the numbers of head row % heads of token TOKENS[row // heads]."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = row < rows
    source = tl.load(TOKENS + row // heads, mask=live, other=0).to(tl.int64) * heads + row % heads
    column = tl.arange(0, D)
    codes = tl.load(CODES + source[:, None] * D + column[None, :], mask=live[:, None], other=0)
    e = tl.load(SCALES + source, mask=live, other=127).to(tl.int32) - 127
    magnitude = (codes & 0x7F).to(tl.int32)
    top = tl.max(magnitude, 1)
    units = codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    instead = tl.where((codes & 0x80) != 0, -INSTEAD, INSTEAD)
    units = tl.where((magnitude == CODE) & (top == CODE)[:, None], instead, units)
    values = units * tl.where(e == -127, 0.0, _power(tl.maximum(e, -126)))[:, None]
    bounded = tl.minimum(tl.maximum(values, -LARGEST), LARGEST)
    values = tl.where(values == values, bounded, values)  # NaN stays, whichever way a minimum treats it
    tl.store(OUT + row[:, None] * D + column[None, :], values.to(tl.bfloat16), mask=live[:, None])
