"""What the twelve operands of the six products read: the cells of a recipe's tables, and each route's tables.

A cell is "format:geometry". Which geometry may stand where is decided here; what a geometry means for tensors is in
`quantize.py`, for the weights P and U in `reference/weights.py`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

UNIFORM_ROUTES = ("mxfp8_scores", "bf16")  # token-local scales, 16-bit sums over tokens: nothing to leak, one table

TENSOR_FORMATS = ("bf16", "e4m3", "e2m1", "nvfp4")
TENSOR_GEOMETRIES = ("none", "block", "token", "coarse", "feature16", "feature32", "stripe16", "stripe32", "tensor")
WEIGHT_GEOMETRIES = ("none", "boost", "relative", "masked", "row", "column", "square", "keys16", "queries16")


@dataclass(frozen=True)
class Operands:
    """What the twelve operands read. `s_q` is Q in the product S, `dq_k` is K in dQ, and so on; "bf16" stands for the
    16-bit format of the call, which is float16 when the inputs are.

    Tensors: block (32 tokens x all features), token, coarse (token, its exponent rounded up to a multiple of 4; E4M3 alone
    has the range for it), feature16/32 (of one token), stripe16/32 (tokens of one feature), tensor (the whole call), none.
    Weights P and U: boost (a constant power of two), relative (the constant, relative to
    the companion's largest exponent so far), masked (the same per row and 32 visible keys), row (one query x a key
    block), column (one key x a query block), square (32 x 32), keys16, queries16, none.
    """

    s_q: str = "bf16:none"
    s_k: str = "bf16:none"
    o_p: str = "bf16:none"
    o_v: str = "bf16:none"
    e_g: str = "bf16:none"
    e_v: str = "bf16:none"
    dv_p: str = "bf16:none"
    dv_g: str = "bf16:none"
    dq_u: str = "bf16:none"
    dq_k: str = "bf16:none"
    dk_u: str = "bf16:none"
    dk_q: str = "bf16:none"


WEIGHTS = ("o_p", "dv_p", "dq_u", "dk_u")
CELLS = tuple(f.name for f in dataclasses.fields(Operands))


def check_cell(name: str, cell: str) -> None:
    bare = name.removeprefix("frontier.")
    if bare not in CELLS:
        raise ValueError(f"cell {name!r}: there are {', '.join(CELLS)}, each also with 'frontier.' in front")
    fmt, _, geometry = cell.partition(":")
    geometries = WEIGHT_GEOMETRIES if bare in WEIGHTS else TENSOR_GEOMETRIES
    if fmt not in TENSOR_FORMATS or geometry not in geometries:
        raise ValueError(
            f"{name}={cell!r}: formats are {', '.join(TENSOR_FORMATS)}; geometries are {', '.join(geometries)}"
        )
    sixteen = ("keys16", "queries16") if bare in WEIGHTS else ("feature16", "stripe16")
    if (fmt == "bf16") != (geometry == "none") or (fmt == "nvfp4") != (geometry in sixteen):
        raise ValueError(f"{name}={cell!r}: bf16 goes with 'none' alone, nvfp4 with {' and '.join(sixteen)} alone")
    if fmt == "e2m1" and geometry == "coarse":
        raise ValueError(
            f"{name}={cell!r}: a scale eight times too large leaves E2M1 nothing; take 'e4m3:coarse' or 'e2m1:token'"
        )


def route_tables(
    route: str, safety: str, dv_scale: str, e_format: str, frontier_scores: str
) -> tuple[Operands, Operands]:
    """The tables of the route and safety, before `cells` change them."""
    if route == "bf16":
        return Operands(), Operands()
    if route == "mxfp8_scores":
        token = "e4m3:coarse"
        if e_format == "bf16":
            table = Operands(s_q=token, s_k=token)
        else:
            table = Operands(s_q=token, s_k=token, o_v=token, e_g=token, e_v=token, dv_g=token)
        given = {"s_q": "bf16:none", "s_k": "bf16:none"}
        return table, table if frontier_scores == "e4m3" else dataclasses.replace(table, **given)
    if route == "nvfp4":
        feature, stripe = "nvfp4:feature16", "nvfp4:stripe16"
        keys, queries = "nvfp4:keys16", "nvfp4:queries16"
        full = Operands(s_q=feature, s_k=feature, o_p=keys, o_v=stripe, e_g=feature, e_v=feature, dv_p=queries, dv_g=stripe,
                        dq_u=keys, dq_k=stripe, dk_u=queries, dk_q=stripe)  # fmt: skip
        fold = dataclasses.replace(full, o_v="e2m1:token", dq_k="e2m1:token")
        strict = Operands(e_g=feature, dv_g=feature)  # of its two views of G, the one that D and E read
        return full, {"strict": strict, "fold": fold, "fast": full}[safety]

    q = k = "e4m3:block"  # where a code serves two reductions
    if safety == "fast":
        full = frontier = Operands(
            s_q=q, s_k=k, o_p="e4m3:boost", o_v="e4m3:block", e_g="e4m3:block", e_v="e4m3:block", dv_p="e4m3:boost",
            dv_g="e4m3:block", dq_u="e4m3:square", dq_k=k, dk_u="e4m3:square", dk_q=q)  # fmt: skip
    elif safety == "fold":
        full = Operands(
            s_q="e4m3:token", s_k="e4m3:token", o_p="e4m3:boost", o_v="e4m3:block", e_g="e4m3:token", e_v="e4m3:block",
            dv_p="e4m3:relative", dv_g="e4m3:token", dq_u="e4m3:row", dq_k=k, dk_u="e4m3:row", dk_q="e4m3:token")  # fmt: skip
        frontier = dataclasses.replace(full, o_p="e4m3:masked", o_v="e4m3:token", e_v="e4m3:token", dq_k="e4m3:token")
    else:
        dv_p = "e4m3:column" if dv_scale == "column" else "e4m3:relative"
        full = Operands(
            s_q="e4m3:token", s_k=k, o_p="e4m3:relative", o_v="e4m3:block", e_g="e4m3:token", e_v="e4m3:block", dv_p=dv_p,
            dv_g="e4m3:token", dq_u="e4m3:row", dq_k=k, dk_u="e4m3:column", dk_q="e4m3:token")  # fmt: skip
        frontier = Operands(e_g="e4m3:token", dv_g="e4m3:token")
    if route == "nvfp4_fp8":
        scores = {"s_q": "nvfp4:feature16", "s_k": "nvfp4:feature16"}
        full = dataclasses.replace(full, **scores)
        frontier = frontier if safety == "strict" else dataclasses.replace(frontier, **scores)
    return full, frontier
