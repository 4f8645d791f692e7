"""The route `mxfp8` on Hopper, which multiplies no scales in hardware: the arithmetic of a Blackwell machine, for training
and checking it on the card at hand.

Tensors and weights are rounded to E4M3 numbers times powers of two, which BF16 holds exactly, and all products are BF16
ones with FP32 sums: an 8-bit accumulator of this chip would lose mass, and scales that vary along a sum would cost more
instructions than 8-bit products save. So nothing is gained over BF16 but the arithmetic itself, and these are plain Triton
kernels.

    encode.py               rounded tensors, factors, marks
    rounding.py             numbers and weights to E4M3
    steps.py                full pairs and masks
    forward.py, backward.py the kernels
    launch.py               tensors to kernels
"""

from .launch import FAST, RECIPES, STRICT, backward, forward

__all__ = ["FAST", "RECIPES", "STRICT", "backward", "forward"]
