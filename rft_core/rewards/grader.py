"""The reward stage: rollouts -> rewards, one row per rollout, nothing silently zero."""

from __future__ import annotations

import functools
import json
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from data_contracts.refs import digest_of
from data_contracts.schemas import RECORDS, canonical_json
from rft_core.errors import GraderUnavailable
from rft_core.model_folder import model_digest
from rft_core.rewards import (
    answer_format,
    choice,
    code,
    custom,
    exact_match,
    judge,
    language,
    lengths,
    math_equivalence,
    numeric_answer,
    process_reward_model,
    reasoning_gym,
    repetition,
    reward_model,
    self_verification,
)
from rft_core.rewards.columns import SCORED, components_column, statuses_column
from rft_core.rewards.combine import combine, gate_is_open
from rft_core.rewards.conditions import check_condition, matching
from rft_core.rewards.rows import (
    RewardRow,
    Scored,
    Scorer,
    last_segments,
    never_unreadable,
    reward_rows,
    shortened,
)
from rft_core.rewards.settings import GATED, RewardFunction, RewardSettings
from rft_core.rewards.steps import UserSplitter, build_splitter, step_columns
from rft_core.rewards.user_process import UserCode

SEMANTICS = 2  # of how components become a reward
TIMEOUT = "timeout"  # begins the reason of a score that stands for work which met its time limit
ROLLOUT_ERROR = "rollout_error"  # begins the reason of a rollout that failed; no component may be called so


@dataclass(frozen=True)
class UnreadableAnswer:
    """A prompt whose answer or metadata a reward function can't use; each of its rollouts would be unscored."""

    prompt_id: str
    component: str
    reason: str


