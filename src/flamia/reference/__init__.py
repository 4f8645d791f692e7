"""The readable oracle: what every kernel must compute, short enough to check by eye.

`forward` and `backward` are the two calls that each backend answers. Nothing here is fast, and nothing imports a kernel.
"""

from flamia.reference.backward import backward
from flamia.reference.forward import forward

HANDLES = frozenset({"subset"})  # `backward` computes what is `wanted` and no more

__all__ = ["HANDLES", "backward", "forward"]
