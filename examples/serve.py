"""Serve a model and ask it something.

python examples/serve.py vllm serve Qwen/Qwen3-0.6B --port '{port}'
python examples/serve.py python -m sglang.launch_server --model-path Qwen/Qwen3-0.6B --port '{port}'
"""

from __future__ import annotations

import sys

import httpx

from hangguard import HangguardError, Limits, supervise


def main(command: list[str]) -> int:
    try:
        with supervise(command, fallbacks="auto", limits=Limits(ready_within=1800)) as server:
            for change in server.changes:
                print(f"NOT AS ASKED FOR: {change.change} (alters {change.alters})")
            models = httpx.get(f"{server.url}/v1/models", timeout=60).json()
            print(server.url, "serves", models["data"][0]["id"])
            server.wait()
    except HangguardError as failure:
        print(failure, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped, and nothing is left")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
