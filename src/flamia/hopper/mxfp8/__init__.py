"""The route `mxfp8` on Hopper, which multiplies no scales in hardware: the arithmetic of a Blackwell machine, for training
and checking it on the card at hand.

Scores and E = G V^T are products of E4M3 codes. Sums over tokens read weights rounded to E4M3 and codes, both as BF16
numbers, which holds them exactly, with FP32 sums: an 8-bit accumulator of this chip would lose mass. So nothing is gained
over BF16 but the arithmetic itself, and these are plain Triton kernels.

    encode.py               codes, factors, marks, 16-bit copies
    steps.py                masks and rounded weights
    forward.py, backward.py the kernels
    launch.py               tensors to kernels
"""

from .launch import FAST, RECIPES, STRICT, backward, forward

__all__ = ["FAST", "RECIPES", "STRICT", "backward", "forward"]
