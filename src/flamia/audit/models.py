"""Does a whole language model see the future, and does it serve what it trained?

``flamia.audit_model(model)`` puts the question of ``flamia.audit`` to ``tokens -> logits``: any callable, any
``torch.nn.Module``, any causal model of Hugging Face. Where the modules are known, a leak is followed to the one in
which it enters. Rooms: ``model_target`` (how a model is run), ``trace`` (hooks), ``model_judge`` (what a difference
means), ``model_locate`` (where it begins), ``model_report``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .model_judge import EFFORTS, ModelJudge, Probe
from .model_locate import locate
from .model_report import MODEL_CONTRACTS, SERVED, Location, ModelReport
from .model_target import ModelTarget
from .probes import blunt_groups
from .targets import Refused

BATCH = 2
LENGTHS = {"spot": 75, "brief": 75, "quick": 150, "normal": 150, "thorough": 300}
_MANY = (1, 7, 21, 45, 77, 110, 139)
CUTS = {"spot": (45,), "brief": (7, 45), "quick": (7, 45, 139), "normal": _MANY, "thorough": (*_MANY, 171, 203, 267)}


def audit_model(
    model: Callable[..., Any],
    *,
    vocabulary: int | None = None,
    step: str | Callable[..., Any] | None = "auto",
    module: nn.Module | None = None,
    claims: Iterable[str] | None = None,
    effort: str = "quick",
    exact: bool = False,
    length: int | None = None,
    cuts: Sequence[int] | None = None,
    seed: int = 0,
    device: str | torch.device | None = None,
    mode: str = "eval",
    explain: bool = True,
    name: str | None = None,
    progress: Callable[[int, int, str], None] | None = None,
    seconds: float | None = None,
) -> ModelReport:
    """Audit a causal language model: the future, the batch, and what it serves.

    Args:
        model: ``tokens (B, T) int64 -> logits (B, T, V)``; outputs with ``.logits``, or tuples that begin with them.
        vocabulary: how many tokens there are; by default ``model.config.vocab_size``, or the number of logits.
        step: how the model is served: "auto" uses the cache of a Hugging Face model; else a callable ``(tokens,
            cache) -> (logits, cache)`` whose first cache is None; None leaves serving out.
        module: where to look for a leak, if ``model`` is a callable around a ``torch.nn.Module``.
        claims: the contracts that count (see ``model_report.MODEL_CONTRACTS``); by default all that can be tried.
        effort: "spot" or "brief" (some thirty calls), "quick", "normal" or "thorough".
        exact: hold calls of another shape to equal bits, too. By default rounding is excused and its size reported.
        length: tokens of a sequence. cuts: first disturbed positions; only multiples of a group size are warned
            about, and never "clean".
        mode: "eval" audits with dropout off and restores every module; "as_is" leaves them alone.
        explain: look for the module in which a leak enters.
        progress: is told (probes done, in all, what comes next).
        seconds: after them no further probe is begun, and the verdict is never "clean" then.

    Returns a ``ModelReport``; its ``exit_code`` is 0 for clean, 1 for leak and skew, 2 for undecided. Raises
    ``ValueError`` for arguments that make no sense, and when the model takes none of the lengths tried.
    """
    start = time.perf_counter()
    if effort not in EFFORTS:
        raise ValueError(f"effort={effort!r}: allowed are {', '.join(EFFORTS)}")
    unknown = set(claims or ()) - set(MODEL_CONTRACTS)
    if unknown:
        raise ValueError(
            f"claims: unknown contract {sorted(unknown)}; the contracts of a model are {', '.join(MODEL_CONTRACTS)}"
        )
    if length is not None and length < 4:
        raise ValueError(f"length={length}: at least 4 tokens, so that there is a future")
    if module is None and isinstance(model, nn.Module):
        module = model
    with ModelTarget.modes(module, mode):
        target = ModelTarget(model, module=module, step=step, vocabulary=vocabulary, device=device)
        judge = accepted(target, length, effort, seed)
        inner = _inside(cuts, CUTS[effort], judge.tokens.shape[1])
        for _ in range(2):
            judge.repeat("the same call again")
        judge.measure_rounding()
        late = _run(judge, list(judge.probes_for(inner)), progress, None if seconds is None else start + seconds)
        if late is None:
            judge.shapes()
            if target.step is not None:
                judge.serve()
        judge.repeat("the same call after others")
        judge.settle()
        controls = judge.controls(inner)
        place = locate(judge) if explain else Location()

    possible = set(MODEL_CONTRACTS) - (set() if target.step else SERVED)
    report = ModelReport(
        target={
            "name": name or getattr(model, "__qualname__", None) or type(model).__name__,
            "batch": len(judge.tokens),
            "tokens": judge.tokens.shape[1],
            "vocabulary": target.vocabulary,
            "dtype": str(judge.dtype).removeprefix("torch."),
            "device": str(target.device),
            "cuts": list(inner),
            "effort": effort,
            "seed": seed,
            "mode": mode,
            "exact": exact,
        },
        claims=frozenset(claims) if claims is not None else frozenset(possible),
        findings=judge.findings,
        tried=judge.tried,
        stable=judge.stable,
        rounding=judge.rounding,
        room=judge.allowed,
        controls=controls,
        notes=sorted(target.notes),
        **vars(place),
    )
    report.blind_spots = _blind_spots(judge, report)
    report.doubts = _doubts(judge, report) + ([late] if late else [])
    report.calls, report.seconds = target.calls, time.perf_counter() - start
    return report


def _run(
    judge: ModelJudge, probes: list[Probe], progress: Callable[[int, int, str], None] | None, deadline: float | None
) -> str | None:
    """Every probe, until the time is over; then how many were left."""
    for n, probe in enumerate(probes):
        if deadline is not None and time.perf_counter() > deadline:
            return f"out of time: {len(probes) - n} of {len(probes)} probes, other shapes and serving were not run"
        if progress:
            progress(n, len(probes), probe.text)
        judge.run(probe)
    if progress:
        progress(len(probes), len(probes), "other shapes, serving, controls")
    return None


def accepted(target: ModelTarget, length: int | None, effort: str, seed: int) -> ModelJudge:
    """A judge at the first length that the model takes."""
    lengths = [length] if length is not None else sorted({LENGTHS[effort], 75, 33}, reverse=True)
    said = None
    for n in lengths:
        if length is None and n > min(LENGTHS[effort], target.longest or n):
            continue
        rng = torch.Generator().manual_seed(1_000_003 * seed + 17)
        try:
            return ModelJudge(target, torch.randint(target.vocabulary, (BATCH, n), generator=rng), effort)
        except Refused as refusal:
            said = said or refusal
    raise ValueError(
        f"the model takes none of the lengths {lengths} (batch {BATCH}, tokens below {target.vocabulary}); length= and "
        f"vocabulary= are yours to set. It said: {said}"
    )


def _inside(cuts: Sequence[int] | None, usual: Sequence[int], length: int) -> tuple[int, ...]:
    inner = tuple(sorted({int(c) for c in (usual if cuts is None else cuts) if 0 < c < length}))
    if inner:
        return inner
    if cuts is None:
        return (max(1, length // 2 - 1),)
    raise ValueError(f"cuts={list(cuts)}: positions strictly inside the sequence (1..{length - 1}), at least one")


def _doubts(judge: ModelJudge, report: ModelReport) -> list[str]:
    out = []
    blunt = blunt_groups(tuple(report.target["cuts"]), report.target["tokens"])
    if blunt:
        out.append(
            f"warning: every cut in {report.target['cuts']} lies on an edge of groups of {', '.join(map(str, blunt))}, "
            "so a scale shared by such a group cannot show; add cuts strictly inside, such as 7, 45 or 139"
        )
    module = judge.target.module
    if module is not None and not judge.groups:
        out.append(
            "nothing inside could be disturbed: no hook fired on a module that gives a tensor with positions, as in "
            "compiled or traced models; audit the original module (._orig_mod of torch.compile), or wrap it in "
            "a plain function to have tokens alone tried"
        )
    if report.controls and not any(c.caught for c in report.controls):
        out.append("not one of the planted leaks was seen, so this audit would not have seen a real one either")
    if not bool(_finite(judge.base)):
        out.append("the model's own logits are not finite")
    return out


def _finite(x: Tensor) -> Tensor:
    return x.isfinite().all()


def _blind_spots(judge: ModelJudge, report: ModelReport) -> list[str]:
    spots = ["logits only: leaks into gradients (a scale of dO, say) are the business of flamia.audit"]
    if judge.target.module is None:
        spots.append(
            "only a callable is known: nothing inside could be disturbed, so scales shared by equally loud tokens may "
            "pass unseen; give module= or the torch.nn.Module itself"
        )
    if judge.target.step is None:
        spots.append("no cache is known (step=), so serving was not compared with training")
    if not judge.stable:
        spots.append(f"not repeatable: changes below 8 times the floor ({judge.floor:.2g} of the row) are invisible")
    missed = [c.name for c in report.controls if not c.caught]
    if missed and len(missed) < len(report.controls):
        spots.append(f"planted and not seen: {', '.join(missed)}")
    refused = [f"{what} ({why})" for what, why in judge.refusals.items()]
    if refused:
        more = f" and {len(refused) - 4} more" if len(refused) > 4 else ""
        spots.append(f"not tried: {'; '.join(refused[:4])}{more}")
    spots.append(
        f"sequences of {report.target['tokens']} tokens, all of one length and without padding; one mode "
        f"({report.target['mode']}), one number of threads"
    )
    return spots
