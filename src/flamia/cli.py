"""The command line: ``flamia info | audit | train | evaluate | accuracy | demo | bench``.

Every command but ``bench``, which writes files, takes ``--json``; then standard output holds one JSON document and
nothing else, while progress and complaints go to standard error. What flamia itself refuses is one line without a
traceback and exit code 2; a bug keeps its traceback. ``flamia audit`` answers with its exit code: 0 clean, 1 leak,
2 could not judge.
"""

from __future__ import annotations

import sys
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

try:
    import typer
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table
except ModuleNotFoundError as error:
    raise SystemExit(f"flamia: the command line needs {error.name}: pip install 'flamia[cli]'") from None

from flamia.console import Lane, MissingExtra, Progress, emit, require
from flamia.recipe import CONTROLS, Recipe

app = typer.Typer(
    help="8- and 4-bit attention that trains and cannot see the future.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]
Recipes = Annotated[
    list[str] | None,
    typer.Option("--recipe", "-r", help='A recipe such as "mxfp8/strict", or the name of a control; may be repeated.'),
]
Data = Annotated[
    Path | None,
    typer.Option(help="A text file or a folder of them; by default Python's own standard library."),
]
Device = Annotated[str | None, typer.Option(help='"cpu" or "cuda"; by default the GPU if there is one.')]
Threads = Annotated[int, typer.Option(min=0, help="CPU threads; 0 leaves torch's choice.")]
Seed = Annotated[int, typer.Option(help="Seed of inputs, weights and data order.")]


def recipe_text(text: str) -> str:
    """The canonical string of a recipe, or of the control of that name."""
    return str(CONTROLS[text] if text in CONTROLS else Recipe.parse(text))


def trained_text(text: str) -> str:
    """What a model can be trained with: a recipe, a control, or "torch" for torch's own attention."""
    from flamia.train.evaluate import TORCH

    return TORCH if text == TORCH else recipe_text(text)


def set_threads(threads: int) -> None:
    if threads:
        import torch

        torch.set_num_threads(threads)


def check_device(device: str | None) -> None:
    """Refuse a device that is not here, before any work and without a traceback."""
    import torch

    if device is None:
        return
    try:
        kind = torch.device(device).type
    except RuntimeError:
        raise ValueError(f"device = {device!r}: write cpu, cuda or cuda:0") from None
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device = {device!r}: torch finds no CUDA device here")


@app.command()
def info(as_json: JsonFlag = False) -> None:
    """Versions, devices, and which recipe runs on which backend here, or why not."""
    from flamia.info import collect

    facts = collect()
    if as_json:
        emit(facts)
        return
    console = Console()
    for name, version in facts["versions"].items():
        console.print(f"[bold]{name:>8}[/]  {version or 'not installed'}", highlight=False)
    for device in facts["devices"]:
        details = ", ".join(f"{key} {value}" for key, value in device.items() if key not in ("device", "name"))
        console.print(f"[bold]{device['device']:>8}[/]  {escape(device['name'])} ({details})", highlight=False)
    grid = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    grid.add_column("recipe", no_wrap=True)
    for backend in facts["recipes"][0]["backends"]:
        grid.add_column(backend)
    grid.add_column("promises")
    for row in facts["recipes"]:
        grid.add_row(row["recipe"], *map(escape, row["backends"].values()), " ".join(row["claims"]))
    console.print()
    console.print(grid)


@app.command()
def train(
    recipe: Annotated[
        list[str] | None,
        typer.Option("--recipe", "-r", help='A recipe, a control, or "torch" for a 16-bit baseline; may be repeated.'),
    ] = None,
    preset: Annotated[str, typer.Option(help='"tiny" (CPU) or "study" (GPU, the leak study).')] = "tiny",
    data: Data = None,
    out: Annotated[Path, typer.Option(help="Folder for logs, checkpoints and the picture.")] = Path("out/train"),
    steps: Annotated[int | None, typer.Option(min=1, help="Default of this and what follows: the preset's.")] = None,
    tokens: Annotated[int | None, typer.Option(min=2, help="Bytes per batch.")] = None,
    context: Annotated[int | None, typer.Option(min=2, help="Longest document.")] = None,
    learning_rate: Annotated[float | None, typer.Option()] = None,
    warmup: Annotated[int | None, typer.Option(min=0)] = None,
    decay: Annotated[str | None, typer.Option(help='"cosine" or "linear".')] = None,
    seed: Seed = 0,
    evaluate_every: Annotated[int | None, typer.Option(min=0)] = None,
    save_every: Annotated[int | None, typer.Option(min=0, help="0 saves the last step only.")] = None,
    resume: Annotated[
        bool, typer.Option(help="Continue from the newest checkpoints in --out, with the same options.")
    ] = False,
    backend: Annotated[str, typer.Option(help='"auto", "reference" or "hopper".')] = "auto",
    device: Device = None,
    threads: Threads = 0,
    as_json: JsonFlag = False,
) -> None:
    """Train a byte model with one or several recipes on the same batches, and judge each through exact attention."""
    from flamia import train as room
    from flamia.train import checkpoint, plots

    set_threads(threads)
    check_device(device)
    changes = {
        "steps": steps, "tokens": tokens, "context": context, "learning_rate": learning_rate, "warmup": warmup,
        "decay": decay, "seed": seed, "evaluate_every": evaluate_every, "save_every": save_every, "backend": backend,
    }  # fmt: skip
    texts = [trained_text(text) for text in recipe or [str(Recipe.strict())]]
    configs = [room.preset(preset, recipe=text, **changes) for text in texts]
    folders = [out / folder_name(config.recipe) for config in configs]
    for folder in folders:
        if not resume and (newest := checkpoint.latest(folder)):
            raise ValueError(f"{newest} is of an earlier run: continue it with --resume, or give another --out")
    corpus = room.load_corpus(data)
    print(corpus, file=sys.stderr)
    runs = []
    for config, folder in zip(configs, folders, strict=True):
        with Progress() as progress:
            lane = progress.lane(config.recipe)

            def show(record: dict[str, Any], lane: Lane = lane, total: int = config.steps) -> None:
                lane.update(record["step"], total, f"loss {record['loss']:.3f}")

            runs.append(room.train(config, corpus, folder, device=device, resume=resume, on_step=show))
    plots.save(plots.loss_curves(runs), out / "losses.png")
    summaries = [run.summary() for run in runs]
    if as_json:
        emit(summaries)
        return
    for run in runs:
        ending = f"diverged at step {run.diverged_at}" if run.diverged_at else str(run.gap)
        print(f"{run.config.recipe}: {run.parameters:,} parameters, {run.seconds:.1f} s; {ending}")
    print(f"curves: {out / 'losses.png'}")


def folder_name(recipe: str) -> str:
    return recipe.replace("/", "-").replace(",", "_").replace(":", "-")


@app.command()
def evaluate(
    checkpoint: Annotated[Path, typer.Argument(help="A step-*.pt file.")],
    recipe: Annotated[str | None, typer.Option("--recipe", "-r", help="Default: the one it was trained with.")] = None,
    data: Data = None,
    batches: Annotated[int, typer.Option(min=2)] = 16,
    backend: Annotated[str, typer.Option(help='"auto", "reference" or "hopper".')] = "auto",
    device: Device = None,
    threads: Threads = 0,
    as_json: JsonFlag = False,
) -> None:
    """Validate a checkpoint through its own attention and through exact attention, and print the gap."""
    from flamia.train import load_corpus
    from flamia.train.evaluate import judge_checkpoint

    set_threads(threads)
    check_device(device)
    text = trained_text(recipe) if recipe else None
    own, found = judge_checkpoint(
        checkpoint, load_corpus(data), recipe=text, batches=batches, backend=backend, device=device
    )
    if as_json:
        emit({"checkpoint": str(checkpoint), "recipe": own, "gap": asdict(found)})
    else:
        print(f"{own}: {found}")


@app.command()
def accuracy(
    recipe: Recipes = None,
    inputs: Annotated[list[str] | None, typer.Option(help="gaussian, peaked, sink, outlier_channels.")] = None,
    tokens: Annotated[int, typer.Option(min=2)] = 1024,
    heads: Annotated[int, typer.Option(min=1)] = 2,
    kv_heads: Annotated[int, typer.Option(min=1)] = 1,
    head_dim: Annotated[int, typer.Option(min=1, max=256)] = 128,
    seed: Seed = 0,
    threads: Threads = 0,
    as_json: JsonFlag = False,
) -> None:
    """Errors against float64 attention, row residuals, and what rounding zeroes or clips, for each recipe."""
    from flamia.accuracy import INPUTS, RECIPES, measure_all, table

    set_threads(threads)
    recipes = [recipe_text(text) for text in recipe or RECIPES]
    kinds = inputs or list(INPUTS)
    results = []
    with Progress() as progress:
        lane = progress.lane("accuracy")
        sizes = {"tokens": tokens, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "seed": seed}
        for result in measure_all(recipes, kinds, **sizes):
            results.append(result)
            lane.update(len(results), len(recipes) * len(kinds), f"{result.inputs} {result.recipe}")
    if as_json:
        emit([result.to_dict() for result in results])
    else:
        print_wide(table(results))


@app.command()
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
    layout: Annotated[str, typer.Option(help='"packed": fn(q, k, v, cu_seqlens); "batched": fn(q, k, v).')] = "packed",
    causal: Annotated[bool, typer.Option(help="What the function is meant to mask.")] = True,
    heads: Annotated[int, typer.Option(min=1)] = 4,
    kv_heads: Annotated[int, typer.Option(min=1)] = 2,
    head_dim: Annotated[int, typer.Option(min=1, max=256)] = 32,
    peer: Annotated[
        list[str] | None,
        typer.Option("--target", help='Other attentions with all their options: "sdpa", "all", m:f; may be repeated.'),
    ] = None,
    list_targets: Annotated[
        bool, typer.Option("--list-targets", help="What --target knows, and what is here.")
    ] = False,
    seconds: Annotated[float, typer.Option(min=0, help="Time for each --target.")] = 600.0,
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
    from flamia.audit import ModelReport, RecipeAudit, Report, audit_callable, audit_model, audit_recipes, peer_modules
    from flamia.audit.loading import load_function
    from flamia.audit.peer_report import PeerAudit, listing, listing_table

    set_threads(threads)
    check_device(device)
    if sum(map(bool, (target, recipe, model, peer))) > 1 or (model and html):
        raise typer.BadParameter("give one of module:function, --recipe, --target, --model (which has no --html)")
    if not (target or peer or model) and (claim or (layout, causal, heads, kv_heads) != ("packed", True, 4, 2)):
        raise typer.BadParameter("presets are held to their own claims: other options describe a module:function")
    if peer and claim:
        raise typer.BadParameter("--claim: a --target is held to the default contracts, and to mask under a window")
    report: Report | RecipeAudit | ModelReport | PeerAudit
    if list_targets:
        known = peer_modules.peers()
        emit(listing(known)) if as_json else print_wide(listing_table(known))
        raise typer.Exit()
    if peer:
        with Progress() as progress:
            report = peer_modules.sweep(
                peer, load_function, layout=layout, causal=causal, effort=effort or "brief", seconds=seconds, seed=seed,
                device=device, progress=progress.lane("audit").update,
            )  # fmt: skip
    elif model is not None:
        built = load_function(model)()
        report = audit_model(
            built.to(device) if hasattr(built, "to") else built, claims=claim or None, effort=effort or "quick",
            seed=seed, device=device, name=model,
        )  # fmt: skip
    elif target is not None:
        report = audit_callable(
            load_function(target), layout=layout, causal=causal, heads=(heads, kv_heads), head_dim=head_dim,
            claims=claim or None, effort=effort or "quick", seed=seed, device=device, name=target,
            progress=sys.stderr.isatty() and not as_json,
        )  # fmt: skip
    else:
        with Progress() as progress:
            report = audit_recipes(
                recipe or None, effort=effort or "brief", head_dim=head_dim, seed=seed, device=device,
                progress=progress.lane("audit").update,
            )  # fmt: skip
    if html is not None and not isinstance(report, ModelReport):
        html.parent.mkdir(parents=True, exist_ok=True)
        report.to_html(html)
        print(f"page: {html}", file=sys.stderr)
    if as_json:
        print(report.to_json())
    else:
        print_wide(report)
    raise typer.Exit(report.exit_code)


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for report.html, checkpoints and logs.")] = Path("out"),
    data: Data = None,
    quick: Annotated[bool, typer.Option("--quick", help="Little of everything: does it run here at all?")] = False,
    processes: Annotated[int, typer.Option(min=0, help="0: one for each core.")] = 0,
    as_json: JsonFlag = False,
) -> None:
    """Audit all presets, train a small model with three recipes, measure accuracy, and write one page about it.

    The exit code is the audit's: 0 clean, 1 leak, 2 could not judge.
    """
    from flamia import demo as room

    for needed in ("jinja2", "matplotlib"):
        require(needed)  # now, not after three minutes of work
    found = room.run(out, data=data, size=room.QUICK if quick else room.FULL, processes=processes or None)
    page = out / "report.html"
    page.write_text(room.render(found), encoding="utf-8")
    if as_json:
        emit(found.summary() | {"report": str(page)})
    else:
        print_wide(found.audit)
        for run in found.runs:
            print(f"{run.config.recipe}: {run.gap or f'diverged at step {run.diverged_at}'}")
        for name, text in found.text:
            print(f"{name} on real text: {text.moved} of {text.watched} earlier predictions moved")
        print(f"{found.seconds['total']:.0f} s; report: {page}")
    raise typer.Exit(found.exit_code)


