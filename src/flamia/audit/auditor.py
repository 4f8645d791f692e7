"""One audit from beginning to end.

The order matters: first a packing that the callable accepts, then repeats (a callable that cannot repeat itself
gets no bitwise verdict), then the experiments, the sums, the repeats again (state kept between calls shows only
then), and last the controls under the very same probes. What could not be tried is written down as a blind spot,
never passed over.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from . import controls, mass
from .contract import CONTRACTS, DEFAULT_CLAIMS, IMPLIES, resolve_claims, sides
from .diagnose import diagnose
from .judge import Judge
from .probes import NONFINITE, TONES, Book, Experiment, Settings, blunt_groups, experiments
from .report import ControlResult, Report
from .targets import Refused, Target

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


def accepted(target: Target, settings: Settings, may_change: bool) -> tuple[Settings, list[str]]:
    """The first packing that the callable takes: with an empty document, without, then multiples of 128."""
    spots: list[str] = []
    shapes = [settings.lengths]
    if may_change:
        shapes += (
            [tuple(n for n in settings.lengths if n), (128, 384, 128)] if settings.layout == "packed" else [(384, 384)]
        )
    for lengths in dict.fromkeys(shapes):
        trial = settings.with_lengths(lengths)
        try:
            target.run(Book(trial, target.heads, target.head_dim).base("plain"))
        except Refused as refusal:
            spots.append(f"document lengths {lengths} were refused, so nothing is known about them: {refusal}")
            continue
        return trial, spots
    if settings.queries is not None:
        raise ValueError(
            "the callable takes no packing with other numbers of queries than of keys (cross=), so there is nothing to "
            "audit; with layout='packed' it is called as fn(q, k, v, cu_seqlens_q, cu_seqlens_k), with 'batched' as "
            f"fn(q, k, v). It said: {spots[0]}"
        )
    other = "batched" if target.layout == "packed" else "packed"
    takes = {"packed": "(q, k, v, cu_seqlens)", "batched": "(q, k, v)"}[other]
    raise ValueError(
        f"the callable accepts none of the packings tried, so there is nothing to audit; heads={target.heads}, "
        f"head_dim={target.head_dim}, "
        f"dtype={target.dtype}, layout={target.layout!r} and lengths= are yours to set (layout={other!r} if it takes {takes}). "
        f"It said: {spots[0]}"
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


@functools.lru_cache(maxsize=64)
def run_controls(settings: Settings) -> tuple[ControlResult, ...]:
    """Every control under these probes; cached for the process, since the answer depends on the probes alone."""
    book = Book(settings, CONTROL_HEADS, CONTROL_DIM)
    asked = [e for e in experiments(book) if e.disturbance not in NONFINITE]
    return tuple(_run_control(control, book, asked) for control in (*controls.LEAKY, controls.EXACT))


def _run_control(control: controls.Control, book: Book, asked: list[Experiment]) -> ControlResult:
    judge = Judge(Target(control.fn, heads=CONTROL_HEADS, head_dim=CONTROL_DIM, dtype=book.settings.dtype), book)

    kinds = ("leak",) if control.expects else ("leak", "noise")  # float64 shows the order of its own sums

    def found() -> set[tuple[str, str, str]]:
        judge.settle()
        return {(f.contract, f.tensor, f.operand) for f in judge.findings if f.kind in kinds}

    if not control.expects:
        for e in asked[:: max(1, len(asked) // 120)]:
            judge.run(e)
        return ControlResult(control.name, not found(), tuple(sorted(found())), None)
    missing = set(control.expects)
    for e in asked:
        if e.operand in {operand for _, _, operand in missing} and judge.run(e):
            missing -= found()
    return ControlResult(control.name, not missing, tuple(sorted(missing)), control.group)


def audit_callable(
    fn: Callable[..., Any],
    *,
    layout: str = "packed",
    causal: bool = True,
    window: tuple[int | None, int | None] | None = None,
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 32,
    dtype: torch.dtype = torch.bfloat16,
    claims: Iterable[str] | None = None,
    effort: str = "quick",
    seed: int = 0,
    device: str | torch.device = "cpu",
    backward: str | Callable[..., Any] | None = "autograd",
    progress: bool = False,
    cuts: Sequence[int] | None = None,
    lengths: Sequence[int] | None = None,
    name: str | None = None,
    explain: bool = True,
    until: str | None = None,
    cross: bool | Sequence[int] = False,
) -> Report:
    """Audit any attention for isolation, knowing nothing of its inside.

    Args:
        fn: ``fn(q, k, v, cu_seqlens) -> O`` on (total, H, D) for ``layout="packed"``, ``fn(q, k, v) -> O`` on (B,
        T, H, D) for ``"batched"``.
            A tuple's first entry is O; a second one shaped as an LSE, (H, T) or (T, H), is held to the contracts too.
            If it has ``fn.backward(q, k, v, cu_seqlens, dO) -> (dq, dk, dv)``, that is
            used in place of autograd.
        causal, window: what the callable is meant to mask, in flash-attention's convention (both ends inclusive,
        None or -1 open).
        heads, head_dim, dtype, device: of the operands; ``heads`` is (query heads, key heads).
        claims: the contracts that count (see ``contract.CONTRACTS``); by default all but mask, nonfinite and mass,
        which are tried and reported.
        effort: "quick", "normal" or "thorough"; "spot" and "brief" (some twenty and fifty calls) leave out most
        pairs of tone and operand.
        backward: "autograd", a callable with ``fn.backward``'s signature, or None to audit O alone.
        cuts: first disturbed positions in the longest document. Only multiples of a group size: warned about, and
        never "clean".
        lengths: the documents' lengths, for callables that take only some.
        explain: draw a dependency map where something leaks (some fifty more calls).
        cross: other numbers of queries than of keys, the last query aligned with the last key: True, or the number of
            queries of each document. A packed callable is then called as fn(q, k, v, cu_seqlens_q, cu_seqlens_k).
        until: "leak" stops at the first leak that counts: a quick no, with the sums and controls left out.

    Returns a ``Report``; ``report.exit_code`` is 0, 1 or 2 for clean, leak and undecided. Raises ``ValueError``
    for arguments that make no sense, and when the callable takes none of the packings tried.
    """
    if not callable(fn):
        raise ValueError(f"fn must be a function to audit, got {fn!r}; names (module:function) go to the command line")
    if until not in (None, "leak"):
        raise ValueError(
            f"until={until!r}: allowed are None (run everything) and 'leak' (stop at the first that counts)"
        )
    start = time.perf_counter()
    claimed = resolve_claims(claims, causal)
    target = Target(fn, layout=layout, backward=backward, heads=heads, head_dim=head_dim, dtype=dtype, device=device)
    reach = sides(causal, window)
    settings, spots = accepted(
        target, settings_for(effort, layout, dtype, reach, cuts, lengths, seed, cross), lengths is None
    )
    judge = Judge(target, Book(settings, heads, head_dim))

    judge.repeat(settings.tones[: (1, 2, 3, 6, 6)[settings.depth]], "the same call again")
    counts = {part for c in claimed for part in IMPLIES.get(c, (c,))}
    stopped = False
    for e in _shown(experiments(judge.book), progress):
        found = judge.run(e)
        if e.operand == "layout" and e.cut is not None and any(f.kind == "order" for f in found):
            # Is it the order of a sum? Then other contents behind the same cut, at equal length, move nothing.
            found += judge.run(judge.book.change(e.tone, "all", "redraw", settings.watched, e.cut))
        stopped = until == "leak" and any(f.kind == "leak" and f.contract in counts for f in found)
        if stopped:
            break
    else:
        judge.repeat(settings.tones[: 1 if settings.depth < 2 else 2], "the same call after others")
        if judge.keeps_state and settings.depth > 1:
            judge.history()
    judge.settle()
    sums = () if stopped else MASS_LENGTHS[effort]
    masses = [mass.measure(target, n, reach[0], seed, settings.queries is not None) for n in sums]
    mass_status, mass_reasons = ("untried", []) if stopped else mass.verdict(masses)

    results = [] if stopped else list(run_controls(control_settings(settings)))
    if stopped:
        spots.append("stopped at the first leak, as asked: later probes, the sums and the controls were not run")
    statuses = judge.statuses() | {"mass": mass_status}
    if stopped:
        statuses = {c: s if s == "leak" else "untried" for c, s in statuses.items()}
    statuses = {c: statuses[c] for c in CONTRACTS if causal or c not in ("prefix", "truncate")}
    report = Report(
        target={
            "name": name or getattr(fn, "__qualname__", None) or type(fn).__name__,
            "layout": layout,
            "heads": list(heads),
            "head_dim": head_dim,
            "dtype": str(dtype).removeprefix("torch."),
            "device": str(device),
            "causal": causal,
            "window": list(window) if window else None,
            "cross": settings.queries is not None,
            "effort": effort,
            "seed": seed,
        },
        claims=claimed,
        statuses=statuses,
        findings=judge.findings,
        tried=dict(judge.tried),
        masses=masses,
        mass_reasons=mass_reasons,
        controls=results,
        blind_spots=spots + _blind_spots(judge, settings, claims is None),
        notes=sorted(target.notes),
        doubts=_doubts(settings, results),
        stopped=stopped,
    )
    if explain and any(f.kind == "leak" and f.contract != "nonfinite" for f in judge.findings):
        report.diagnosis = diagnose(judge, claimed, settings.depth > 2)
    report.calls, report.seconds = target.calls, time.perf_counter() - start
    return report


def _shown(planned: Iterator[Experiment], progress: bool) -> Iterable[Experiment]:
    """Experiments are built as they are run, since a list of them holds gigabytes at a model's sizes; so no total."""
    if not progress:
        return planned
    from rich.progress import track

    return track(planned, description="experiments", total=None)


