"""A user's program in a place where little is allowed. Arguments: the event loop, and cases, each as JSON.

A case has a name, ``server`` (options of the little one), ``env`` and ``limits``; once it is ready it may ``diagnose``
the server, ``kill_guardian``, or ``die``. All run at once. The last line of the output is one JSON object: of each case
what was told, how it ended, and what its release says.
"""

import json
import os
import signal
import sys
import urllib.request
from dataclasses import fields

import anyio
import tenacity

from hangguard import GaveUp, LeftBehind, Limits, Retry, supervise
from hangguard.facts import Unseen
from hangguard.testing import little_server_command

BACKEND, *CASES = sys.argv[1:]


def complete(url):
    body = json.dumps({"model": "tiny", "prompt": "hello", "max_tokens": 4}).encode()
    request = urllib.request.Request(url + "/v1/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)["choices"][0]["text"]


def unseen_in(sample):
    values = {field.name: getattr(sample, field.name) for field in fields(sample)}
    return {name: value.reason for name, value in values.items() if isinstance(value, Unseen)}


async def run(case, outcome):
    told = outcome[case["name"]] = {"events": [], "answer": None, "raised": None, "verdict": None, "unseen": []}
    supervision = supervise(
        little_server_command(**{"phase_seconds": 0.1, "hold_mb": 2, "tp": 2, **case.get("server", {})}),
        engine=case.get("engine"),
        env={**os.environ, **case.get("env", {})},
        limits=Limits(**case.get("limits", {})),
        retry=Retry(stop=tenacity.stop_after_attempt(1)),
        hooks=[lambda event: told["events"].append(event.as_json())],
    )
    try:
        async with supervision as server:
            if case.get("kill_guardian"):
                guarded = supervision.now.guarded
                os.kill(guarded.guardian_pid, signal.SIGKILL)
                while guarded.guardian_alive:
                    await anyio.sleep(0.01)
                last = (await server.sample()).t
                while (await server.sample()).t == last:
                    await anyio.sleep(0.01)
                told["said_to_have_ended"] = guarded.exit is not None
            if case.get("die"):
                os.kill(os.getpid(), signal.SIGKILL)
            if case.get("diagnose"):
                words = [sys.executable, "-m", "hangguard", "diagnose", "--within", "8", str(server.pid)]
                done = await anyio.run_process(words, check=False)
                told["diagnosed"] = [done.returncode, done.stdout.decode(), done.stderr.decode()]
            told["answer"] = await anyio.to_thread.run_sync(complete, server.url)
            told["unseen"] = unseen_in(await server.sample())
    except (GaveUp, LeftBehind) as gave_up:
        told["raised"] = {"type": type(gave_up).__name__, "text": str(gave_up)}
    last = supervision.history[-1]
    told["verdict"] = {"verdict": last.verdict.verdict, "kind": last.verdict.kind, "why": last.verdict.why}
    told["verdict"]["unseen"] = list(getattr(last.verdict, "unseen", ()))
    told["exit_code"] = last.exit_code
    told["log_path"] = last.log_path
    told["release"] = {
        "answer": last.release.answer,
        "items": {item.resource: [item.answer, item.detail] for item in last.release.items},
        "left_behind": list(last.release.left_behind),
        "files": [[file.path, file.answer, file.why] for file in last.release.files],
        "unattributed": list(last.release.unattributed_files),
    }


async def main():
    outcome = {}
    async with anyio.create_task_group() as tasks:
        for case in CASES:
            tasks.start_soon(run, json.loads(case), outcome)
    print(json.dumps(outcome))


anyio.run(main, backend=BACKEND)
