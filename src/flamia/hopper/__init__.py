"""Attention on NVIDIA Hopper: Gluon kernels for the route `mxfp8_scores` (8-bit scores, 16-bit sums over tokens), and plain
Triton kernels for the route `mxfp8` (mxfp8/).

Two calls, the same as in reference/: `forward` and `backward`. `supports` says, before any work, whether a call is one
that kernels compute. What runs for `mxfp8_scores`, in order:

    schedule.py   who works on what, from cu_seqlens, on the device
    quantize.py   E4M3 codes, scales, padded layouts
    forward.py    O and LSE
    dkv.py, dq.py the backward, in two passes without atomics
    launch.py     tensors to kernels
    routes.py     which of the two routes answers
    compat.py     what differs between Triton 3.6 and 3.9
"""

from .routes import backward, forward, forward_saving, supports

# What need not be done for these kernels (ops.py): the encoders read any strides with a dense last axis, in 64-bit
# addresses, and copy the rest; schedule.py clamps offsets as it reads them; a pass nobody wants is not run; and what
# the forward encoded is taken back by the backward.
HANDLES = frozenset({"strides", "offsets", "subset", "saved"})

__all__ = ["HANDLES", "backward", "forward", "forward_saving", "supports"]
