"""A server that deadlocks comes up anyway. Needs neither engine nor GPU: python examples/demo_server.py

The little server of ``hangguard.testing`` starts like SGLang and really deadlocks at graph capture, unless
``--disable-cuda-graph`` is given. Nobody gives it here: hangguard finds the hang and tries it.
"""

from __future__ import annotations

import httpx

from hangguard import Event, Limits, supervise
from hangguard.testing import little_server_command


def tell(event: Event) -> None:
    print({key: value for key, value in event.as_json().items() if key in {"event", "attempt", "verdict", "change"}})


with supervise(
    little_server_command(deadlock_at_capture=True),
    engine="sglang",  # it is spelled differently, but speaks and fails like SGLang
    fallbacks="auto",  # try what may cure it, as long as it alters speed at most
    limits=Limits(ready_within=90),
    hooks=[tell],
) as server:
    assert [change.name for change in server.changes] == ["no-cuda-graph"]
    reply = httpx.post(f"{server.url}/v1/completions", json={"model": "tiny", "prompt": "2 + 2 =", "max_tokens": 4})
    print("answered:", reply.json()["choices"][0]["text"])
    (stuck,) = server.history  # the attempts before the one that runs
    print("the first attempt was", stuck.verdict.verdict, "in", stuck.verdict.phase, "and was", stuck.release.answer)
