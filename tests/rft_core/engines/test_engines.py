"""The table of engines, sampling settings, the engine of offline runs, and the scripted one."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import pytest

from rft_core.config import RolloutSettings
from rft_core.engines import ENGINES, NEEDS_WEIGHTS, Completion, Engine, Request, Sampling
from rft_core.errors import EngineForbidden, SettingsError

END = 0


class LetterTokenizer:
    """One token a character; 0 ends."""

    eos_token_id = END

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(self, token_ids: list[int], skip_special_tokens: bool) -> str:
        return "".join(chr(token) for token in token_ids if token != END)


@dataclass(frozen=True)
class TokenizerOnly:
    tokenizer: Any


SAMPLED = Sampling(1.0, 1.0, 0, 8)
GREEDY = Sampling(0.0, 1.0, 0, 8)


def scripted(script: Path | None) -> Engine:
    settings = RolloutSettings(engine="scripted", script=None if script is None else str(script))
    return ENGINES["scripted"](TokenizerOnly(LetterTokenizer()), settings)


def write(folder: Path, script: Any) -> Path:
    path = folder / "script.json"
    path.write_text(script if isinstance(script, str) else json.dumps(script), encoding="utf-8")
    return path


def request(prompt: str, seed: int = 0, group: str = "g") -> Request:
    return Request(tuple(ord(letter) for letter in prompt), seed, group)


def texts(completions: list[Completion]) -> list[str]:
    return [LetterTokenizer().decode(completion.token_ids, True) for completion in completions]


def test_settings_and_table_name_the_same_engines() -> None:
    assert set(ENGINES) == set(get_args(RolloutSettings.model_fields["engine"].annotation))
    assert set(ENGINES) >= NEEDS_WEIGHTS


def test_only_the_transformers_engine_imports_torch() -> None:
    code = (
        "import sys; from rft_core.engines import ENGINES; from rft_core.config import RolloutSettings; "
        "import rft_core.environments; from types import SimpleNamespace; "
        "[ENGINES[name](SimpleNamespace(tokenizer=None), RolloutSettings()) for name in ('scripted', 'none')]; "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[3])


def test_an_offline_run_says_so() -> None:
    engine = ENGINES["none"](TokenizerOnly(None), RolloutSettings(engine="none"))
    with pytest.raises(EngineForbidden, match=r"offline.*2 completions.*rollout\.engine=transformers"):
        engine.generate([request("a"), request("b")], SAMPLED, None)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 1e-9}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": math.inf}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ],
)
def test_sampling_that_makes_no_sense_is_refused(changed: dict[str, Any], named: str) -> None:
    with pytest.raises(SettingsError, match=named):
        Sampling(**{**SAMPLED.to_json(), **changed})


def test_sampling_knows_what_it_is() -> None:
    assert SAMPLED.to_json() == {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "max_completion_tokens": 8}
    assert (SAMPLED.is_greedy, SAMPLED.is_truncated) == (False, False)
    assert (GREEDY.is_greedy, Sampling(0.0, 0.5, 3, 8).is_truncated) == (True, False)
    assert Sampling(1.0, 0.9, 0, 8).is_truncated
    assert Sampling(1.0, 1.0, 5, 8).is_truncated


def test_members_of_a_group_take_turns(tmp_path: Path) -> None:
    engine = scripted(write(tmp_path, {"default": ["no idea"], r"1 ?\+ ?1": ["2", "3", "4"]}))
    requests = [request("1+1?", group="a"), request("2+2?", group="b"), *[request("1 + 1", group="a")] * 3]
    assert texts(engine.generate(requests, SAMPLED)) == ["2", "no idea", "3", "4", "2"]
    assert texts(engine.generate(requests, GREEDY)) == ["2", "no idea", "2", "2", "2"]


def test_how_scripted_completions_end(tmp_path: Path) -> None:
    lines = ["12345678", "1234567", {"text": "cut", "finish_reason": "length"}, {"error": "lost"}]
    completions = scripted(write(tmp_path, {"default": lines})).generate([request("p")] * 4, SAMPLED)
    # 8 letters and the end token are 9: cut at 8. 7 letters and the end token fit.
    assert [(len(made.token_ids), made.finish_reason) for made in completions] == [
        (8, "length"),
        (8, "stop"),
        (3, "length"),
        (0, "error"),
    ]
    assert completions[1].token_ids[-1] == END
    assert completions[3] == Completion([], [], "error", "lost")


def test_a_prompt_without_script_fails_alone(tmp_path: Path) -> None:
    made = scripted(write(tmp_path, {"known": ["yes"]})).generate([request("known"), request("other")], SAMPLED)
    assert [completion.error_reason for completion in made] == [None, "unscripted"]


def test_without_a_script_the_seed_decides() -> None:
    engine = scripted(None)
    requests = [request("p", seed) for seed in range(200)]
    first, again = engine.generate(requests, SAMPLED), engine.generate(list(reversed(requests)), SAMPLED)
    assert first == list(reversed(again))
    assert set(texts(first)) == {str(number) for number in range(20)}
    assert len(set(texts(engine.generate(requests, GREEDY)))) == 1
    for completion in first:
        assert completion.logprobs is not None
        assert len(completion.logprobs) == len(completion.token_ids)
        assert all(logprob <= 0 and math.isfinite(logprob) for logprob in completion.logprobs)


@pytest.mark.parametrize(
    "script",
    ["{", "[]", {"default": []}, {"default": "text"}, {"(": ["a"]}, {"default": [3]}, {"default": [{"text": 3}]}]
    + [{"default": [{"text": "a", "finish_reason": "given"}]}, {"default": [{"error": None}]}],
)
def test_a_script_that_makes_no_sense_is_refused(tmp_path: Path, script: Any) -> None:
    with pytest.raises(SettingsError, match=r"script\.json"):
        scripted(write(tmp_path, script))


def test_a_missing_script_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"rollout\.script.*absent\.json"):
        scripted(tmp_path / "absent.json")
