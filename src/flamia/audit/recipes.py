"""The audit turned on ourselves: every preset against what it promises.

A recipe says what it claims (``recipe.claims``): ``strict`` everything, ``fold`` causal isolation, ``fast``
isolation of documents alone. Each is called through the public ``flamia.attention_varlen`` under every mask and
head layout, as a callable of which the auditor knows nothing. The table shows, preset by contract, the number of
comparisons in which nothing moved, or the largest change relative to its row. A contract that is not claimed is
measured too: ``fast`` must be *seen* to leak, and so must the recipes that imitate others
(``flamia.recipe.CONTROLS``), or the audit is blind and says so.

Exit code 0 only if whatever is claimed holds everywhere and every control was caught.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from .auditor import audit_callable
from .contract import CONTRACTS, IMPLIES
from .report import EXIT, Report
from .written import Written

if TYPE_CHECKING:
    from rich.console import Group

    from flamia.recipe import Recipe


@dataclass(frozen=True)
class Mask:
    """A mask, the heads to try it with, and where its edges are (None: the effort's own lengths and cuts)."""

    name: str
    causal: bool
    window: tuple[int, int] | None
    heads: tuple[int, int]
    lengths: tuple[int, ...] | None = None
    cuts: tuple[int, ...] | None = None


# Windows below two blocks of 128 never hide part of a document from a whole block: the last two are long enough to, and
# need a longer document with cuts near its ends. They matter to whoever claims `mask`, and only those are asked.
MASKS = (
    Mask("causal", True, None, (4, 2)),
    Mask("causal, left 40", True, (40, 0), (2, 2)),
    Mask("full", False, None, (2, 1)),
    Mask("left 40, right 24", False, (40, 24), (2, 1)),
)
LONG_MASKS = (
    Mask("causal, left 260", True, (260, 0), (2, 1), (13, 300, 1), (7, 267)),
    Mask("left 270, right 150", False, (270, 150), (2, 1), (13, 300, 1), (7, 267)),
)

# Seen through which contract each imitation must be caught; `fast` presets leak inside groups of tokens.
CAUGHT_IN = {
    "current_scaling": ("prefix", "document"),
    "v_stripes_floor": ("prefix",),
    "k_centered": ("prefix",),
    "k_centered_call": ("prefix", "document"),
}


@dataclass(frozen=True)
class Row:
    """One recipe under one mask."""

    recipe: str
    mask: Mask
    report: Report


@dataclass
class RecipeAudit(Written):
    """All rows, and what must be true of them."""

    rows: list[Row]
    missed: list[str]  # controls, ours and the auditor's, that were not caught

    @property
    def verdict(self) -> str:
        verdicts = {row.report.verdict for row in self.rows}
        if "leak" in verdicts:
            return "leak"
        return "undecided" if "undecided" in verdicts or self.missed else "clean"

    @property
    def exit_code(self) -> int:
        return EXIT[self.verdict]

    @property
    def says(self) -> str:
        """What the verdict means here: a recipe is held to what it claims, and `fast` claims nothing about the future."""
        return {
            "clean": "every recipe keeps what it claims, and no control was missed; brackets are not claims",
            "leak": "a recipe breaks what it claims",
            "undecided": "something could not be judged, or a control was missed",
        }[self.verdict]

    def recipes(self) -> list[str]:
        return list(dict.fromkeys(row.recipe for row in self.rows))

    def cell(self, recipe: str, contract: str) -> tuple[str, bool, int, float | None, bool]:
        """(status, claimed, comparisons, largest change or None, differs only in summation order) over all masks of a
        recipe.
        """
        reports = [r.report for r in self.rows if r.recipe == recipe and contract in r.report.statuses]
        statuses = {r.statuses[contract] for r in reports}
        status = next((s for s in ("leak", "undecided", "clean") if s in statuses), "untried")
        count = sum(n for r in reports for (c, _, _), n in r.tried.items() if c == contract)
        parts = IMPLIES.get(contract, (contract,))
        found = [f for r in reports for f in r.findings if f.contract in parts]
        largest = max((f.largest for f in found), default=None)
        return (
            status,
            any(contract in r.claims for r in reports),
            count,
            largest,
            bool(found) and all(f.kind == "order" for f in found),
        )

    def bias(self, recipe: str) -> float | None:
        """The worst bias of a sum, over lengths and masks."""
        masses = [m for r in self.rows if r.recipe == recipe for m in r.report.masses]
        return max((x for m in masses for x in (m.o_bias, m.dv_bias) if x is not None), default=None)

    def cell_text(self, recipe: str, contract: str) -> str:
        status, claimed, count, largest, order = self.cell(recipe, contract)
        bias = self.bias(recipe)
        if contract == "mass" and bias is not None:
            text = f"{bias:.1g}"
        elif status == "untried":
            return "-"
        elif largest is None:
            text = f"0 of {count}"
        else:
            text = f"order {largest:.1g}" if order else f"{largest:.2g}"
        return text if claimed else f"({text})"

    def __str__(self) -> str:
        shown = [
            c for c in CONTRACTS if any(c in r.report.statuses and r.report.statuses[c] != "untried" for r in self.rows)
        ]
        table = [["recipe", *shown]] + [[name, *(self.cell_text(name, c) for c in shown)] for name in self.recipes()]
        wide = [max(len(line[n]) for line in table) for n in range(len(shown) + 1)]
        lines = ["  ".join(text.ljust(w) for text, w in zip(line, wide, strict=True)).rstrip() for line in table]
        lines.append(
            "0 of n: nothing moved in n comparisons; a number: largest change relative to its row; in brackets: "
            "not claimed"
        )
        if shown_controls := [name for name in self.recipes() if name in CAUGHT_IN]:
            lines.append(f"controls, which leak and must be caught: {', '.join(shown_controls)}")
        for row in self.rows:
            lines += [
                f"{row.recipe}, {row.mask.name}, heads {row.mask.heads[0]}/{row.mask.heads[1]}: {reason}"
                for reason in row.report.reasons
            ]
        lines += [f"control missed: {text}" for text in self.missed]
        lines += [self.says, f"verdict: {self.verdict}"]
        return "\n".join(lines)

    def __rich__(self) -> Group:
        from rich.console import Group
        from rich.markup import escape
        from rich.table import Table

        shown = [
            c for c in CONTRACTS if any(c in r.report.statuses and r.report.statuses[c] != "untried" for r in self.rows)
        ]
        table = Table(
            "recipe",
            *shown,
            title=f"{len(self.rows)} audits, {sum(r.report.calls for r in self.rows)} calls",
            title_justify="left",
            box=None,
        )
        for name in self.recipes():
            cells = []
            for contract in shown:
                status, claimed, *_ = self.cell(name, contract)
                colour = "dim" if not claimed else {"clean": "green", "leak": "bold red"}.get(status, "yellow")
                cells.append(f"[{colour}]{self.cell_text(name, contract)}[/]")
            table.add_row(name, *cells)
        notes = str(self).splitlines()[len(self.recipes()) + 1 :]
        return Group(table, *(escape(line) for line in notes))

    def to_dict(self) -> dict[str, Any]:
        return {
            "schema": 1,
            "verdict": self.verdict,
            "exit_code": self.exit_code,
            "missed": self.missed,
            "rows": [
                {"recipe": r.recipe, "mask": r.mask.name, "heads": list(r.mask.heads), "report": r.report.to_dict()}
                for r in self.rows
            ],
        }

    def page(self) -> str:
        from .page import render

        return render([r.report for r in self.rows], title="flamia's presets", overview=self)


def default_recipes() -> list[str]:
    """Every route in every safety that makes a difference."""
    names = [f"{route}/{safety}" for route in ("mxfp8", "nvfp4_fp8", "nvfp4") for safety in ("strict", "fold", "fast")]
    return [*names, "mxfp8_scores/strict", "bf16/strict"]


def callable_of(
    recipe: Recipe, mask: Mask, backend: str = "auto"
) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """One recipe under one mask as the plain callable that the auditor wants."""
    import flamia

    def fn(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor) -> Tensor:
        out = flamia.attention_varlen(
            q, k, v, cu_seqlens, causal=mask.causal, window=mask.window, recipe=recipe, backend=backend
        )
        return cast(Tensor, out)  # without return_lse there is one

    return fn


def audit_recipes(
    recipes: Iterable[Recipe | str] | None = None,
    *,
    masks: Sequence[Mask] | None = None,
    controls: bool = True,
    effort: str = "brief",
    head_dim: int = 32,
    dtype: torch.dtype = torch.bfloat16,
    device: str | torch.device = "cpu",
    backend: str = "auto",
    seed: int = 0,
    progress: Callable[[int, int, str], None] | None = None,
) -> RecipeAudit:
    """Audit recipes against their own claims.

    Args:
        recipes: ``Recipe`` values, strings for ``Recipe.parse``, or names in ``flamia.recipe.CONTROLS``; None: all
        presets.
        masks: ``MASKS`` by default, and ``LONG_MASKS`` for recipes that claim ``mask``. The first one gets the whole
            ``effort``, the others a spot check when the effort is "brief".
        controls: also run ``flamia.recipe.CONTROLS`` under the first mask and require each to be caught.
        progress: called with (audits done, audits in all, what comes next).
    """
    from flamia.recipe import CONTROLS, Recipe

    chosen: list[tuple[str, Recipe]] = []
    for item in default_recipes() if recipes is None else recipes:
        if isinstance(item, str) and item in CONTROLS:
            chosen.append((item, CONTROLS[item]))
        else:
            recipe = Recipe.parse(item) if isinstance(item, str) else item
            chosen.append((str(recipe), recipe))
    names = {name for name, _ in chosen}
    first = (MASKS if masks is None else masks)[0]
    work = []
    for name, recipe in chosen:
        usual = MASKS + (LONG_MASKS if "mask" in recipe.claims else ()) if masks is None else masks
        work += [(name, recipe, mask) for mask in ((first,) if name in CONTROLS else usual)]
    work += [(name, recipe, first) for name, recipe in CONTROLS.items() if controls and name not in names]
    rows = []
    for n, (name, recipe, mask) in enumerate(work):
        if progress:
            progress(n, len(work), f"{name}, {mask.name}")
        claims = set(recipe.claims) - (set() if mask.causal else {"prefix", "truncate"})
        # Whoever promises that a row depends on visible tokens alone promises it for NaN as well.
        claims |= {"nonfinite"} if "mask" in claims else set()
        rows.append(
            Row(
                name,
                mask,
                audit_callable(
                    callable_of(recipe, mask, backend),
                    causal=mask.causal,
                    window=mask.window,
                    heads=mask.heads,
                    head_dim=head_dim,
                    dtype=dtype,
                    claims=claims,
                    lengths=mask.lengths,
                    cuts=mask.cuts,
                    effort="spot" if effort == "brief" and mask is not first else effort,
                    seed=seed,
                    device=device,
                    name=f"{name}, {mask.name}",
                    explain=False,
                ),
            )
        )
    if progress:
        progress(len(work), len(work), "")
    return RecipeAudit(rows, _missed(rows))


def _missed(rows: list[Row]) -> list[str]:
    """Recipes that are known to leak and were not seen to."""
    out = []
    for row in rows:
        expected = CAUGHT_IN.get(row.recipe, ())
        if row.recipe in ("mxfp8/fast", "nvfp4_fp8/fast", "nvfp4/fast") and row.mask.causal and row.mask.window is None:
            expected = ("prefix",)
        out += [
            f"{row.recipe} under {row.mask.name}: no leak seen in {c}"
            for c in expected
            if row.report.statuses.get(c, "leak") != "leak"
        ]
    return out