def _doubts(settings: Settings, results: list[ControlResult]) -> list[str]:
    doubts = []
    blunt = blunt_groups(settings.cuts, max(settings.lengths))
    if blunt:
        doubts.append(
            f"warning: every cut in {list(settings.cuts)} lies on an edge of groups of "
            f"{', '.join(map(str, blunt))}, so a scale shared by such a "
            "group cannot show; add cuts strictly inside, such as 7, 45 or 139"
        )
    for result in results:
        if not result.caught:
            what = "; ".join("/".join(m) for m in result.missed)
            doubts.append(
                f"control '{result.name}' "
                + (f"was accused ({what})" if result.name == controls.EXACT.name else f"was not caught in {what}")
            )
    return doubts


def _blind_spots(judge: Judge, settings: Settings, default_claims: bool) -> list[str]:
    spots = []
    if not judge.target.has_gradients:
        spots.append("no gradients: leaks into dQ (dO, U and dQ-accumulator scales), dK and dV cannot be seen")
    if not judge.stable:
        floor = ", ".join(f"{t} {x:.2g}" for t, x in judge.floor.items() if x)
        spots.append(
            f"not repeatable: no bitwise verdict; changes below 8 times the floor ({floor}, relative to the row) "
            "are invisible"
        )
    if judge.keeps_state:
        spots.append(
            "the call repeats right after itself and not after others: it keeps state, such as a delayed scale"
        )
    refused = [f"{what} ({why})" for what, why in judge.refusals.items()]
    if refused:
        spots.append(f"refused: {'; '.join(refused[:4])}{f' and {len(refused) - 4} more' if len(refused) > 4 else ''}")
    spots.append(
        f"document lengths up to {max(settings.lengths)} only: what begins further along (longer blocks, split "
        "reductions) was not tried"
    )
    if settings.layout == "batched":
        spots.append("batched: equal lengths only, so padding and packing were not tried")
    spots.append(
        f"one head layout ({judge.target.heads[0]}/{judge.target.heads[1]} x {judge.target.head_dim}), one mask, "
        "one dtype, one number of threads"
        + ("; equal query and key lengths" if settings.queries is None else "; the sums at equal lengths only")
    )
    if default_claims:
        spots.append(f"tried but not counted: {', '.join(c for c in CONTRACTS if c not in DEFAULT_CLAIMS)}")
    return spots
