r"""1.0 if a completion's answer is the same mathematics as the gold answer, else 0.0 with a reason. See maths/.

Most pairs are decided exactly and within bounds, without sympy. What needs it goes to killable workers with a limit of
clock time and memory; a pair that meets it is 0.0 with "timeout: ...". Equal pairs are judged once per call, and
remembered but for timeouts.
"""

from __future__ import annotations

import importlib.metadata
from collections import OrderedDict
from pathlib import Path
from typing import Any

from rft_core.hardware import num_cores
from rft_core.rewards.maths.answers import NoAnswer
from rft_core.rewards.maths.finding import Pair, Place, find_pair, read_gold
from rft_core.rewards.maths.judge import Verdict, judge
from rft_core.rewards.rows import RewardRow, Scored, Scorer, shortened
from rft_core.rewards.settings import RewardFunction
from rft_core.rewards.workers import Died, Reply, TimedOut, WorkerPool

SEMANTICS = 1
MAX_REMEMBERED = 100_000
BULK_ROWS = 1000  # so many go to the workers with all that is easy, for they share the cores
NO_GOLD = "the prompt has no answer"
TIMEOUT = "timeout"  # begins the reason of a pair that met the limit


class MathScorer:
    """Judges blocks of rows; keeps its workers and what it has judged between them."""

    def __init__(self, settings: RewardFunction) -> None:
        maths = settings.math
        self.pool = WorkerPool(
            "rft_core.rewards.maths.worker", maths.workers or num_cores(), maths.seconds, maths.memory_mib << 20
        )
        self.judged: OrderedDict[Pair, Verdict] = OrderedDict()
        self._place = Place(settings.answer_in, maths.lenient)

    def score(self, rows: list[RewardRow]) -> list[Scored]:
        """Raises GraderUnavailable when a worker can't start."""
        found = self._find_together(rows) if len(rows) >= BULK_ROWS else [self._find_here(row) for row in rows]
        pairs = dict.fromkeys(pair for pair in found if isinstance(pair, tuple))
        scores = {pair: _scored(self.judged[pair]) for pair in pairs if pair in self.judged}
        hard = [pair for pair in pairs if pair not in scores or self.judged[pair].is_equal is None]
        if hard:
            replies = self.pool.run([{"answer": answer, "gold": gold} for answer, gold in hard])
            scores |= {pair: self._settle(pair, reply) for pair, reply in zip(hard, replies, strict=True)}
        while len(self.judged) > MAX_REMEMBERED:
            self.judged.popitem(last=False)
        return [scores[pair] if isinstance(pair, tuple) else pair for pair in found]

    def _find_here(self, row: RewardRow) -> Pair | Scored:
        """The pair, judged as far as it goes without sympy; or the score of a row that has none."""
        if (reason := unreadable(row.answer, {})) is not None:
            return Scored(None, reason)
        pair = find_pair(row.completion_text, read_gold(row.answer or ""), self._place, row.finish_reason == "length")
        if isinstance(pair, NoAnswer):
            return Scored(0.0, shortened(pair.reason, 120))
        if pair in self.judged:
            self.judged.move_to_end(pair)
        else:
            self.judged[pair] = judge(*pair)
        return pair

    def _find_together(self, rows: list[RewardRow]) -> list[Pair | Scored]:
        """The same in the workers."""
        keys = [(row.completion_text, row.answer, row.finish_reason == "length") for row in rows]
        place = [self._place.answer_in, self._place.is_lenient]
        jobs = {
            key: {"completion": key[0], "gold": key[1], "is_cut": key[2], "place": place}
            for key in keys
            if key[1] is not None
        }
        replies = dict(zip(jobs, self.pool.run(list(jobs.values())), strict=True))
        return [self._told(replies[key]) if key in replies else Scored(None, NO_GOLD) for key in keys]

    def _told(self, reply: Reply) -> Pair | Scored:
        if isinstance(reply, TimedOut | Died):
            return _failed(reply)
        if "problem" in reply:
            return Scored(None, f"answer: {reply['problem']}")
        if "no_answer" in reply:
            return Scored(0.0, shortened(reply["no_answer"], 120))
        answer, gold = reply["pair"]
        pair = (answer, gold)
        if pair not in self.judged:
            self.judged[pair] = Verdict(reply["is_equal"], reply["stage"], reply["reason"])
        return pair

    def _settle(self, pair: Pair, reply: Reply) -> Scored:
        if isinstance(reply, TimedOut | Died):
            self.judged.pop(pair, None)
            return _failed(reply)
        reason = reply["reason"]
        if reply["is_equal"] is None:
            reason = reason or "undecided: sympy cannot tell"
        self.judged[pair] = verdict = Verdict(bool(reply["is_equal"]), reply["stage"], reason)
        return _scored(verdict)


def unreadable(answer: str | None, metadata: dict[str, Any]) -> str | None:
    if answer is None:
        return NO_GOLD
    problem = read_gold(answer).problem
    return None if problem is None else f"answer: {problem}"


def build(settings: RewardFunction, folder: Path | None) -> Scorer:
    identity = {"semantics": SEMANTICS, "sympy": importlib.metadata.version("sympy")}
    scorer = MathScorer(settings)
    return Scorer(scorer.score, identity, unreadable, close=scorer.pool.interrupt)


def _failed(reply: TimedOut | Died) -> Scored:
    if isinstance(reply, TimedOut):
        return Scored(0.0, f"{TIMEOUT}: the comparison did not end within {reply.seconds:g} s")
    return Scored(None, f"the comparison's process died with status {reply.status}")


def _scored(verdict: Verdict) -> Scored:
    return Scored(float(bool(verdict.is_equal)), shortened(verdict.reason, 200) if verdict.reason else None)
