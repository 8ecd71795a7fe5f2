"""An engine without a model, for tests: completions come from a JSON file or from the seed. No torch."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rft_core.engines import Completion, Progress, Request, Sampling
from rft_core.errors import SettingsError
from rft_core.seeds import uniforms

UNSCRIPTED_ANSWERS = 20  # without a script a completion is an integer below this, so that some sums come out right


@dataclass(frozen=True)
class Line:
    """One scripted completion: a text, cut by us (`length`) or not (`stop`), or the reason of a failed row."""

    text: str
    finish_reason: str = "stop"
    error_reason: str | None = None


class ScriptedEngine:
    """Completions from a script. Its JSON file maps patterns to lists of completions:

        {"1 \\\\+ 1": ["2", "3"], "default": ["no idea", {"text": "hm", "finish_reason": "length"}, {"error": "lost"}]}

    A key is a regular expression searched in the decoded prompt (special tokens left out); keys are tried in the
    order of the file, `default` last. The i-th request of a group gets completion i, modulo their number; greedy
    requests get the first. Text longer than max_completion_tokens is cut to finish_reason length; `length` in the
    file leaves out the stop token. A prompt that nothing matches fails with reason `unscripted`.

    Without a script a completion is an integer below 20 drawn from the row's seed (greedy: from the prompt's tokens).
    Logprobs are log(1 - u) of the row's uniforms: stable numbers, of no model.
    """

    def __init__(self, tokenizer: Any, script: str | None) -> None:
        self.tokenizer = tokenizer
        self.lines = None if script is None else _read_script(Path(script))

    def generate(
        self, requests: list[Request], sampling: Sampling, progress: Progress | None = None
    ) -> list[Completion]:
        seen: Counter[str] = Counter()
        completions = []
        for request in requests:
            index = 0 if sampling.is_greedy else seen[request.group]
            seen[request.group] += 1
            completions.append(self._completion(self._line(request, index, sampling), request, sampling))
            if progress:
                progress(len(completions), len(requests), "scripted")
        return completions

    def _line(self, request: Request, index: int, sampling: Sampling) -> Line:
        if self.lines is None:
            seed = sum(request.prompt_token_ids) if sampling.is_greedy else request.seed
            return Line(str(int(uniforms(seed, 1)[0] * UNSCRIPTED_ANSWERS)))
        prompt = self.tokenizer.decode(list(request.prompt_token_ids), skip_special_tokens=True)
        for pattern, lines in self.lines:
            if pattern is None or pattern.search(prompt):
                return lines[index % len(lines)]
        return Line("", "error", "unscripted")

    def _completion(self, line: Line, request: Request, sampling: Sampling) -> Completion:
        if line.error_reason is not None:
            return Completion.failed(line.error_reason)
        token_ids = self.tokenizer.encode(line.text, add_special_tokens=False)
        if line.finish_reason == "stop":
            token_ids = [*token_ids, self.tokenizer.eos_token_id]
        is_cut = len(token_ids) > sampling.max_completion_tokens
        token_ids = token_ids[: sampling.max_completion_tokens]
        logprobs = np.log1p(-uniforms(request.seed, len(token_ids))).astype(np.float32).tolist()
        return Completion(token_ids, logprobs, "length" if is_cut else line.finish_reason)


def _read_script(path: Path) -> list[tuple[re.Pattern[str] | None, list[Line]]]:
    """(pattern, lines) in the order of the file; pattern None is `default` and comes last."""
    try:
        script = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SettingsError(f"rollout.script must be a readable JSON file, got {path}: {error}") from error
    if not isinstance(script, dict) or not all(isinstance(lines, list) and lines for lines in script.values()):
        raise SettingsError(f"rollout.script {path} must map patterns to lists of completions, none of them empty")
    ordered = sorted(script.items(), key=lambda item: item[0] == "default")
    return [(_pattern(key, path), [_line_of(value, path) for value in lines]) for key, lines in ordered]


def _pattern(key: str, path: Path) -> re.Pattern[str] | None:
    if key == "default":
        return None
    try:
        return re.compile(key)
    except re.error as error:
        raise SettingsError(f"rollout.script {path}: {key!r} is not a regular expression: {error}") from error


def _line_of(value: Any, path: Path) -> Line:
    if isinstance(value, str):
        return Line(value)
    if isinstance(value, dict):
        if set(value) == {"error"} and isinstance(value["error"], str):
            return Line("", "error", value["error"])
        has_text = isinstance(value.get("text"), str)
        if (
            has_text
            and set(value) <= {"text", "finish_reason"}
            and value.get("finish_reason") in (None, "stop", "length")
        ):
            return Line(value["text"], value.get("finish_reason") or "stop")
    raise SettingsError(
        f"rollout.script {path}: a completion must be a text, {{text, finish_reason: stop|length}} or {{error}}, "
        f"got {value!r}"
    )
