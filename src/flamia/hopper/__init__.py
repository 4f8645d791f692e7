"""Attention on NVIDIA Hopper: Gluon kernels for the route `mxfp8_scores` (8-bit scores, 16-bit sums over tokens).

Two calls, the same as in reference/: `forward` and `backward`. `supports` says, before any work, whether a call is one
that the kernels compute. What runs, in order:

    schedule.py   who works on what, from cu_seqlens, on the device
    quantize.py   E4M3 codes, scales, padded layouts
    forward.py    O and LSE
    dkv.py, dq.py the backward, in two passes without atomics
    launch.py     tensors to kernels
    compat.py     what differs between Triton 3.6 and 3.9
"""

from .launch import Encoded, backward, forward, forward_saving, supports

__all__ = ["Encoded", "backward", "forward", "forward_saving", "supports"]