class Grader:
    """The functions of a recipe, ready to score."""

    def __init__(self, settings: RewardSettings, scorers: list[Scorer], folder: Path | None, code: UserCode) -> None:
        self.settings = settings
        self._parts = list(zip(settings.functions, scorers, strict=True))
        self._code = code
        self._lock = threading.Lock()
        self._split, self._splitting = build_splitter(settings.steps, folder, code) if self.has_steps else (None, None)

    @cached_property
    def digest(self) -> str:
        """Identity of all that decides scores. Reads the folders of models."""
        content = self.settings.content()
        if not self.has_steps:
            del content["steps"]
        return digest_of(
            {
                "semantics": SEMANTICS,
                "settings": content,
                "functions": [_identity(scorer) for _, scorer in self._parts],
                **({"steps": self._splitting} if self.has_steps else {}),
            }
        )

    @property
    def has_steps(self) -> bool:
        """Whether completions are divided into steps; to say where they end in tokens, `score` needs a tokenizer."""
        return self.settings.steps.split != "none"

    def score(
        self,
        rollouts: pa.Table,
        prompts: pa.Table,
        progress: Callable[[int, int, str], None] | None = None,
        tokenizer: Any = None,
    ) -> pa.Table:
        """Record rewards: one row per rollout_id, in the order of `rollouts`.

        A rollout that failed is unscored and no function sees it. The reward is the sum of weight x score over the
        functions that scored the row (`missing` sum_present), or null as soon as one did not (`missing` unscored); see
        combine.py for gates and functions that do not apply. component_status is "scored", "scored: NOTE", or the
        reason why there is no score. Metrics that a function gave for some rows only are absent, hence null, in others.

        One call at a time: a second thread waits.

        Raises RewardFunctionError, GraderUnavailable (a verifier can't start), ContractError. Whether too many rows are
        unscored is `refuse_unscored`'s to say, of all blocks of a step.
        """
        chosen = last_segments(rollouts)
        failed = [
            f"{ROLLOUT_ERROR}: {reason or 'no reason given'}" if status == "error" else None
            for status, reason in zip(
                chosen.column("status").to_pylist(), chosen.column("error_reason").to_pylist(), strict=True
            )
        ]
        sound = chosen.filter(pa.array([reason is None for reason in failed], pa.bool_()))
        with self._lock:
            by_function = self._score_all(sound, prompts, progress)
        table = self._table(chosen, failed, by_function, tokenizer)
        assert table.num_rows == pc.count_distinct(rollouts.column("rollout_id")).as_py(), "a rollout was lost"
        return table

    def refuse_unscored(self, reasons: Counter[str], judged: int) -> None:
        """Raise GraderUnavailable when over max_unscored_fraction of the `judged` rollouts have one of `reasons`."""
        count = reasons.total()
        if not judged or not self._parts or count / judged <= self.settings.max_unscored_fraction:
            return
        shown = "; ".join(f"{times} x {shortened(reason)}" for reason, times in reasons.most_common(5))
        rest = len(reasons) - 5
        raise GraderUnavailable(
            f"at most {self.settings.max_unscored_fraction:.0%} of rollouts may be unscored "
            f"(reward.max_unscored_fraction), {count} of {judged} are: {shown}"
            + (f"; and {rest} other reasons" if rest > 0 else "")
        )

    @property
    def works_apart(self) -> bool:
        """Whether most of the work is done in other processes or over the network, and none by a model in this one.
        Not where completions are divided into steps: that needs the tokenizer, which no two threads may use at once."""
        functions = [function for function, _ in self._parts]
        return (
            not self.has_steps
            and any(function.name in APART for function in functions)
            and all(function.scoring_model is None for function in functions)
        )

    def close(self) -> None:
        """End the processes that functions have running, also while another thread scores. It is not asked again."""
        self._code.close()
        for _, scorer in self._parts:
            if scorer.close is not None:
                scorer.close()

    def probe(self, prompts: pa.Table) -> None:
        """Call every function on two rows made from real prompts, before anything expensive: one whose completion is
        the answer, one whose completion is empty. Raises what `score` would; the scores are thrown away. Before that,
        each function that can checks what it works with."""
        for _, scorer in self._parts:
            if scorer.check is not None:
                scorer.check()
        if not prompts.num_rows:
            return
        chosen = prompts.slice(0, 2)
        rows = []
        for index, prompt in enumerate(chosen.select(["prompt_id", "messages", "answer"]).to_pylist()):
            rows.append((prompt["prompt_id"], prompt["messages"], prompt["answer"] if index == 0 else ""))
        if len(rows) == 1:
            rows.append((*rows[0][:2], ""))
        table = pa.table(
            {
                "rollout_id": [f"probe/{prompt_id}/{index:02d}" for index, (prompt_id, _, _) in enumerate(rows)],
                "prompt_id": [prompt_id for prompt_id, _, _ in rows],
                "group_id": [prompt_id for prompt_id, _, _ in rows],
                "messages": [_with_completion(messages, text or "") for _, messages, text in rows],
                "completion_text": [text or "" for _, _, text in rows],
                "finish_reason": ["stop"] * len(rows),
            }
        )
        self._score_all(table, chosen, None, is_probe=True)

    def unreadable_answers(self, prompts: pa.Table) -> list[UnreadableAnswer]:
        """Prompts that some function can't judge whatever the completion, for data validation. Calls no user code."""
        asked = [(function, scorer) for function, scorer in self._parts if scorer.unreadable is not never_unreadable]
        columns = [prompts.column(name).to_pylist() for name in ("prompt_id", "answer", "metadata")]
        found = []
        for function, scorer in asked:
            applies = [True] * prompts.num_rows
            if function.when is not None:
                applies = matching(function.when, prompts, f"when of {function.component}").tolist()
            for prompt_id, answer, metadata, is_asked in zip(*columns, applies, strict=True):
                reason = scorer.unreadable(answer, json.loads(metadata)) if is_asked else None
                if reason is not None:
                    found.append(UnreadableAnswer(prompt_id, function.component, reason))
        return found

    @property
    def has_conditions(self) -> bool:
        return any(function.when is not None for function, _ in self._parts)

    def unknown_fields(self, prompts: pa.Table) -> set[tuple[str, str]]:
        """(component, field) of conditions that name a field which none of the prompts has: most likely misspelled."""
        found: set[tuple[str, str]] = set()
        for function, _ in self._parts:
            if function.when is not None:
                unknown: set[str] = set()
                matching(function.when, prompts, f"when of {function.component}", unknown)
                found |= {(function.component, name) for name in unknown}
        return found

    @property
    def answers_digest(self) -> str | None:
        """Identity of all that decides which answers can be read; null when every answer can."""
        rules = [
            {"settings": function.content(), "function": scorer.identity} for function, scorer in self._asked_of_all()
        ]
        return digest_of(rules) if rules else None

    @property
    def answer_readers(self) -> list[tuple[str, Callable[[str | None, dict[str, Any]], str | None]]]:
        """(component, why it can't judge an answer and metadata, or null) of the functions that can't judge all.

        Those with a condition are not among them: `unreadable_answers` asks them of the prompts where they apply.
        """
        return [(function.component, scorer.unreadable) for function, scorer in self._asked_of_all()]

    def _asked_of_all(self) -> list[tuple[RewardFunction, Scorer]]:
        return [
            (function, scorer)
            for function, scorer in self._parts
            if scorer.unreadable is not never_unreadable and function.when is None
        ]

    def _score_all(
        self,
        sound: pa.Table,
        prompts: pa.Table,
        progress: Callable[[int, int, str], None] | None,
        is_probe: bool = False,
    ) -> list[list[Scored]]:
        if isinstance(self._split, UserSplitter) and sound.num_rows:
            self._split.prepare(sound.column("completion_text").to_pylist())
        shared: list[RewardRow] | None = None
        by_function: list[list[Scored]] = []
        for index, (function, scorer) in enumerate(self._parts):
            if scorer.is_custom:  # a user's function may change its rows; no other function sees those
                rows = reward_rows(sound, prompts, self._split)
            else:
                shared = rows = shared if shared is not None else reward_rows(sound, prompts, self._split)
            spared = self._spared(function, rows, prompts, by_function)
            asked = [row for row, absent in zip(rows, spared, strict=True) if absent is None] if any(spared) else rows
            if scorer.needs_earlier:
                self._tell_earlier(rows, by_function)
            score = scorer.probe if is_probe and scorer.probe is not None else scorer.score
            scores = score(asked) if asked else []
            assert len(scores) == len(asked), f"{function.component} lost a row"
            if len(asked) < len(rows):
                given = iter(scores)
                scores = [absent or next(given) for absent in spared]
            by_function.append(scores)
            if progress is not None:
                progress(index + 1, len(self._parts), function.component)
        return by_function

    def _tell_earlier(self, rows: list[RewardRow], earlier: list[list[Scored]]) -> None:
        names = [function.component for function, _ in self._parts[: len(earlier)]]
        for row, *scores in zip(rows, *earlier, strict=True):
            row.earlier = {name: scored.value for name, scored in zip(names, scores, strict=True)}

    def _spared(
        self, function: RewardFunction, rows: list[RewardRow], prompts: pa.Table, earlier: list[list[Scored]]
    ) -> list[Scored | None]:
        """What stands for the rows that a function is not asked about; null for the others."""
        spared: list[Scored | None] = [None] * len(rows)
        if function.when is not None:
            meets = matching(function.when, prompts, f"when of {function.component}").tolist()
            applies = dict(zip(prompts.column("prompt_id").to_pylist(), meets, strict=True))
            other = Scored(None, f"not applicable: not {function.when}", absence="not_applicable")
            spared = [None if applies[row.prompt_id] else other for row in rows]
        if function.gate is not None:
            names = [known.component for known, _ in self._parts]
            closed = Scored(None, f"{GATED}not {function.only_if}", absence="gated")
            unknown = Scored(None, f"the gate {function.only_if} has no score to go by")
            for index, scored in enumerate(earlier[names.index(function.gate[0])]):
                if spared[index] is None and (is_open := gate_is_open(function.gate, scored)) is not True:
                    spared[index] = unknown if is_open is None else closed
        return spared

    def _table(
        self, chosen: pa.Table, failed: list[str | None], by_function: list[list[Scored]], tokenizer: Any
    ) -> pa.Table:
        functions = [function for function, _ in self._parts]
        if any(failed):
            by_function = [_with_failures(scores, failed) for scores in by_function]
        rewards, reasons = combine(
            functions, by_function, self.settings.missing, chosen.column("rollout_id").to_pylist()
        )
        step_ends, step_rewards = step_columns(functions, by_function, rewards, chosen, self._split, tokenizer)
        schema = RECORDS["rewards"].schema
        columns = {
            "rollout_id": chosen.column("rollout_id"),
            "group_id": chosen.column("group_id"),
            "reward": rewards,
            "components": components_column(functions, by_function, len(rewards)),
            "component_status": statuses_column(functions, by_function, len(rewards)),
            "status": [SCORED if reward is not None else "unscored" for reward in rewards],
            "reason": [failure or reason for failure, reason in zip(failed, reasons, strict=True)],
            "turn_rewards": pa.nulls(len(rewards), schema.field("turn_rewards").type),
            "step_ends": step_ends,
            "step_rewards": step_rewards,
            "grader_digest": pa.repeat(pa.scalar(self.digest, pa.large_string()), len(rewards)),
        }
        return pa.table({name: columns[name] for name in schema.names}, schema)


