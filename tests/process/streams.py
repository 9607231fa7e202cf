"""Real clients of a real server, that stream."""

import http.client
import json
import threading
import urllib.parse

from seen import until_sync

ENDLESS = 10**9


class Client:
    """Holds one connection, and on it perhaps one stream; in a thread of its own, and of this very program."""

    def __init__(self, url, tokens=0):
        place = urllib.parse.urlsplit(url)
        self.tokens, self.is_done, self.error = [], False, None
        self.connection = http.client.HTTPConnection(place.hostname, place.port, timeout=60)
        self.connection.connect()
        self.thread = threading.Thread(target=self._stream, args=(tokens,), daemon=True)
        if tokens:
            self.thread.start()

    def _stream(self, tokens):
        body = {"model": "tiny", "prompt": "hello", "max_tokens": tokens, "stream": True}
        try:
            self.connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            with self.connection.getresponse() as answer:
                for line in answer:
                    if line.startswith(b"data: {"):
                        self.tokens.append(json.loads(line[6:])["choices"][0]["text"])
                    self.is_done = self.is_done or line.startswith(b"data: [DONE]")
        except (OSError, http.client.HTTPException) as error:
            self.error = error
        finally:
            self.connection.close()

    def close(self):
        self.connection.close()


def streaming(url, tokens):
    client = Client(url, tokens)
    until_sync(lambda: len(client.tokens) >= 2)
    return client
