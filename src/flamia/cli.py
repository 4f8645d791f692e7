"""The command line: ``flamia info | audit | train | evaluate | accuracy | demo | bench``.

Every command but ``bench``, which writes files, takes ``--json``; then standard output holds one JSON document and
nothing else, while progress and complaints go to standard error. What flamia itself refuses is one line without a
traceback and exit code 2; a bug keeps its traceback. ``flamia audit`` answers with its exit code: 0 clean, 1 leak,
2 could not judge.
"""

from __future__ import annotations

import io
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

from flamia import __version__
from flamia.cli_audit import audit
from flamia.cli_options import Data, Device, JsonFlag, Recipes, Seed, Threads, check_device, print_wide, set_threads
from flamia.console import Lane, MissingExtra, Progress, emit, require
from flamia.recipe import CONTROLS, Recipe

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def recipe_text(text: str) -> str:
    """The canonical string of a recipe, or of the control of that name."""
    return str(CONTROLS[text] if text in CONTROLS else Recipe.parse(text))


def trained_text(text: str) -> str:
    """What a model can be trained with: a recipe, a control, or "torch" for torch's own attention."""
    from flamia.train.evaluate import TORCH

    return TORCH if text == TORCH else recipe_text(text)


def print_version(asked: bool) -> None:
    if asked:
        print(f"flamia {__version__}")
        raise typer.Exit()


@app.callback()
def top(
    version: Annotated[
        bool, typer.Option("--version", callback=print_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """8- and 4-bit attention that trains and cannot see the future."""


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
    """Train a byte model with one or several recipes on the same batches, and judge each through exact attention.

    Under torchrun the ranks share each batch and split the weights (FSDP2): torchrun --nproc-per-node 2 -m flamia train.
    """
    from flamia import train as room
    from flamia.train import checkpoint, plots
    from flamia.train.ranks import started

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
    runs = []
    with started(device) as (ranks, own_device):
        if ranks.first:
            print(corpus, file=sys.stderr)
        if ranks.first and ranks.count > 1:
            print(f"{ranks.count} ranks share each batch; should one be lost, go on with --resume", file=sys.stderr)
        for config, folder in zip(configs, folders, strict=True):
            with Progress(stream=None if ranks.first else io.StringIO()) as progress:
                lane = progress.lane(config.recipe)

                def show(record: dict[str, Any], lane: Lane = lane, total: int = config.steps) -> None:
                    lane.update(record["step"], total, f"loss {record['loss']:.3f}")

                runs.append(
                    room.train(config, corpus, folder, device=own_device, resume=resume, on_step=show, ranks=ranks)
                )
    if not ranks.first:
        return
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


app.command()(audit)


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
