"""What a half of a disaggregated SGLang answers: 400 to a request without a room, and tokens to its own warm-up.

As released in 0.5.23: managers/scheduler.py, entrypoints/http_server.py. Every POST is kept in asked.jsonl beside it.
"""

import argparse
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("command")
parser.add_argument("--model-path")
parser.add_argument("--port", type=int)
parser.add_argument("--disaggregation-mode", default="null")
options = parser.parse_args()
ASKED = Path(__file__).with_name("asked.jsonl")
NO_ROOM = "Invalid request: Disaggregated request received without bootstrap room id. req.rid='1'"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        known = {"/health": None, "/get_model_info": {"is_generation": True}, "/v1/models": {"data": [{"id": "m"}]}}
        self.reply(200 if self.path in known else 404, known.get(self.path))

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with ASKED.open("a") as file:
            file.write(json.dumps({"path": self.path, **asked}) + "\n")
        if options.disaggregation_mode != "null" and asked.get("bootstrap_room") is None:
            self.reply(400, {"object": "error", "message": NO_ROOM, "type": "BadRequest"})
        elif self.path == "/generate":
            count = 1 if options.disaggregation_mode == "prefill" else asked["sampling_params"]["max_new_tokens"]
            self.reply(200, {"text": "", "output_ids": [7] * count, "meta_info": {"completion_tokens": count}})
        else:
            self.reply(200, {"choices": [{"text": "a"}]})

    def reply(self, status, content):
        body = b"" if content is None else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


ThreadingHTTPServer(("127.0.0.1", options.port), Handler).serve_forever()
