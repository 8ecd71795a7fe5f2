"""A user's reward function.

Signature, synchronous or `async def`:

    def reward(rows: list[RewardRow]) -> list[float | None | dict | Scored]

One value per row, in order. Numbers, booleans (1 / 0), numpy scalars and 0-d arrays or tensors are scores; None and NaN
mean unscored; a dict holds the score under `score_key` and further numbers, kept as components named function/metric
("reason" may hold a text, "steps" one number for each of the row's reasoning steps); infinities, texts and everything
else are errors that name function, row and value. The function sees whole blocks in no promised order or size, so a
score must depend on its own row alone.

All functions of a recipe share a process of their own (user_process.py), with our environment and working folder. It
lives as long as the grader, so what they load or set is there at the next call; what they print goes to stderr. A call
that takes longer than `call_seconds`, or ends its process, leaves its rows unscored, and the next call finds a fresh
process. At the probe before a run it is an error.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rft_core.errors import RewardFunctionError, TransientError
from rft_core.rewards.event_loop import wait_for
from rft_core.rewards.rows import RewardRow, Scored, Scorer, packed_rows, shortened, valid_text
from rft_core.rewards.user_process import CallLost, UserCode
from rft_core.rewards.user_state import USER_STATE

if TYPE_CHECKING:  # the process of users' code loads no settings
    from rft_core.rewards.settings import RewardFunction

SEMANTICS = 1


class BadValue(ValueError):
    """What a user's function gave for one row is not a score."""


def as_scored(value: Any, score_key: str, num_steps: int = 0) -> Scored:
    """One returned value as a score, for a row with so many reasoning steps. Raises BadValue.

    >>> as_scored(True, "score"), as_scored({"score": 0.5, "tests": 4}, "score")
    (Scored(value=1.0, reason=None, metrics={}), Scored(value=0.5, reason=None, metrics={'tests': 4.0}))
    """
    if isinstance(value, Scored):
        steps = {} if value.steps is None else {"steps": value.steps}
        value = {**value.metrics, score_key: value.value, "reason": value.reason, **steps}
    if not isinstance(value, Mapping):
        number = _number(value, "a float, None, a dict or a Scored")
        return Scored(number, None if number is not None else f"the function gave {value}")
    if score_key not in value:
        raise BadValue(
            f"a dict must hold the key {score_key!r} (setting score_key), it has the keys {sorted(map(str, value))}"
        )
    reason = value.get("reason")
    if not isinstance(reason, str | None):
        raise BadValue(f"the key 'reason' must hold a text or None, got {_shown(reason)}")
    number = _number(value[score_key], f"the key {score_key!r} to hold a float or None")
    metrics = {}
    for name, metric in value.items():
        if name not in (score_key, "reason", "steps"):
            if not isinstance(name, str):
                raise BadValue(f"metric names must be texts, got {_shown(name)}")
            metrics[valid_text(name)] = _number(metric, f"metric {name!r} to be a number or None")
    if number is None and not reason:
        reason = f"the function gave {value[score_key]}"
    return Scored(number, valid_text(reason) if reason else reason, metrics, _steps(value.get("steps"), num_steps))


def _steps(values: Any, num_steps: int) -> tuple[float, ...] | None:
    if values is None:
        return None
    if not _is_sequence(values) or len(values) != num_steps:
        raise BadValue(f"the key 'steps' must hold a list of {num_steps} numbers, one per step, got {_shown(values)}")
    numbers = [_number(value, "every step score to be a float") for value in values]
    if None in numbers:
        raise BadValue(f"the key 'steps' must hold a number for each step, got {_shown(values)}")
    return tuple(numbers)


def call(function: Any, name: str, rows: list[RewardRow], score_key: str) -> list[Scored]:
    """Call a user's function on a batch. Raises RewardFunctionError for whatever it does wrong; a TransientError that
    it raises on purpose passes."""
    try:
        with USER_STATE.entered():
            values = function(list(rows))  # a list of its own: it may sort or empty it
            if inspect.isawaitable(values):
                values = wait_for(values)
    except TransientError:
        raise
    except (Exception, SystemExit) as error:
        raise RewardFunctionError(
            f"reward function {name} raised {type(error).__name__}: {shortened(str(error))} {_where(error, rows)}"
        ) from error
    if not _is_sequence(values):
        raise RewardFunctionError(
            f"reward function {name} must give a list of {len(rows)} values, got {_shown(values)}"
        )
    if len(values) != len(rows):
        raise RewardFunctionError(
            f"reward function {name} must give one value per row: {len(rows)} rows from {rows[0].rollout_id}, "
            f"got {len(values)} values"
        )
    scores = []
    for row, value in zip(rows, values, strict=True):
        try:
            scores.append(as_scored(value, score_key, len(row.step_ends)))
        except BadValue as error:
            raise RewardFunctionError(f"reward function {name}, row {row.rollout_id}: {error}") from error
    return scores


