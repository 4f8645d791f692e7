"""``flamia audit``: presets, a function, other people's attention, or a whole model.

The exit code is the verdict: 0 clean, 1 leak (or skew), 2 could not judge. What makes no sense is one line and exit code 2
as well, before any work.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flamia.cli_options import JsonFlag, Recipes, Seed, Threads, check_device, print_wide, set_threads
from flamia.console import Progress, emit, require

if TYPE_CHECKING:
    from flamia.audit.written import Written

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}
OPEN = -1


def audit(
    target: Annotated[
        str | None,
        typer.Argument(help="module:function to audit; without it, this library's own presets and its known leaks."),
    ] = None,
    recipe: Recipes = None,
    effort: Annotated[
        str | None,
        typer.Option(help="spot, brief, quick, normal or thorough; default: quick for a function, brief for presets."),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="--effort quick.")] = False,
    thorough: Annotated[bool, typer.Option("--thorough", help="--effort thorough.")] = False,
    layout: Annotated[str, typer.Option(help='"packed": fn(q, k, v, cu_seqlens); "batched": fn(q, k, v).')] = "packed",
    causal: Annotated[bool, typer.Option(help="What the function is meant to mask.")] = True,
    window: Annotated[
        tuple[int, int], typer.Option(metavar="LEFT RIGHT", help="Its window, both ends inclusive; -1 is open.")
    ] = (OPEN, OPEN),
    cross: Annotated[
        bool, typer.Option("--cross", help="Other numbers of queries than of keys: fn(q, k, v, cu_q, cu_k).")
    ] = False,
    heads: Annotated[int, typer.Option(min=1)] = 4,
    kv_heads: Annotated[int, typer.Option(min=1)] = 2,
    head_dim: Annotated[int, typer.Option(min=1, max=256)] = 32,
    dtype: Annotated[str, typer.Option(help=f"{', '.join(DTYPES)}.")] = "bf16",
    peer: Annotated[
        list[str] | None,
        typer.Option("--target", help='Other attentions with all their options: "sdpa", "all", m:f; may be repeated.'),
    ] = None,
    list_targets: Annotated[
        bool, typer.Option("--list-targets", help="What --target knows, and what is here.")
    ] = False,
    seconds: Annotated[
        float, typer.Option(min=0, help="Time for each --target, for a module:function or a --model.")
    ] = 600.0,
    model: Annotated[
        str | None, typer.Option(help="module:factory that builds a causal language model, tokens -> logits.")
    ] = None,
    claim: Annotated[
        list[str] | None,
        typer.Option(help="A contract that counts; may be repeated. Default: all but mask, nonfinite and mass."),
    ] = None,
    device: Annotated[str, typer.Option()] = "cpu",
    seed: Seed = 0,
    html: Annotated[Path | None, typer.Option(help="Also write a page with heat maps.")] = None,
    threads: Threads = 0,
    as_json: JsonFlag = False,
) -> None:
    """Can an attention, or a model, see the future or other documents? Exit code 0 clean, 1 leak, 2 could not judge."""
    from flamia.audit import audit_callable, audit_model, audit_recipes, peer_modules
    from flamia.audit.loading import load_function
    from flamia.audit.peer_report import listing, listing_table

    set_threads(threads)
    check_device(device)
    if sum(map(bool, (target, recipe, model, peer))) > 1:
        raise typer.BadParameter("give one of module:function, --recipe, --target, --model")
    if (effort is not None) + quick + thorough > 1:
        raise typer.BadParameter("give one of --effort, --quick, --thorough")
    chosen = effort or ("quick" if quick else "thorough" if thorough else None)
    described = (layout, causal, heads, kv_heads) != ("packed", True, 4, 2)
    shaped = cross or tuple(window) != (OPEN, OPEN) or dtype != "bf16"
    if not (target or peer or model) and (claim or described or shaped):
        raise typer.BadParameter("presets are held to their own claims: other options describe a module:function")
    if (peer or model) and shaped:
        raise typer.BadParameter(
            "--window, --cross and --dtype describe a module:function; a --target is swept over them"
        )
    if peer and claim:
        raise typer.BadParameter("--claim: a --target is held to the default contracts, and to mask under a window")
    if dtype not in DTYPES:
        raise typer.BadParameter(f"--dtype {dtype}: allowed are {', '.join(DTYPES)}")
    if html is not None:
        require("matplotlib"), require("jinja2")  # now, not after minutes of work
    if list_targets:
        known = peer_modules.peers()
        emit(listing(known)) if as_json else print_wide(listing_table(known))
        raise typer.Exit()
    report: Any
    if peer:
        with Progress() as progress:
            report = peer_modules.sweep(
                peer, load_function, layout=layout, causal=causal, effort=chosen or "brief", seconds=seconds, seed=seed,
                device=device, progress=progress.lane("audit").update,
            )  # fmt: skip
    elif model is not None:
        built = load_function(model)()
        with Progress() as progress:
            report = audit_model(
                built.to(device) if hasattr(built, "to") else built, claims=claim or None, effort=chosen or "quick",
                seed=seed, device=device, name=model, seconds=seconds, progress=progress.lane("audit").update,
            )  # fmt: skip
    elif target is not None:
        import torch

        with Progress() as progress:
            report = audit_callable(
                load_function(target), layout=layout, causal=causal, cross=cross,
                window=None if tuple(window) == (OPEN, OPEN) else window, heads=(heads, kv_heads), head_dim=head_dim,
                dtype=getattr(torch, DTYPES[dtype]), claims=claim or None, effort=chosen or "quick", seed=seed,
                device=device, name=target, seconds=seconds, progress=progress.lane("audit").update,
            )  # fmt: skip
    else:
        with Progress() as progress:
            report = audit_recipes(
                recipe or None, effort=chosen or "brief", head_dim=head_dim, seed=seed, device=device,
                progress=progress.lane("audit").update,
            )  # fmt: skip
    written(report, html, as_json)
    raise typer.Exit(report.exit_code)


def written(report: Written, html: Path | None, as_json: bool) -> None:
    """The page, if one is wanted, and the report on standard output."""
    if html is not None:
        html.parent.mkdir(parents=True, exist_ok=True)
        report.to_html(html)
        print(f"page: {html}", file=sys.stderr)
    if as_json:
        print(report.to_json())
    else:
        print_wide(report)
