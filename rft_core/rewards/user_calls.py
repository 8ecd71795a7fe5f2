"""In the process of users' code: requests -> replies (see user_process.py)."""

from __future__ import annotations

import faulthandler
import json
import os
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rft_core.errors import RewardFunctionError
from rft_core.rewards.custom import call
from rft_core.rewards.plugin import Plugin, load_plugin
from rft_core.rewards.rows import shortened, unpacked_rows
from rft_core.rewards.user_process import SIZES_BYTES, Reply, Request, packed, sizes_of
from rft_core.rewards.user_state import USER_STATE


def answer_requests(requests: int, replies: int) -> None:
    """Until no more come."""
    faulthandler.enable()
    process_id = os.getpid()
    plugins: dict[str, Plugin] = {}
    with open(requests, "rb") as incoming, open(replies, "wb") as outgoing:
        while start := incoming.read(SIZES_BYTES):
            size, rest_size = sizes_of(start)
            request = json.loads(incoming.read(size))
            reply = _answer(request, incoming.read(rest_size), plugins)
            if os.getpid() != process_id:  # a child that the function forked and did not end
                os._exit(1)
            for part in packed(reply):
                outgoing.write(part)
            outgoing.flush()


def _answer(request: Request, rest: bytes, plugins: dict[str, Plugin]) -> Reply:
    try:
        return ANSWERS[request["do"]](request, rest, plugins)
    except Exception as error:  # noqa: BLE001 (raised again in the process that asked)
        return {
            "raised": [kind.__name__ for kind in type(error).__mro__],
            "message": shortened(str(error), 10_000),
            "traceback": shortened("".join(traceback.format_exception(error)), 100_000),
        }


def _load(request: Request, _: bytes, plugins: dict[str, Plugin]) -> Reply:
    folder = Path(request["folder"]) if request["folder"] is not None else None
    plugins[request["function"]] = plugin = load_plugin(request["path"], folder, request["depends_on"])
    return {"identity": plugin.identity}


def _score(request: Request, rest: bytes, plugins: dict[str, Plugin]) -> Reply:
    rows = unpacked_rows(rest)
    scores = call(plugins[request["function"]].function, request["name"], rows, request["score_key"])
    more = {
        index: [scored.reason, dict(scored.metrics), scored.steps]
        for index, scored in enumerate(scores)
        if scored.reason is not None or scored.metrics or scored.steps is not None
    }
    return {"values": [scored.value for scored in scores], "more": more}


def _split(request: Request, _: bytes, plugins: dict[str, Plugin]) -> Reply:
    function = plugins[request["function"]].function
    return {"ends": [split_text(function, request["name"], text) for text in request["texts"]]}


def split_text(function: Callable[..., Any], name: str, text: str) -> list[int]:
    """Where the steps end that a user's function divides a text into. Raises RewardFunctionError."""
    try:
        with USER_STATE.entered():
            steps = function(text)
    except (Exception, SystemExit) as error:  # a user's code may raise anything
        raise RewardFunctionError(
            f"steps.path {name} raised {type(error).__name__}: {shortened(str(error))} for the completion "
            f"{shortened(text, 80)!r}"
        ) from error
    return list(_ends_of(steps, text, name))


def _ends_of(steps: Any, text: str, path: str) -> Iterator[int]:
    if not isinstance(steps, list | tuple) or not all(isinstance(step, str) for step in steps):
        raise RewardFunctionError(f"steps.path {path} must give a list of texts, got {shortened(repr(steps), 80)}")
    end = 0
    for step in steps:
        if not step.strip():
            continue
        start = text.find(step.strip(), end)
        if start < 0:
            raise RewardFunctionError(
                f"steps.path {path} must give parts of the completion in order, {shortened(step, 80)!r} is none of "
                f"{shortened(text[end:], 80)!r}"
            )
        end = start + len(step.strip())
        yield end


ANSWERS: dict[str, Callable[[Request, bytes, dict[str, Plugin]], Reply]] = {
    "load": _load,
    "score": _score,
    "split": _split,
}
