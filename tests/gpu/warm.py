"""Compile the kernels of one configuration into Triton's cache, by calling them once on next to nothing."""

import sys

CONFIGURATIONS = [
    (kind, d, window, frontier)
    for frontier in (0, 1)
    for d in (128, 64)
    for window in (0, 1)
    for kind in ("forward", "dkv", "dq")
] + [("mxfp8", d, window, fast) for fast in (0, 1) for d in (128, 64) for window in (0, 1, 2)]


def warm(kind: str, d: int, window: int, other: int) -> None:
    """window: 0 causal, 1 to the left, 2 no mask. other: the default recipe or scores as given; `mxfp8` strict or fast."""
    import torch
    from calls import RECIPE, offsets

    from flamia import hopper
    from flamia.hopper import mxfp8
    from flamia.hopper.launch import EDGE
    from flamia.packing import Documents

    recipe = EDGE if other else RECIPE
    cu = offsets([200])
    documents = Documents(cu, cu, 100 if window == 1 else None, 0 if window < 2 else None)
    q, k, v, do, o = (torch.zeros(200, 2, d, device="cuda", dtype=torch.bfloat16) for _ in range(5))
    if kind == "mxfp8":
        recipe = mxfp8.RECIPES[other]
        o, lse, rest = hopper.forward(q, k, v, documents, recipe, 0.1)
        for dlse in (None, lse):
            hopper.backward(do, dlse, q, k, v, o, lse, rest, documents, recipe, 0.1)
    elif kind == "forward":
        hopper.forward_saving(q, k, v, documents, recipe, 0.1)
    else:
        lse, wanted = torch.zeros(2, 200, device="cuda"), (kind == "dq", kind == "dkv", kind == "dkv")
        hopper.backward(do, None, q, k, v, o, lse, o[:0], documents, recipe, 0.1, wanted=wanted)
        hopper.backward(do, lse, q, k, v, o, lse, o[:0], documents, recipe, 0.1, wanted=(False, False, False))
    torch.cuda.synchronize()


if __name__ == "__main__":
    warm(sys.argv[1], *map(int, sys.argv[2:]))
