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
from typing import Any

import torch

from . import controls, mass
from .contract import CONTRACTS, DEFAULT_CLAIMS, IMPLIES, resolve_claims, sides
from .diagnose import diagnose
from .efforts import CONTROL_DIM, CONTROL_HEADS, MASS_LENGTHS, control_settings, settings_for
from .judge import Judge
from .probes import NONFINITE, Book, Experiment, Made, Settings, blunt_groups, planned
from .report import ControlResult, Report
from .targets import Refused, Target


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


@functools.lru_cache(maxsize=64)
def run_controls(settings: Settings) -> tuple[ControlResult, ...]:
    """Every control under these probes; cached for the process, since the answer depends on the probes alone."""
    book = Book(settings, CONTROL_HEADS, CONTROL_DIM)
    asked = [e for e in (made() for made in planned(book)) if e.disturbance not in NONFINITE]
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
    progress: bool | Callable[[int, int, str], None] = False,
    seconds: float | None = None,
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
        progress: a bar on the terminal, or a callable that is told (experiments done, in all, what comes next).
        seconds: after them no further experiment is begun, and the verdict is never "clean" then.
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
    plan = planned(judge.book)
    late = None if seconds is None else _Late(start + seconds, len(plan))
    for e in _shown(plan, progress, late):
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
        doubts=_doubts(settings, results) + ([late.text] if late and late.left else []),
        stopped=stopped,
    )
    if explain and any(f.kind == "leak" and f.contract != "nonfinite" for f in judge.findings):
        report.diagnosis = diagnose(judge, claimed, settings.depth > 2)
    report.calls, report.seconds = target.calls, time.perf_counter() - start
    return report


class _Late:
    """When the time is over, and how much was left then."""

    def __init__(self, deadline: float, planned: int) -> None:
        self.deadline, self.planned, self.left = deadline, planned, 0

    @property
    def text(self) -> str:
        return f"out of time: {self.left} of {self.planned} experiments were not run"


def _shown(
    plan: list[Made], progress: bool | Callable[[int, int, str], None], late: _Late | None
) -> Iterator[Experiment]:
    """The experiments of a plan, each built when it is run, until the time is over."""
    steps: Iterable[Made] = plan
    if progress is True:
        from rich.progress import track

        steps = track(plan, description="experiments")
    for n, made in enumerate(steps):
        if late and time.perf_counter() > late.deadline:
            late.left = len(plan) - n
            return
        e = made()
        if callable(progress):
            progress(n, len(plan), e.name)
        yield e
    if callable(progress):
        progress(len(plan), len(plan), "sums and controls")


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
            f"not repeatable: no bitwise verdict; changes below 8 times the floor ({floor}, in units of what another "
            "order of summation moves) are invisible"
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
