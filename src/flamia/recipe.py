"""Recipes: which format and which scale each operand of each product has.

Attention that trains is six matrix products (names as in docs/contract.md; U is the gradient of the logits):

    forward    S = Q K^T    O = P V
    backward   E = G V^T    dV = P^T G    dQ = U K    dK = U^T Q

and so twelve operands. A *cell* says what one of them reads, "format:geometry": the format of its codes, and the region
that shares one scale. A region is two things at once: a numerical approximation, and a dependency boundary, because a
scale is computed from everything inside it. A region that reaches past what a query may see carries the future into the
past, and no causal mask stops it. That is why a recipe has two tables: `full` for pairs of blocks in which every query
sees every key (no region of theirs can straddle a frontier), and `frontier` for all the others.

    safety   full pairs                 frontier pairs                  promises
    strict   low bits                   16 bits                         everything, masks included
    fold     low bits, rows local       per-token codes, scales folded  the future and other documents are invisible
    fast     low bits, coarse regions   the same                        other documents are invisible; the future is not

A recipe is a frozen value: hashable, comparable, and it survives the trip through a string, which is how it crosses an
operator's schema: `str(recipe)` is "route/safety" and then whatever departs from that preset.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

from flamia.operands import CELLS, UNIFORM_ROUTES, Operands, check_cell, route_tables
from flamia.words import meant

ROUTES = ("mxfp8", "nvfp4_fp8", "nvfp4", "mxfp8_scores", "bf16")
SAFETIES = ("strict", "fold", "fast")
DEFAULT_ROUTE = "mxfp8_scores"
"""What the library runs when nothing is asked for: isolated by construction, unbiased, and with kernels for Hopper."""

_CHOICES = {
    "route": ROUTES,
    "safety": SAFETIES,
    "scale_rule": ("ceil", "floor"),
    "u_range": ("block", "running"),
    "dv_scale": ("column", "boost"),
    "dq_accumulator": ("fp32", "fp16_sequence", "fp16_causal"),
    "delta": ("output", "compensated", "centered"),
    "e_format": ("e4m3", "bf16"),
    "frontier_scores": ("e4m3", "bf16"),
    "exp2": ("exact", "polynomial", "mitchell", "schraudolph"),
    "normalizer": ("unrounded", "rounded"),
    "center_k": ("none", "document", "call"),
}
_KINDS = {"frontier_block": int, "lag": int, "boost": int, "rotate": bool, "rounding": bool}


@dataclass(frozen=True)
class Recipe:
    """How attention rounds. Use the presets `Recipe.strict()`, `.fold()`, `.fast()`, `.bf16()` and change options there.

    route: what has low bits. "mxfp8": E4M3 everywhere. "nvfp4_fp8": 4-bit scores, E4M3 elsewhere. "nvfp4": 4 bits
        everywhere (experimental). "mxfp8_scores": E4M3 where the sum is over features, 16 bits where it is over tokens.
        "bf16": 16 bits throughout.
    safety: see the module's table.
    frontier_block: positions in a block, a multiple of 32; also the keys in one step of the online softmax.
    scale_rule: "ceil" never clips; "floor" is the OCP rule, a control.
    rotate: multiply Q and K by a Hadamard matrix before encoding (head size a power of two).
    lag: how far, in powers of two, a row's reference may lag its maximum; boost: powers of two on P before rounding.
    u_range: U's scale covers one "block", or is the largest so far ("running").
    dv_scale: P of dV has a scale per "column", or a constant "boost" of 2^8 (strict only).
    dq_accumulator: "fp32", or FP16 partial sums with a boost per row from the document ("fp16_sequence") or from the
        tokens up to the row ("fp16_causal").
    delta: D from the saved "output", with its BF16 remainder ("compensated"), or from P and E themselves ("centered").
    e_format: "bf16" gives E of `mxfp8_scores` 16 bits; O then reads V as given too.
    frontier_scores: "bf16" makes the scores of `mxfp8_scores` from Q and K as given where a pair of blocks straddles the
        mask's edge: the nearest tokens, which a trained model looks at most.
    exp2: "exact", or an approximation, used in the forward and the backward alike.
    normalizer: whether the softmax sum counts weights before or after rounding.
    center_k: subtract K's mean over the document or call from the scores' K (a control: a statistic that leaks).
    rounding: False switches every rounding off, for tests.
    cells: departures from the route's tables, e.g. (("o_v", "e4m3:stripe32"), ("frontier.o_v", "bf16:none")).
    """

    route: str = "mxfp8"
    safety: str = "strict"
    frontier_block: int = 128
    scale_rule: str = "ceil"
    rotate: bool = False
    lag: int = 2
    boost: int = 6
    u_range: str = "block"
    dv_scale: str = "column"
    dq_accumulator: str = "fp32"
    delta: str = "output"
    e_format: str = "e4m3"
    frontier_scores: str = "e4m3"
    exp2: str = "exact"
    normalizer: str = "unrounded"
    center_k: str = "none"
    rounding: bool = True
    cells: tuple[tuple[str, str], ...] = ()

    # of each instance, set once by __post_init__: its two tables, and its string with every option spelled out, which
    # torch.compile can read as one constant while the options themselves may turn into symbols
    _tables: ClassVar[tuple[Operands, Operands]]
    spelled: ClassVar[str]

    @classmethod
    def strict(cls, route: str = DEFAULT_ROUTE, **options) -> Recipe:
        """No query depends on anything it cannot see, bit for bit. `Recipe.strict()` is the library's default."""
        return _preset(route, "strict", options)

    @classmethod
    def fold(cls, route: str = "mxfp8", **options) -> Recipe:
        """FLAMIA's exact options: per-token codes where a group straddles the diagonal. Causal isolation only."""
        return _preset(route, "fold", options)

    @classmethod
    def fast(cls, route: str = "mxfp8", **options) -> Recipe:
        """FLAMIA's default. Leaks the future inside groups of 32 tokens: for comparison, and as a control."""
        return _preset(route, "fast", options)

    @classmethod
    def bf16(cls, **options) -> Recipe:
        """16-bit attention, blocked as the others are."""
        return _preset("bf16", "strict", options)

    @classmethod
    def parse(cls, text: str) -> Recipe:
        """The recipe that `str()` wrote: "route/safety[,option=value]..."; cells are options too ("o_v=e4m3:token")."""
        head, *options = [part.strip() for part in text.split(",")]
        route, slash, safety = head.partition("/")
        types = {f.name: f.type for f in dataclasses.fields(cls)}
        values: dict = {}
        cells = []
        for option in options:
            name, equals, value = option.partition("=")
            if not equals:
                raise ValueError(f"recipe {text!r}: {option!r} is not option=value")
            if name.removeprefix("frontier.") in CELLS:
                cells.append((name, value))
            elif name not in types or name in ("route", "safety", "cells"):
                raise ValueError(
                    f"recipe {text!r}: no option {name!r}; there are {', '.join(_OPTIONS)}{meant(name, _OPTIONS)}"
                )
            elif name in values:
                raise ValueError(f"recipe {text!r}: option {name!r} stands there twice")
            elif types[name] == "bool":
                values[name] = _parse_bool(name, value)
            elif types[name] == "int":
                values[name] = _parse_int(name, value)
            else:
                values[name] = value
        if cells:
            values["cells"] = tuple(cells)
        for what, name, allowed in (("route", route, ROUTES), ("preset", safety if slash else "strict", SAFETIES)):
            if name not in allowed:
                raise ValueError(
                    f"recipe {text!r}: no {what} {name!r}; there are {', '.join(allowed)}. "
                    f'A recipe is written route/preset, such as "mxfp8/strict"{meant(name, allowed)}'
                )
        return _preset(route, safety if slash else "strict", values)

    def __str__(self) -> str:
        preset = _preset(self.route, self.safety, {})
        parts = [f"{self.route}/{self.safety}"]
        for name in _OPTIONS:
            if getattr(self, name) != getattr(preset, name):
                parts.append(f"{name}={getattr(self, name)}")
        return ",".join(parts + [f"{name}={cell}" for name, cell in self.cells])

    def __post_init__(self) -> None:
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}={getattr(self, name)!r}: allowed are {', '.join(map(repr, allowed))}")
        for name, kind in _KINDS.items():  # 1 equals True and 128.0 equals 128, but their strings do not parse
            if type(getattr(self, name)) is not kind:
                need = "an integer is needed" if kind is int else "allowed are True and False"
                raise ValueError(f"{name}={getattr(self, name)!r}: {need}")
        if not 32 <= self.frontier_block <= 4096 or self.frontier_block % 32:
            raise ValueError(
                f"frontier_block={self.frontier_block}: it must be a multiple of 32, the group size, in 32..4096"
            )
        if not 0 <= self.lag <= 15:
            raise ValueError(f"lag={self.lag}: a reference cannot lead the row maximum, nor lag without end; use 0..15")
        if not 0 <= self.boost <= 15:
            raise ValueError(f"boost={self.boost}: powers of two on the weights; use 0..15")
        if not isinstance(self.cells, tuple) or not all(isinstance(c, tuple) and len(c) == 2 for c in self.cells):
            raise ValueError(f"cells={self.cells!r}: a tuple of (name, cell) pairs, such as (('o_v', 'e4m3:token'),)")
        for name, cell in self.cells:
            check_cell(name, cell)
        object.__setattr__(self, "_tables", self._make_tables())
        object.__setattr__(self, "spelled", _spell(self))
        used = {cell for table in (self.full, self.frontier) for cell in dataclasses.astuple(table)}
        low = {cell.split(":")[0] for cell in used} - {"bf16"}
        p_formats = {table.o_p.split(":")[0] for table in (self.full, self.frontier)}
        if "e4m3" in p_formats and 2.0 ** (self.lag + self.boost) > 448:
            raise ValueError(
                f"lag={self.lag}, boost={self.boost}: weights reach 2^{self.lag + self.boost} and E4M3 ends at 448, so the "
                f"largest would clip; lag + boost may be at most 8"
            )
        if self.route in UNIFORM_ROUTES and p_formats == {"bf16"} and self.boost:
            raise ValueError(
                f"boost={self.boost}: weights have 16 bits in this recipe and need none, so nothing reads it"
            )
        constant = ("e2m1:boost", "e2m1:relative", "e2m1:masked")
        for table in (self.full, self.frontier):
            if table.dv_p in constant or (table.o_p in constant and 2.0 ** (self.lag + self.boost) > 6):
                raise ValueError(f"o_p={table.o_p!r}, dv_p={table.dv_p!r}: E2M1 ends at 6, and with a constant boost the "
                                 f"largest weights would clip; use 'row', 'column' or 'square'")  # fmt: skip
        if self.scale_rule == "floor" and low & {"e2m1", "nvfp4"}:
            raise ValueError("scale_rule='floor' clips a quarter of E2M1's range: FP4 formats take 'ceil' only")
        if self.scale_rule == "floor" and not low:
            raise ValueError(f"scale_rule='floor': nothing in route {self.route!r} has a scale")
        if self.rotate and not any(cell.split(":")[0] != "bf16" for cell in (self.full.s_q, self.full.s_k)):
            raise ValueError(
                f"rotate=True: the scores of route {self.route!r} have 16 bits; there is nothing to rotate for"
            )
        if self.e_format != "e4m3" and self.route != "mxfp8_scores":
            raise ValueError(f"e_format={self.e_format!r} is an option of route 'mxfp8_scores', not of {self.route!r}")
        if self.frontier_scores != "e4m3" and (self.route != "mxfp8_scores" or self.safety == "fast"):
            raise ValueError(
                f"frontier_scores={self.frontier_scores!r} is an option of route 'mxfp8_scores' where it is 'strict' or 'fold', "
                f"not of {self.route}/{self.safety}"
            )
        if self.safety == "strict" and self.dq_accumulator != "fp32":
            raise ValueError(
                f"dq_accumulator={self.dq_accumulator!r}: its boost reads tokens that a window hides; 'strict' takes 'fp32'"
            )
        if self.u_range != "block" and not {self.full.dq_u, self.full.dk_u} & {"e4m3:row", "e4m3:column"}:
            raise ValueError(f"u_range={self.u_range!r}: {self.route}/{self.safety} has no row or column scales on U")
        if self.dv_scale != "column" and not (self.safety == "strict" and self.full.dv_p == "e4m3:relative"):
            raise ValueError(
                f"dv_scale={self.dv_scale!r} is an option of strict E4M3 routes, not of {self.route}/{self.safety}"
            )

    def _make_tables(self) -> tuple[Operands, Operands]:
        """The route's tables with the cells that depart from them."""
        full, frontier = route_tables(self.route, self.safety, self.dv_scale, self.e_format, self.frontier_scores)
        same = full == frontier
        changes = {name: cell for name, cell in self.cells if not name.startswith("frontier.")}
        at_frontier = {name.removeprefix("frontier."): c for name, c in self.cells if name.startswith("frontier.")}
        full = dataclasses.replace(full, **changes)
        return full, dataclasses.replace(full if same else frontier, **at_frontier)

    @property
    def full(self) -> Operands:
        """Operands of pairs of blocks in which every query sees every key."""
        return self._tables[0]

    @property
    def frontier(self) -> Operands:
        """Operands of all other pairs. Equal to `full` where a recipe makes no difference."""
        return self._tables[1]

    @property
    def splits(self) -> str:
        """Which frontiers matter: "both" sides of the mask (strict), "right" (fold), or "none"."""
        if self.full == self.frontier:
            return "none"
        return {"strict": "both", "fold": "right", "fast": "none"}[self.safety]

    @property
    def claims(self) -> frozenset[str]:
        """The contracts that this recipe promises, bit for bit (docs/contract.md)."""
        used = {cell for table in (self.full, self.frontier) for cell in dataclasses.astuple(table)}
        if self.center_k == "call" or any(cell.endswith(":tensor") for cell in used):
            return frozenset({"repeat"})
        local = frozenset({"document", "offset", "repeat"})
        causal = local | {"prefix", "truncate"}
        if self.center_k != "none":
            return local
        if self.cells:  # a departure may leak: promise what holds whatever the cells are
            return local
        if self.dq_accumulator == "fp16_sequence":  # its boost reads the whole document
            return local
        if self.route in UNIFORM_ROUTES and self.dq_accumulator == "fp32":
            return causal | {"mask"}
        return {"strict": causal | {"mask"}, "fold": causal, "fast": local}[self.safety]


