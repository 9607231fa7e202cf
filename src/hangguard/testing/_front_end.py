"""The HTTP side of the little server. Every answer is made by the workers; a stuck one means no answer."""

from __future__ import annotations

import json
import socket
import socketserver
import ssl
import sys
import threading
import time
from collections.abc import Generator
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
        self._counting = threading.Lock()
        self.running = 0
        self.queued = 0
        self.decoded = 0
        self.prefilled = 0

    def generate(self, prompt: str, length: int, *, warm_up: bool = False) -> tuple[str, list[float]] | None:
        """Return the text and the vector; never, while a worker is stuck; ``None`` when one is gone."""
        self._count(queued=1)
        with self._free:
            self._count(queued=-1, running=1, prefilled=len(prompt.split()))
            made = self._generate(prompt, length, warm_up=warm_up)
            self._count(running=-1, decoded=length if made is not None else 0)
            return made

    def stream(self, prompt: str, length: int, pause: float) -> Generator[str, None, None]:
        """Yield one word at a time, each made by the workers; other requests get their turns between two."""
        self._count(running=1, prefilled=len(prompt.split()))
        try:
            for position in range(length):
                with self._free:
                    made = self._generate(f"{prompt}|{position}", 1, warm_up=False, decode=position > 0)
                if made is None:
                    return
                self._count(decoded=1)
                yield made[0]
                time.sleep(pause)
        finally:
            self._count(running=-1)

    def _count(self, *, queued: int = 0, running: int = 0, prefilled: int = 0, decoded: int = 0) -> None:
        with self._counting:
            self.queued += queued
            self.running += running
            self.prefilled += prefilled
            self.decoded += decoded

    def alive(self, within: float) -> bool:
        """Return whether a token comes back in time."""
        answered = threading.Event()

        def ask() -> None:
            if self.generate("health", 1) is not None:
                answered.set()

        threading.Thread(target=ask, name="health", daemon=True).start()
        return answered.wait(within)

    def _generate(
        self, prompt: str, length: int, *, warm_up: bool, decode: bool = False
    ) -> tuple[str, list[float]] | None:
        try:
            for scheduler in self._schedulers:
                scheduler.send({"prompt": prompt, "length": length, "warm_up": warm_up, "decode": decode})
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
        self.address_family = socket.AF_INET if options.uds is None else socket.AF_UNIX
        super().__init__((options.host, options.port) if options.uds is None else options.uds, _Handler)  # type: ignore[arg-type]
        if options.ssl_certfile is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(options.ssl_certfile, options.ssl_keyfile)
            # The handshake is made by the thread of the request, at its first reading.
            self.socket = context.wrap_socket(self.socket, server_side=True, do_handshake_on_connect=False)

    def server_bind(self) -> None:
        """Bind without the look-up of the host's full name in http.server, which can wait for a resolver."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = self.options.host, self.options.port

    def answer(self, method: str, path: str, body: dict[str, object]) -> Answer:
        """Return status and content for one request whose key was right."""
        options = self.options
        if options.node_rank:
            return (200, {}) if (method, path) == ("GET", "/health") else (404, {"detail": "Not Found"})
        if (method, path) == ("GET", "/health"):
            return self._health()
        if (method, path) == ("GET", "/get_model_info"):
            return 200, {"model_path": options.model_path, "is_generation": not options.is_embedding}
        if (method, path) == ("POST", "/generate") and not options.is_embedding:
            return self._generate(body)
        if (method, path) == ("GET", "/v1/models"):
            card = {"id": options.served_model_name, "object": "model", "owned_by": "sglang"}
            return 200, {"object": "list", "data": [card]}
        if (method, path) == ("GET", "/v1/loads"):
            load = {"dp_rank": 0, "num_running_reqs": self.ranks.running, "num_waiting_reqs": self.ranks.queued}
            return 200, {"loads": [load]}
        if (method, path) == ("POST", "/v1/completions") and not options.is_embedding:
            if options.skip_tokenizer_init:
                return 400, {"object": "error", "message": "this server has no tokenizer: it takes input_ids"}
            return self._complete(body)
        if (method, path) == ("POST", "/v1/embeddings") and options.is_embedding:
            return self._embed(body)
        return 404, {"detail": "Not Found"}

    def metrics(self) -> str:
        """Return the counters as SGLang names them, those of requests in flight and of tokens so far."""
        ranks = self.ranks
        common = f'engine_type="unified",model_name="{self.options.served_model_name}"'
        tokens = (("prefill_compute", ranks.prefilled), ("decode", ranks.decoded))
        return "".join(
            (
                f"# TYPE sglang:num_running_reqs gauge\nsglang:num_running_reqs{{{common}}} {float(ranks.running)}\n",
                f"# TYPE sglang:num_queue_reqs gauge\nsglang:num_queue_reqs{{{common}}} {float(ranks.queued)}\n",
                "# TYPE sglang:realtime_tokens_total counter\n",
                *(f'sglang:realtime_tokens_total{{{common},mode="{mode}"}} {float(n)}\n' for mode, n in tokens),
            )
        )

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

    def _generate(self, body: dict[str, object]) -> Answer:
        asked = body.get("input_ids")
        if not isinstance(asked, list) or not asked:
            return 400, {"error": {"message": "input_ids are needed"}}
        made = self.ranks.generate(str(asked), 1)
        if made is None:
            return 500, {"error": {"message": "the engine is dead"}}
        return 200, {"output_ids": [len(made[0])], "meta_info": {"completion_tokens": 1}}

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

    def _stream(self, body: dict[str, object]) -> None:
        """Send the tokens as they are made, as server-sent events; the end of the connection is the end."""
        self.close_connection = True
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        options, length = self.server.options, int(str(body.get("max_tokens", 16)))
        words = self.server.ranks.stream(str(body.get("prompt", "")), length, options.token_seconds)
        sent = 0
        try:
            for sent, word in enumerate(words, start=1):  # noqa: B007 - how many there were
                self.wfile.write(b"data: " + json.dumps({"choices": [{"text": f"{word} "}]}).encode() + b"\n\n")
            if sent == length:  # fewer: a worker is gone
                self.wfile.write(b"data: [DONE]\n\n")
        except OSError:
            words.close()  # the client is gone: so is his request

    def _respond(self, body: dict[str, object]) -> None:
        path = self.path.partition("?")[0]
        if path == "/metrics" and self.server.options.enable_metrics:  # SGLang asks for no key here
            self._send(200, "text/plain; version=0.0.4", self.server.metrics().encode())
            return
        key = self.server.options.api_key
        # SGLang lets the health routes pass without the key
        if key and path != "/health" and self.headers.get("Authorization") != f"Bearer {key}":
            status, content = 401, {"error": "Unauthorized"}
        elif path == "/v1/completions" and body.get("stream"):
            self._stream(body)
            return
        else:
            status, content = self.server.answer(self.command, path, body)  # type: ignore[assignment]
        self._send(status, "application/json", json.dumps(content).encode())

    def _send(self, status: int, kind: str, raw: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """Write uvicorn's access line, to stdout as uvicorn does."""
        del size
        stamp = time.strftime("%Y-%m-%d %H:%M:%S")
        client = "{}:{}".format(*self.client_address[:2]) if self.client_address else ""  # a unix socket has none
        reason = HTTPStatus(int(code)).phrase
        sys.stdout.write(f'[{stamp}] INFO:     {client} - "{self.requestline}" {int(code)} {reason}\n')
        sys.stdout.flush()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 (the name in http.server)
        """Say nothing else."""


def _interleave(shares: list[object]) -> list[object]:
    """Put the shares of the ranks together again: rank r made positions r, r + tp and so on."""
    lists = [share if isinstance(share, list) else [] for share in shares]
    length = sum(len(share) for share in lists)
    return [lists[position % len(lists)][position // len(lists)] for position in range(length)]
