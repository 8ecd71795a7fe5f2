"""The child that runs reasoning-gym's verifiers: `python -m rft_core.rewards.verifier`, one answer per job.

Several verifiers hand the model's text to `eval`, and any of them may loop on it; hence the process of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rft_core.rewards.workers import Job, serve, start_clock


def prepare() -> Callable[[Job], Job]:
    from reasoning_gym.factory import create_dataset

    datasets: dict[str, Any] = {}

    def work(job: Job) -> Job:
        score, reason = _judge(job, datasets, create_dataset)
        return {"score": score, "reason": reason}

    return work


def _judge(job: Job, datasets: dict[str, Any], create_dataset: Any) -> tuple[float | None, str | None]:
    from data_contracts.schemas import canonical_json, from_plain

    entry = from_plain(job["entry"])
    kind = canonical_json([job["dataset"], job["parameters"]])
    try:
        if kind not in datasets:
            datasets[kind] = create_dataset(job["dataset"], **from_plain({"seed": 0, **job["parameters"]}))
    except (AssertionError, ValueError, TypeError, KeyError, AttributeError) as error:
        return None, f"reasoning-gym can't make the data set {job['dataset']!r}: {_shown(error)}"
    start_clock()
    score, error = _score(datasets[kind], job["text"], entry)
    if error is None:
        return score, None
    _, own_error = _score(datasets[kind], entry.get("answer"), entry)
    if own_error is None:  # the verifier can judge this entry, so the completion's text is what broke it
        return 0.0, f"the verifier could not read the answer: {_shown(error)}"
    return None, f"the verifier can't judge this entry: {_shown(own_error)}"


def _score(dataset: Any, text: Any, entry: dict[str, Any]) -> tuple[float, BaseException | None]:
    try:
        score = float(dataset.score_answer(text, entry))
        if score != score or abs(score) == float("inf"):
            raise ValueError(f"the score is {score}")
        return score, None
    except (Exception, SystemExit) as error:  # noqa: BLE001 (what the text provoked becomes the reason)
        return 0.0, error


def _shown(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:200]


if __name__ == "__main__":
    serve(prepare)