def unscored_reasons(rewards: pa.Table) -> Counter[str]:
    """Why the grader gave no reward, with counts. Rollouts that failed are not the grader's fault and not counted."""
    reasons = rewards.column("reason").drop_null().to_pylist()
    return Counter(reason for reason in reasons if not is_rollout_error(reason))


def num_timeouts(rewards: pa.Table) -> int:
    """Scores that stand for work which met its time limit: their status begins with "scored: timeout"."""
    chunks = rewards.column("component_status").chunks
    return sum(pc.sum(pc.starts_with(chunk.items, f"{SCORED}: {TIMEOUT}")).as_py() or 0 for chunk in chunks)


def is_rollout_error(reason: str | None) -> bool:
    """Whether a row of rewards is unscored because its rollout failed."""
    return reason is not None and reason.startswith(f"{ROLLOUT_ERROR}: ")


def build_grader(
    settings: RewardSettings, folder: Path | None = None, replies: judge.ReplyCache | None = None
) -> Grader:
    """Load every function. Relative paths of users' files start at `folder`, or the working directory. `replies` keeps
    those of judges.

    Raises SettingsError (a pattern, path or package is wrong) and RewardFunctionError (a user's file raises).
    """
    for function in settings.functions:
        if function.when is not None:
            check_condition(function.when, f"when of {function.component}")
    code = UserCode()
    builders = {
        **REWARDS,
        "judge": functools.partial(judge.build, replies=replies),
        "custom": functools.partial(custom.build, code=code),
    }
    scorers = [builders[function.name](function, folder) for function in settings.functions]
    return Grader(settings, scorers, folder, code)


