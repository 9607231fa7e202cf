"""The HTTP side of the little server. Every answer is made by the workers; a stuck one means no answer."""

from __future__ import annotations

import json
import socketserver
import sys
import threading
import time
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from hangguard.testing._options import Options
from hangguard.testing._process import Channel

HEALTH_WITHIN = 20.0
"""SGLang's SGLANG_HEALTH_CHECK_TIMEOUT: how long /health waits for a token before it answers 503."""

Answer = tuple[int, dict[str, object]]


class Ranks:
    """The workers and the detokenizer as one thing that answers. One request at a time."""

    def __init__(self, schedulers: list[Channel], detokenizer: Channel) -> None:
        self._schedulers = schedulers
        self._detokenizer = detokenizer
        self._free = threading.Lock()

    def generate(self, prompt: str, length: int, *, warm_up: bool = False) -> tuple[str, list[float]] | None:
        """Return the text and the vector; never, while a worker is stuck; ``None`` when one is gone."""
        with self._free:
            return self._generate(prompt, length, warm_up=warm_up)

    def alive(self, within: float) -> bool:
        """Return whether a token comes back in time."""
        answered = threading.Event()

        def ask() -> None:
            if self.generate("health", 1) is not None:
                answered.set()

        threading.Thread(target=ask, name="health", daemon=True).start()
        return answered.wait(within)

    def _generate(self, prompt: str, length: int, *, warm_up: bool) -> tuple[str, list[float]] | None:
        try:
            for scheduler in self._schedulers:
                scheduler.send({"prompt": prompt, "length": length, "warm_up": warm_up})
            shares = [scheduler.receive() for scheduler in self._schedulers]
            if None in shares:
                return None
            words = _interleave([share["words"] for share in shares if share is not None])
            vector = _interleave([share["vector"] for share in shares if share is not None])
            self._detokenizer.send({"words": words})
            answer = self._detokenizer.receive()
        except OSError:
            return None
        return None if answer is None else (str(answer["text"]), [float(str(part)) for part in vector])


class FrontEnd(ThreadingHTTPServer):
    """Listens from the moment it is made."""

    daemon_threads = True

    def __init__(self, options: Options, ranks: Ranks) -> None:
        self.options = options
        self.ranks = ranks
        self.fired_up = threading.Event()
        super().__init__((options.host, options.port), _Handler)

    def server_bind(self) -> None:
        """Bind without the look-up of the host's full name in http.server, which can wait for a resolver."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = self.options.host, self.server_address[1]

    def answer(self, method: str, path: str, body: dict[str, object]) -> Answer:
        """Return status and content for one request whose key was right."""
        options = self.options
        if (method, path) == ("GET", "/health"):
            return self._health()
        if (method, path) == ("GET", "/v1/models"):
            card = {"id": options.served_model_name, "object": "model", "owned_by": "sglang"}
            return 200, {"object": "list", "data": [card]}
        if (method, path) == ("POST", "/v1/completions") and not options.is_embedding:
            return self._complete(body)
        if (method, path) == ("POST", "/v1/embeddings") and options.is_embedding:
            return self._embed(body)
        return 404, {"detail": "Not Found"}

    def _health(self) -> Answer:
        if self.options.shallow_health:
            return 200, {}
        ready = self.fired_up.is_set() and self.ranks.alive(HEALTH_WITHIN)
        return (200, {}) if ready else (503, {})

    def _complete(self, body: dict[str, object]) -> Answer:
        length = body.get("max_tokens", 16)
        if "prompt" not in body or not isinstance(length, int) or length < 1:
            return 400, {"object": "error", "message": "prompt and a positive max_tokens are needed"}
        made = self.ranks.generate(str(body["prompt"]), length)
        if made is None:
            return 500, {"object": "error", "message": "the engine is dead"}
        choice = {"index": 0, "text": made[0], "finish_reason": "length"}
        return 200, {
            "id": "cmpl-1", "object": "text_completion", "model": self.options.served_model_name,
            "choices": [choice], "usage": {"completion_tokens": length},
        }  # fmt: skip

    def _embed(self, body: dict[str, object]) -> Answer:
        if "input" not in body:
            return 400, {"object": "error", "message": "input is needed"}
        made = self.ranks.generate(str(body["input"]), 8)
        if made is None:
            return 500, {"object": "error", "message": "the engine is dead"}
        data = [{"object": "embedding", "index": 0, "embedding": made[1]}]
        return 200, {"object": "list", "model": self.options.served_model_name, "data": data}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FrontEnd

    def do_GET(self) -> None:
        self._respond({})

    def do_POST(self) -> None:
        raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        try:
            body = json.loads(raw)
        except ValueError:
            body = None
        self._respond(body if isinstance(body, dict) else {})

    def _respond(self, body: dict[str, object]) -> None:
        path = self.path.partition("?")[0]
        key = self.server.options.api_key
        # SGLang lets the health routes pass without the key
        if key and path != "/health" and self.headers.get("Authorization") != f"Bearer {key}":
            status, content = 401, {"error": "Unauthorized"}
        else:
            status, content = self.server.answer(self.command, path, body)  # type: ignore[assignment]
        raw = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """Write uvicorn's access line, to stdout as uvicorn does."""
        del size
        stamp, (host, port) = time.strftime("%Y-%m-%d %H:%M:%S"), self.client_address[:2]
        reason = HTTPStatus(int(code)).phrase
        sys.stdout.write(f'[{stamp}] INFO:     {host}:{port} - "{self.requestline}" {int(code)} {reason}\n')
        sys.stdout.flush()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 (the name in http.server)
        """Say nothing else."""


def _interleave(shares: list[object]) -> list[object]:
    """Put the shares of the ranks together again: rank r made positions r, r + tp and so on."""
    lists = [share if isinstance(share, list) else [] for share in shares]
    length = sum(len(share) for share in lists)
    return [lists[position % len(lists)][position // len(lists)] for position in range(length)]