class UserFunction:
    """A user's function in its process."""

    def __init__(self, settings: RewardFunction, folder: Path | None, code: UserCode) -> None:
        path = settings.path or ""
        self._code = code
        self._number, self.identity = code.load(path, folder, settings.depends_on)
        self._shown = path.rpartition("/")[2]  # tables hold no folder's name
        self._seconds = settings.call_seconds
        self._name = f"{settings.component} ({path})"
        self._score_key = settings.score_key

    def score(self, rows: list[RewardRow]) -> list[Scored]:
        """Unscored, with what happened, where there was no answer. Raises RewardFunctionError, GraderUnavailable, and
        what the function raises as a TransientError."""
        try:
            return self._score(rows)
        except CallLost as lost:
            return [Scored(None, f"{self._shown} {lost}")] * len(rows)

    def probe(self, rows: list[RewardRow]) -> list[Scored]:
        """The same, but no answer is a RewardFunctionError."""
        try:
            return self._score(rows)
        except CallLost as lost:
            raise RewardFunctionError(
                f"reward function {self._name} must give scores, called on {len(rows)} rows from {rows[0].rollout_id} "
                f"it {lost}"
            ) from lost

    def _score(self, rows: list[RewardRow]) -> list[Scored]:
        if not rows:
            return []
        request = {"do": "score", "name": self._name, "score_key": self._score_key}
        reply = self._code.ask(self._number, request, packed_rows(rows), self._seconds)
        scores = [Scored(value) for value in reply["values"]]
        for index, (reason, metrics, steps) in reply["more"].items():
            value = scores[int(index)].value
            scores[int(index)] = Scored(value, reason, metrics, None if steps is None else tuple(steps))
        return scores


def build(settings: RewardFunction, folder: Path | None, code: UserCode | None = None) -> Scorer:
    """Loads the code into the process of `code`. Raises SettingsError, RewardFunctionError, GraderUnavailable."""
    code = code or UserCode()
    function = UserFunction(settings, folder, code)
    return Scorer(
        function.score,
        {"semantics": SEMANTICS, **function.identity},
        is_custom=True,
        needs_earlier=True,
        probe=function.probe,
    )


def _number(value: Any, wanted: str) -> float | None:
    """Null for None and NaN. Raises BadValue for infinities and for what is no number."""
    plain = value
    if getattr(value, "shape", None) == () and hasattr(value, "item"):  # numpy scalars, 0-d arrays, 0-d tensors
        plain = value.item()
    if plain is None:
        return None
    if not isinstance(plain, Real):
        raise BadValue(f"expected {wanted}, got {_shown(value)}")
    try:
        number = float(plain)
    except OverflowError:
        number = math.inf
    if math.isinf(number):
        raise BadValue(f"expected {wanted} that is finite, got {_shown(value)}")
    return None if math.isnan(number) else number


def _is_sequence(values: Any) -> bool:
    if isinstance(values, list | tuple):
        return True
    return len(getattr(values, "shape", ())) == 1  # a numpy array, a tensor, a pandas column


def _where(error: BaseException, rows: list[RewardRow]) -> str:
    """The row at hand in the innermost frame that holds one, else the batch."""
    at_hand = None
    traceback = error.__traceback__
    while traceback is not None:
        for value in traceback.tb_frame.f_locals.values():
            if isinstance(value, RewardRow):
                at_hand = value
        traceback = traceback.tb_next
    if at_hand is not None:
        return f"at row {at_hand.rollout_id} (completion {_shown(at_hand.completion_text)})"
    return f"in the batch of {len(rows)} rows from {rows[0].rollout_id}"


def _shown(value: Any) -> str:
    kind = type(value).__name__
    try:
        text = repr(value)
    except Exception as error:  # noqa: BLE001 (we are about to report a worse one)
        return f"a {kind} whose repr raises {type(error).__name__}"
    return f"{shortened(text, 80)} ({kind})"