def _identity(scorer: Scorer) -> dict[str, Any]:
    model = {} if scorer.model_folder is None else {"model": model_digest(scorer.model_folder)}
    return {**scorer.identity, **model}


def _with_failures(scores: list[Scored], failed: list[str | None]) -> list[Scored]:
    given = iter(scores)
    merged = [Scored(None, failure) if failure is not None else next(given) for failure in failed]
    assert next(given, None) is None, "more scores than rollouts"
    return merged


def _with_completion(messages: str, text: str) -> str:
    return canonical_json([*json.loads(messages), {"role": "assistant", "content": text}])


APART = frozenset({"math_equivalence", "reasoning_gym", "code", "judge", "custom"})
REWARDS: dict[str, Callable[[RewardFunction, Path | None], Scorer]] = {
    "exact_match": exact_match.build,
    "numeric_answer": numeric_answer.build,
    "math_equivalence": math_equivalence.build,
    "choice": choice.build,
    "answer_format": answer_format.build,
    "reasoning_gym": reasoning_gym.build,
    "code": code.build,
    "soft_overlong": lengths.build_soft_overlong,
    "length_cosine": lengths.build_length_cosine,
    "repetition": repetition.build,
    "language": language.build,
    "self_verification": self_verification.build,
    "reward_model": reward_model.build,
    "process_reward_model": process_reward_model.build,
    "judge": judge.build,
    "custom": custom.build,
}
