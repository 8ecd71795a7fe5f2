"""`rft rescore` and `rft score`: graders at work on what was generated before."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from flows.cli_options import Json, Root, Sets, Verbose, console, only_ours_on_stdout, print_json, quiet
from flows.root import artifact_root


def rescore(
    run: str,
    sets: Sets = None,
    step: Annotated[int | None, typer.Option("--step", help="One step only.")] = None,
    phase: Annotated[str | None, typer.Option("--phase", help="A phase of the run; the newest without it.")] = None,
    root: Root = None,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Score a run's stored rollouts with other rewards; shows what flips."""
    from flows.rescore import print_rescore
    from flows.rescore import rescore as score_again

    quiet(verbose)
    with only_ours_on_stdout():
        result = score_again(artifact_root(root), run, sets or [], step, None if as_json else _say, phase)
    print_json(result) if as_json else print_rescore(result, console())


def score(
    file: Annotated[str, typer.Argument(help="Rows {completion|prediction, answer|gold, ...}, in any format of data.")],
    reward: Annotated[str, typer.Option("--reward", help="A reward function, or a user's as FILE.py:function.")],
    sets: Annotated[
        list[str] | None, typer.Option("--set", help="key=value of the function, e.g. tolerance=0.01.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="The rows with reward, status, reason: JSONL.")] = None,
    root: Root = None,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Score a file of completions, without a run."""
    from flows.outputs import refuse_output
    from flows.score import build_scorer, print_score, score_file

    quiet(verbose)
    refuse_output("--out", out, file, (".jsonl",))
    with only_ours_on_stdout():
        result = score_file(build_scorer(artifact_root(root), reward, sets or []), file, out)
    print_json(result) if as_json else print_score(result, reward, console())


def _say(done: int, total: int, note: str) -> None:
    if sys.stderr.isatty():
        print(f"\r{note}: {done} of {total}", end="" if done < total else "\n", file=sys.stderr)
