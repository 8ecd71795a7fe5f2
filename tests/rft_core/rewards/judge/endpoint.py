"""An OpenAI-compatible endpoint on loopback whose replies a test scripts, with all that can go wrong on the way."""

from __future__ import annotations

import json
import re
import sys
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

CANDIDATE = re.compile(r"\[begin candidate ?(\w*) ([0-9a-f]{16})\]\n(.*?)\n\[end candidate ?\1 \2\]", re.DOTALL)
EXAMPLE = "What is 1 + 1?"  # stands in the question that is asked before all others


@dataclass(frozen=True)
class Request:
    """`attempt` counts from 0 for equal messages. `candidates` are the fenced ones, in order."""

    body: dict[str, Any]
    headers: dict[str, str]  # by lower name
    attempt: int

    @property
    def candidates(self) -> list[str]:
        return [match[2] for match in CANDIDATE.findall(self.body["messages"][1]["content"])]

    @property
    def is_repair(self) -> bool:
        return len(self.body["messages"]) > 2

    @property
    def is_example(self) -> bool:
        return EXAMPLE in self.body["messages"][1]["content"]


@dataclass(frozen=True)
class Act:
    """What the endpoint does. `cut` closes the connection after half the body; `hang_seconds` goes before it."""

    body: Any
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    cut: bool = False
    hang_seconds: float = 0.0


def said(content: Any, tokens: tuple[int, int] = (100, 10), **act: Any) -> Act:
    """A whole completion with that content, which cost so many (prompt, reply) tokens."""
    choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": content}}
    usage = {"prompt_tokens": tokens[0], "completion_tokens": tokens[1]}
    return Act({"id": "x", "object": "chat.completion", "choices": [choice], "usage": usage}, **act)


def score(value: Any, **act: Any) -> Act:
    return said(json.dumps({"reason": "so it is", "score": value}), **act)


def refusal(status: int, message: str = "no", headers: dict[str, str] | None = None, **error: Any) -> Act:
    return Act({"error": {"message": message, **error}}, status, headers or {})


class ScriptedEndpoint(ThreadingHTTPServer):
    """Used as a context; leaving it waits until all its connections are closed. `requests` are all that came."""

    daemon_threads = False

    def __init__(self, script: Callable[[Request], Act]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.script = script
        self.requests: list[Request] = []
        self.errors: list[BaseException | None] = []
        self.most_at_once = 0
        self.closing = threading.Event()
        self._at_work = 0
        self._asked: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self.serve_forever, args=(0.02,))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    def begin(self, body: dict[str, Any], headers: dict[str, str]) -> Act:
        with self._lock:
            key = json.dumps(body["messages"])
            request = Request(body, headers, self._asked[key])
            self._asked[key] += 1
            self.requests.append(request)
            self._at_work += 1
            self.most_at_once = max(self.most_at_once, self._at_work)
        return self.script(request)

    def end(self) -> None:
        with self._lock:
            self._at_work -= 1

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away while it was kept waiting is what some tests are about; a faulty script is not."""
        error = sys.exception()
        if not isinstance(error, OSError):
            self.errors.append(error)

    def __enter__(self) -> ScriptedEndpoint:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.closing.set()
        self.shutdown()
        self._thread.join()
        self.server_close()
        if self.errors:
            raise self.errors[0]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 10
    server: ScriptedEndpoint

    def do_POST(self) -> None:
        assert self.path == "/v1/chat/completions", self.path
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        act = self.server.begin(body, {name.lower(): value for name, value in self.headers.items()})
        try:
            if act.hang_seconds:
                self.server.closing.wait(act.hang_seconds)
            self._send(act)
        finally:
            self.server.end()

    def _send(self, act: Act) -> None:
        data = (act.body if isinstance(act.body, str) else json.dumps(act.body)).encode()
        self.send_response(act.status)
        for name, value in {"Content-Type": "application/json", **act.headers}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data[: len(data) // 2] if act.cut else data)
        self.close_connection = act.cut

    def log_message(self, *message: Any) -> None:
        """Silent."""