def _spell(recipe: Recipe) -> str:
    options = [f",{name}={getattr(recipe, name)}" for name in _OPTIONS]
    return f"{recipe.route}/{recipe.safety}" + "".join(options + [f",{name}={cell}" for name, cell in recipe.cells])


def _parse_bool(name: str, value: str) -> bool:
    if value not in ("True", "False"):
        raise ValueError(f"{name}={value!r}: allowed are True and False")
    return value == "True"


def _parse_int(name: str, value: str) -> int:
    try:
        return int(value)
    except ValueError:
        raise ValueError(f"{name}={value!r}: an integer is needed") from None


_OPTIONS = tuple(f.name for f in dataclasses.fields(Recipe) if f.name not in ("route", "safety", "cells"))


def _preset(route: str, safety: str, options: dict) -> Recipe:
    defaults: dict = {}
    if route in UNIFORM_ROUTES:
        # 16-bit weights need no boost. A kernel whose scores have 8 bits gains a tenth of its time by not following the
        # maximum closely, and a weight near one stays exact: 1 - 2^-6 and more of a row.
        defaults = {"lag": 6 if route == "mxfp8_scores" else 0, "boost": 0}
    elif safety == "fast":
        defaults = {"dq_accumulator": "fp16_sequence"}
    elif safety == "fold":
        defaults = {"dq_accumulator": "fp16_causal"}
    for name in options:
        if name not in (*_OPTIONS, "cells"):
            raise TypeError(f"a recipe has no option {name!r}; there are {', '.join(_OPTIONS)}{meant(name, _OPTIONS)}")
    return Recipe(**{"route": route, "safety": safety, **defaults, **options})


_TENSOR = "e4m3:tensor"
CONTROLS: dict[str, Recipe] = {
    "current_scaling": Recipe.fast(
        dq_accumulator="fp32",
        cells=tuple((name, _TENSOR) for name in ("s_q", "s_k", "o_v", "e_g", "e_v", "dv_g", "dq_k", "dk_q")),
    ),
    "v_stripes_floor": Recipe.fast(
        dq_accumulator="fp32",
        scale_rule="floor",
        cells=(
            ("s_q", "e4m3:feature32"),
            ("s_k", "e4m3:feature32"),
            ("o_v", "e4m3:stripe32"),
            ("e_g", "e4m3:feature32"),
            ("e_v", "e4m3:feature32"),
            ("dv_g", "e4m3:stripe32"),
            ("dq_k", "e4m3:stripe32"),
            ("dk_q", "e4m3:stripe32"),
        ),
    ),
    "k_centered": Recipe.strict("mxfp8_scores", center_k="document"),
    "k_centered_call": Recipe.strict("mxfp8_scores", center_k="call"),
}
"""Recipes that imitate what others ship, to be caught by an audit: one scale per tensor computed from the call, 32x1
stripes along tokens with the floor rule, K centred by a mean over the document and over the whole call."""
