"""A server that speaks vLLM's protocol and has no model: for its failures. Standard library only.

Every token has the logprob -log(VOCABULARY), as in a model whose weights are all 0, unless `logprobs_of` says
otherwise. As a program it stands for `python -m vllm.entrypoints.openai.api_server`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import signal
import sys
import threading
from collections import defaultdict
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

VOCABULARY = 259
STOP = 2
DROP = "drop"  # a fault: the connection closes without an answer
HANG = "hang"  # a fault: no answer before the client gives up

LogprobsOf = Callable[[str, list[int], list[int], float], list[float]]  # of (weights, prompt, completion, temperature)


def uniform(_weights: str, _prompt: list[int], completion: list[int], _temperature: float) -> list[float]:
    return [-math.log(VOCABULARY)] * len(completion)


class FakeServer(ThreadingHTTPServer):
    """`faults` maps a path to what its next calls get instead of an answer: (status, text), DROP or HANG. `told` holds
    every call as (path with query, body)."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, model: str, logprobs_of: LogprobsOf = uniform, port: int = 0, key: str | None = None) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.base = model
        self.weights = model  # the folder that the base model's weights are of
        self.logprobs_of = logprobs_of
        self.key = key
        self.adapters: dict[str, str] = {}
        self.faults: dict[str, list[Any]] = defaultdict(list)
        self.told: list[tuple[str, Any]] = []
        self.stuck = threading.Event()
        self.ignores_reloads = False
        self.delay_seconds = 0.0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def paths(self) -> list[str]:
        return [path for path, _ in self.told]

    def rows(self) -> list[dict[str, Any]]:
        """The bodies of all completions but those of probes."""
        bodies = [body for path, body in self.told if path == "/v1/completions"]
        return [body for body in bodies if "prompt_logprobs" not in body and body["temperature"] != 0.5]

    def answer(self, path: str, body: Any) -> tuple[int, Any]:
        route = urlsplit(path).path
        if route == "/v1/completions":
            return self.complete(body)
        if route == "/v1/models":
            parents = [{"id": "served", "parent": None}]
            return 200, {"data": [*({"id": name, "parent": "served"} for name in self.adapters), *parents]}
        if route == "/collective_rpc" and not self.ignores_reloads:
            self.weights = body["kwargs"]["weights_path"]
        elif route == "/v1/load_lora_adapter":
            self.adapters[body["lora_name"]] = body["lora_path"]
        elif route == "/v1/unload_lora_adapter" and self.adapters.pop(body["lora_name"], None) is None:
            return 404, {"error": {"message": "no such adapter"}}
        return 200, {"version": "0.32.0"} if route == "/version" else {}

    def complete(self, body: dict[str, Any]) -> tuple[int, Any]:
        known = {"served": self.weights, "policy": self.weights, **self.adapters}
        if body["model"] not in known:
            return 404, {"error": {"message": f"The model `{body['model']}` does not exist."}}
        weights, prompt, temperature = known[body["model"]], body["prompt"], body["temperature"] or 1.0
        choice: dict[str, Any] = {"index": 0, "prompt_logprobs": None}
        if body.get("prompt_logprobs") is not None:
            values = self.logprobs_of(weights, prompt[:1], prompt[1:], 1.0)
            told = [{str(token): {"logprob": value}} for token, value in zip(prompt[1:], values, strict=True)]
            choice["prompt_logprobs"] = [None, *told]
        numbers = random.Random(body.get("seed", 0))
        token_ids = [numbers.randrange(3, VOCABULARY) for _ in range(body["max_tokens"])]
        is_stopped = STOP in body.get("stop_token_ids", []) and numbers.random() < 0.5
        if is_stopped:
            token_ids = [*token_ids[: len(token_ids) // 2], STOP]
        logprobs = self.logprobs_of(weights, prompt, token_ids, temperature)
        choice |= {"token_ids": token_ids, "logprobs": {"token_logprobs": logprobs}}
        return 200, {"choices": [{**choice, "finish_reason": "stop" if is_stopped else "length"}]}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FakeServer

    def do_GET(self) -> None:
        self.serve()

    def do_POST(self) -> None:
        self.serve()

    def serve(self) -> None:
        content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = json.loads(content) if content else None
        self.server.told.append((self.path, body))
        faults = self.server.faults[urlsplit(self.path).path]
        fault = faults.pop(0) if faults else None
        if self.server.key is not None and self.headers.get("Authorization") != f"Bearer {self.server.key}":
            fault = (401, "wrong key")
        if fault == HANG:
            self.server.stuck.wait(30)
        if fault in (DROP, HANG):
            self.close_connection = True
            return
        if self.server.delay_seconds and self.path == "/v1/completions":
            self.server.stuck.wait(self.server.delay_seconds)
        status, text = fault or self.server.answer(self.path, body)
        data = text.encode() if isinstance(text, str) else json.dumps(text).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


def levels(server: FakeServer) -> list[int]:
    """The levels that it was put to sleep at."""
    return [int(parse_qs(urlsplit(path).query)["level"][0]) for path in server.paths() if path.startswith("/sleep")]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--ends-with", type=int)
    given, _ = parser.parse_known_args()
    print(f"serving {given.model} with {sys.argv[1:]}", flush=True)
    if given.ends_with is not None:
        print("the reason why it does not start", flush=True)
        sys.exit(given.ends_with)
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    server = FakeServer(given.model, port=given.port, key=os.environ["VLLM_API_KEY"])
    server.serve_forever()


if __name__ == "__main__":
    main()
