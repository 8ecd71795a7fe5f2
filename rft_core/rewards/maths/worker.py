"""The child that compares: `python -m rft_core.rewards.maths.worker`.

A job {"answer", "gold"} is a pair to compare with sympy. A job {"completion", "gold", "place", "is_cut"} is a row whose
answer is to be found and compared without.
"""

from __future__ import annotations

from collections.abc import Callable

from rft_core.rewards.workers import Job, serve


def prepare() -> Callable[[Job], Job]:
    from rft_core.rewards.maths.answers import NoAnswer
    from rft_core.rewards.maths.finding import Place, find_pair, read_gold
    from rft_core.rewards.maths.judge import Verdict, judge
    from rft_core.rewards.maths.symbolic import SymbolicOracle

    def work(job: Job) -> Job:
        if "completion" not in job:
            return _told(judge(job["answer"], job["gold"], SymbolicOracle()))
        gold = read_gold(job["gold"])
        if gold.problem is not None:
            return {"problem": gold.problem}
        pair = find_pair(job["completion"], gold, Place(*job["place"]), job["is_cut"])
        if isinstance(pair, NoAnswer):
            return {"no_answer": pair.reason}
        return {"pair": pair, **_told(judge(*pair))}

    def _told(verdict: Verdict) -> Job:
        return {"is_equal": verdict.is_equal, "stage": verdict.stage, "reason": verdict.reason}

    return work


if __name__ == "__main__":
    serve(prepare)
