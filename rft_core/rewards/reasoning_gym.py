"""reasoning-gym's own verifier, run on the entry that the prompt was made from.

A prompt's metadata holds what its source wrote: {"source_dataset": NAME, "parameters": {...}, "entry": {"question",
"answer", "metadata"}}, plain or under the key "reasoning_gym", with "dataset" accepted for "source_dataset". The score
is create_dataset(NAME, **parameters).score_answer(text, entry).

What is judged: the text of the last <answer>...</answer> if there is one (an unclosed one runs to the end); else the
last number of the completion where the entry's answer is a number; else the stripped completion. A number equal to the
answer is handed over in the answer's spelling, because most verifiers compare texts ("1,000" is 1000).

Known behaviour of the verifiers, kept as it is: many give part of the point for a text that contains the answer
("21" earns 0.5 where the answer is "1"). `numeric_answer` is stricter.
"""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any

from rft_core.errors import SettingsError
from rft_core.hardware import num_cores
from rft_core.rewards.numeric_answer import Unreadable, find_last_number, parse_number
from rft_core.rewards.rows import RewardRow, Scored, Scorer
from rft_core.rewards.settings import RewardFunction
from rft_core.rewards.workers import Died, Reply, TimedOut, WorkerPool

SEMANTICS = 1
MAX_JUDGED_CHARACTERS = 100_000  # verifiers parse recursively and in squared time; no entry's answer comes near

# Verifiers need milliseconds for an answer, but making a data set may take long.
VERIFIERS = WorkerPool(
    "rft_core.rewards.verifier", num_cores(), job_seconds=4.0, memory_bytes=4 << 30, prepare_seconds=60.0
)


def judged_text(completion: str, answer: str | None) -> str:
    """The part of a completion that the verifier sees.

    >>> judged_text("Add them: 3 + 4 = 7.", "7"), judged_text("<answer> b, a </answer> done", "a, b")
    ('7', 'b, a')
    """
    start = completion.rfind("<answer>")
    if start >= 0:
        return completion[start + len("<answer>") :].partition("</answer>")[0].strip()
    expected = parse_number(answer) if answer is not None else Unreadable("there is none")
    number = find_last_number(completion)
    if isinstance(expected, Unreadable) or isinstance(number, Unreadable):
        return completion.strip()
    is_same = number.value == expected.value and number.is_percent == expected.is_percent
    return str(answer) if is_same else number.text


def reasoning_gym(rows: list[RewardRow]) -> list[Scored]:
    """0.0 with a reason when the text breaks or stalls the verifier; null when the entry itself can't be judged."""
    decided = [_job(row) for row in rows]
    replies = iter(VERIFIERS.run([job for job in decided if isinstance(job, dict)]))
    return [choice if isinstance(choice, Scored) else _scored(next(replies)) for choice in decided]


def _job(row: RewardRow) -> dict[str, Any] | Scored:
    reason = unreadable(row.answer, row.metadata)
    if reason is not None:
        return Scored(None, reason)
    made_from = _made_from(row.metadata)
    text = judged_text(row.completion_text, made_from["entry"].get("answer"))
    if len(text) > MAX_JUDGED_CHARACTERS:
        return Scored(0.0, f"the text to judge has {len(text)} characters, more than {MAX_JUDGED_CHARACTERS}")
    return {**made_from, "text": text}


def _scored(reply: Reply) -> Scored:
    if isinstance(reply, TimedOut):
        return Scored(0.0, f"timeout: the verifier did not end within {reply.seconds:g} s")
    if isinstance(reply, Died):
        return Scored(None, f"the verifier died with status {reply.status}")
    return Scored(reply["score"], reply["reason"])


def unreadable(answer: str | None, metadata: dict[str, Any]) -> str | None:
    made_from = _made_from(metadata)
    if not isinstance(made_from["dataset"], str) or not isinstance(made_from["entry"], dict):
        return "metadata has no reasoning-gym entry: the prompt must come from a source reasoning_gym:NAME"
    return None


def build(settings: RewardFunction, folder: Path | None) -> Scorer:
    """Raises SettingsError when the package is not installed."""
    try:
        version = importlib.metadata.version("reasoning-gym")
    except importlib.metadata.PackageNotFoundError as error:
        raise SettingsError(f"reward function {settings.component} needs the package reasoning-gym") from error
    identity = {"semantics": SEMANTICS, "reasoning_gym": version}
    return Scorer(reasoning_gym, identity, unreadable, close=VERIFIERS.interrupt)


def _made_from(metadata: dict[str, Any]) -> dict[str, Any]:
    found = metadata.get("reasoning_gym", metadata)
    if not isinstance(found, dict):
        found = {}
    return {
        "dataset": found.get("source_dataset", found.get("dataset")),
        "parameters": found.get("parameters") or {},
        "entry": found.get("entry"),
    }
