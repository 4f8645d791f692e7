"""How much is tried: the documents, cuts, disturbances and lengths of every effort.

Lengths and positions were chosen so that groups of 16 to 256 tokens, by document and by address, are cut strictly inside,
that documents are more than eight, and that some are empty or of one token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from .probes import TONES, Settings

EFFORTS = ("spot", "brief", "quick", "normal", "thorough")
# More than eight documents from "quick" on: tables of documents have sizes, too.
_SHORT, _LONG = (13, 170, 0, 1, 33), (13, 300, 0, 1, 45, 2, 3, 1, 17, 5, 9)
LENGTHS: dict[str, tuple[int, ...]] = {
    "spot": _SHORT,
    "brief": _SHORT,
    "quick": _LONG,
    "normal": _LONG,
    "thorough": (13, 300, 0, 1, 0, 77, 2, 3, 1, 17, 5, 9, 1, 1, 1, 4, 1, 2, 6),
}
CUTS: dict[str, tuple[int, ...]] = {
    "spot": (139,),
    "brief": (7, 139),
    "quick": (7, 45, 139, 267),
    "normal": (1, 7, 21, 45, 77, 139, 203, 267),
    "thorough": (1, 7, 21, 32, 45, 64, 77, 110, 139, 171, 203, 235, 267, 299),
}
_AROUND = (96, 100, 127, 128, 129, 160, 191, 192, 200, 255, 256, 257, 288, 299)
TRUNCATIONS: dict[str, tuple[int, ...]] = {
    "spot": (150,),
    "brief": (33, 129, 150),
    "quick": (1, 31, 33, 64, 100, 129, 200, 256, 299),
    "normal": (1, 2, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, *_AROUND),
    "thorough": (*range(1, 67), *_AROUND),
}
_ALL = ("spike", "redraw", "cross", "lift")
DISTURBANCES = {"spot": _ALL[:1], "brief": _ALL[:1], "quick": _ALL[:3], "normal": _ALL, "thorough": _ALL}
LEADS = {"spot": (), "brief": (39,), "quick": (1, 39), "normal": (1, 16, 39, 128), "thorough": (1, 16, 39, 128)}
MASS_LENGTHS: dict[str, tuple[int, ...]] = {
    "spot": (),
    "brief": (300,),
    "quick": (33, 300, 1024),
    "normal": (33, 128, 300, 1024, 2048),
    "thorough": (33, 128, 300, 1024, 2048, 4096),
}
# Controls are small: two heads, and a document just past the widest group that one of them shares.
CONTROL_LENGTHS, CONTROL_HEADS, CONTROL_DIM = (13, 75, 0, 1, 21), (2, 1), 16


def inside(positions: tuple[int, ...], longest: int) -> tuple[int, ...]:
    """Positions within a document. One past its end is taken modulo 64, which keeps it inside, or on the edge of, every
    group of up to 64; then, in a document shorter than that, modulo its length.
    """
    kept = {p if p < longest else p % 64 % longest for p in positions} - {0}
    return tuple(sorted(kept)) or (longest // 2,)


def query_counts(lengths: tuple[int, ...], layout: str) -> tuple[int, ...]:
    """Numbers of queries that differ from ``lengths``, those of keys: fewer in the longest document (by a number that is
    on the edge of no group, and leaves queries before most cuts), elsewhere more, as many, none, and some where there
    are no keys.
    """
    longest = max(lengths)
    fewer = longest - 37 if longest > 100 else longest - min(5, longest // 4)
    if layout == "batched":
        return (fewer,) * len(lengths)
    others = {0: lambda n: n + 7, 1: lambda n: n, 2: lambda n: 0}
    return tuple(
        fewer if d == lengths.index(longest) else 3 if n == 0 else others[d % 3](n) for d, n in enumerate(lengths)
    )


def settings_for(
    effort: str,
    layout: str,
    dtype: torch.dtype,
    window: tuple[int | None, int | None],
    cuts: Sequence[int] | None,
    lengths: Sequence[int] | None,
    seed: int,
    cross: bool | Sequence[int] = False,
) -> Settings:
    """The probes of one effort. ``cuts`` and ``lengths`` override; the watched document is the longest. ``cross``: other
    numbers of queries than of keys, those given or ``query_counts``.
    """
    if effort not in EFFORTS:
        raise ValueError(f"effort={effort!r}: allowed are {', '.join(EFFORTS)}")
    chosen = tuple(int(n) for n in lengths) if lengths is not None else LENGTHS[effort]
    if layout == "batched":
        chosen = (max(chosen),) * 2
    if not chosen or min(chosen) < 0 or max(chosen) < 2:
        raise ValueError(f"lengths={chosen}: document lengths in tokens, none negative and one of 2 or more")
    longest = max(chosen)
    given = inside(CUTS[effort], longest) if cuts is None else tuple(int(c) for c in cuts)
    where = tuple(sorted({c for c in given if 0 < c < longest}))
    if not where:
        raise ValueError(
            f"cuts={list(cuts) if cuts is not None else None}: positions strictly inside the longest document "
            f"(1..{longest - 1}), at least one"
        )
    queries: tuple[int, ...] | None = None
    if cross is True:
        queries = query_counts(chosen, layout)
    elif cross is not False:
        queries = tuple(int(n) for n in cross)
        if len(queries) != len(chosen) or min(queries) < 0 or queries[chosen.index(longest)] < 2:
            raise ValueError(
                f"cross={queries}: the number of queries of each of the {len(chosen)} documents, none negative, and two "
                "or more in the longest"
            )
    return Settings(
        queries=queries,
        lengths=chosen,
        watched=chosen.index(longest),
        cuts=where,
        truncations=inside(TRUNCATIONS[effort], longest),
        leads=tuple(n for n in LEADS[effort] if n < longest),
        tones=TONES,
        disturbances=DISTURBANCES[effort],
        depth=EFFORTS.index(effort),
        layout=layout,
        dtype=dtype,
        left=window[0],
        right=window[1],
        seed=seed,
    )


def control_settings(settings: Settings) -> Settings:
    """The same probes on a small packing."""
    longest = max(CONTROL_LENGTHS)
    return replace(
        settings,
        lengths=CONTROL_LENGTHS,
        watched=CONTROL_LENGTHS.index(longest),
        cuts=inside(settings.cuts, longest),
        truncations=inside(settings.truncations, longest),
        leads=tuple(n for n in settings.leads if n < longest),
        layout="packed",
        left=None,
        right=0,
        queries=None,
    )
