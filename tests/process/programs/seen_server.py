"""A server in the shape of the real ones: writes a log, waits at a gate, then listens and answers.

Arguments: the log, the gate (a FIFO). Says its port before it listens there.
"""

import json
import os
import socket
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

log = open(sys.argv[1], "a", buffering=1)


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        length = int(self.headers.get("Content-Length") or 0)
        if length:
            print(self.rfile.read(length).decode(), file=log)
        answer = {"choices": [{"text": "a"}]} if length else {"data": [{"id": "the model"}]}
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET

    def log_message(self, *_):
        pass


def waits_at_the_gate():
    os.read(os.open(sys.argv[2], os.O_RDONLY), 1)


with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    port = probe.getsockname()[1]
print("loading", file=log)
print(port, flush=True)
waits_at_the_gate()
ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
