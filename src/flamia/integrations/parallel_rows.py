"""Codes of tokens, made for a wire and read from it, in one pass each: the CUDA twins of two functions of flamia/codes.py.

Those two are right on any device and go over a tensor a dozen times in float32, which at 100,000 tokens costs more than the
attention's share of a second card saves. These read and write every byte once. What they compute is decided there, and a
test compares them bit for bit. Anything but bfloat16, coarse scales and head sizes that are powers of two goes to the
functions themselves. The kernels are imported where they are launched: they need Triton, and this module does not.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flamia.codes import NAN, PER_TOKEN, encode_tokens, token_values

ROWS = 16  # tokens of one head in a program


def encoded(x: Tensor, cell: str) -> tuple[Tensor, Tensor]:
    """`codes.encode_tokens`: (codes (T, H, D), scales (T, H, 1)) of x (T, H, D)."""
    t, h, d = x.shape
    if not _suits(x, x.dtype, cell):
        return encode_tokens(x, cell)
    from flamia.integrations.parallel_kernels import encode_kernel

    x = x.contiguous()
    codes = torch.empty(t, h, d, dtype=torch.uint8, device=x.device)
    scales = torch.empty(t, h, 1, dtype=torch.uint8, device=x.device)
    if t:
        with torch.cuda.device_of(x):  # Triton launches on the current device, which need not be the tensors'
            encode_kernel[_programs(t * h)](x, codes, scales, t * h, D=d, ROWS=ROWS, BAD=NAN)
    return codes, scales


def decoded(codes: Tensor, scales: Tensor, rows: Tensor, dtype: torch.dtype, cell: str) -> Tensor:
    """`codes.token_values` of some rows of codes (N, H, D) and scales (N, H, 1), (len(rows), H, D)."""
    _, h, d = codes.shape
    if not _suits(codes, dtype, cell):
        return token_values(codes[rows], scales[rows], dtype, cell)
    from flamia.integrations.parallel_kernels import decode_kernel

    out = torch.empty(len(rows), h, d, dtype=dtype, device=codes.device)
    if len(rows):
        code, instead = PER_TOKEN[cell]
        with torch.cuda.device_of(codes):
            decode_kernel[_programs(len(rows) * h)](
                codes, scales, rows, out, len(rows) * h, h, CODE=code, INSTEAD=instead, D=d, ROWS=ROWS
            )
    return out


def _programs(rows: int) -> tuple[int]:
    return (-(-rows // ROWS),)


def _suits(x: Tensor, dtype: torch.dtype, cell: str) -> bool:
    """Whether the kernels take numbers of this dtype, which x holds or whose codes it holds."""
    d = x.shape[-1]
    return (
        x.is_cuda
        and dtype == torch.bfloat16
        and cell == "e4m3:coarse"
        and d.bit_count() == 1
        and d <= 256
        and torch.cuda.get_device_capability(x.device) >= (8, 9)  # E4M3 conversions
    )