@app.command(context_settings={"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []})
def bench(context: typer.Context) -> None:
    """Time attention beside others on this GPU, or draw an earlier report (--plot); bench --help has the options."""
    from flamia.bench.run import main as run

    run(context.args)


def print_wide(value: Any) -> None:
    """Print a rich value; into a pipe wide enough for any table, since one cut to 80 columns is unreadable."""
    Console(width=None if sys.stdout.isatty() else 200).print(value)


def refused(error: BaseException) -> bool:
    """Whether flamia itself said no: the innermost frame is in this package. Anything else is a bug."""
    if isinstance(error, MissingExtra):
        return True
    frames = traceback.extract_tb(error.__traceback__)
    package = str(Path(__file__).resolve().parent)
    return (
        isinstance(error, ValueError) and bool(frames) and str(Path(frames[-1].filename).resolve()).startswith(package)
    )


def main() -> None:
    """Run the command line; refusals are one line on standard error and exit code 2."""
    try:
        app()
    except (ValueError, MissingExtra) as error:
        if not refused(error):
            raise
        print(f"flamia: {' '.join(str(error).split())}", file=sys.stderr)
        raise SystemExit(2) from None
    except (KeyboardInterrupt, SystemExit) as leaving:
        if isinstance(leaving, SystemExit) and leaving.code != 130:  # 130: typer has met the interrupt already
            raise
        print("flamia: interrupted; training continues with --resume", file=sys.stderr)
        raise SystemExit(130) from None
