"""python -m tests.learning [CASE ...]: does each algorithm learn, and its control not? `make learning` runs all cases.

Prints a line per run and a verdict per case, and keeps them in learning.json of the root; exits 1 where one fails.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

from flows.server import prefect_server
from tests.faults.harness import Runs
from tests.learning.cases import CASES, SEEDS
from tests.learning.measure import Verdict, run_case
from tests.learning.task import write_task

COLUMNS = "{:<30} {:>8} {:>9} {:>9} {:>9} {:>7}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.learning", description=__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"all, or some of {', '.join(CASES)}")
    parser.add_argument("--root", type=Path, help="keep the runs here, and go on where it has some; else a new folder")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--no-control", action="store_true", help="leave out the controls")
    chosen = parser.parse_args()
    unknown = sorted(set(chosen.cases) - CASES.keys())
    if unknown:
        parser.error(f"no case {', '.join(unknown)}; there are {', '.join(CASES)}")
    verdicts = measure(
        chosen.cases or list(CASES),
        tuple(chosen.seeds),
        (chosen.root or Path(tempfile.mkdtemp(prefix="rft-learning-"))).resolve(),
        with_control=not chosen.no_control,
    )
    return int(any(verdict.faults for verdict in verdicts))


def measure(names: list[str], seeds: tuple[int, ...], root: Path, with_control: bool) -> list[Verdict]:
    task = root / "task"
    if not task.is_dir():
        write_task(task)
    verdicts = []
    with prefect_server(root) as url:
        runs = Runs({"PREFECT_API_URL": url, "PREFECT_HOME": os.environ["PREFECT_HOME"]}, root / "runs.log")
        try:
            print(COLUMNS.format("case", "seed", "before", "after", "gain", "error"), flush=True)
            for name in names:
                began = time.monotonic()
                verdicts.append(run_case(runs, CASES[name], seeds, task, root, with_control))
                print_verdict(verdicts[-1], time.monotonic() - began)
                written = [verdict.to_json() for verdict in verdicts]
                (root / "learning.json").write_text(json.dumps(written, indent=1) + "\n")
        finally:
            runs.close()
    print(f"{root / 'learning.json'}: {sum(not v.faults for v in verdicts)} of {len(verdicts)} cases hold")
    return verdicts


def print_verdict(verdict: Verdict, seconds: float) -> None:
    case = verdict.case
    for label, outcomes in ((case.name, verdict.outcomes), (f"{case.name} control", verdict.control)):
        for o in outcomes:
            numbers = (f"{value:.4g}" for value in (o.before, o.after, o.gain(case), o.error))
            print(COLUMNS.format(label, o.seed, *numbers))
    control = verdict.control_gain
    against = "" if control is None else f", control {control.mean:+.4g} +- {control.error:.2g}"
    told = f"{case.metric} gains {verdict.gain.mean:+.4g} +- {verdict.gain.error:.2g} (margin {case.margin:g}){against}"
    ending = "; ".join(verdict.faults) if verdict.faults else "holds"
    print(f"  {case.name}: {told}: {ending} ({seconds:.0f} s)", flush=True)


if __name__ == "__main__":
    sys.exit(main())
