"""A user's program with a server of member_server.py: says who is who, and waits to be killed.

Arguments: folder, the server's log, then the server's command. A child of its own lives beside the server.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import anyio

from hangguard.act.spawn import guarded

FOLDER, LOG, PORT, *COMMAND = sys.argv[1:]


async def main():
    own = subprocess.Popen(["/bin/sleep", "119.1"])
    async with guarded(
        argv=COMMAND, env=dict(os.environ), cwd=FOLDER, log_path=LOG, lock_path=None,
        death_grace=0.5, on_death="stop", pristine=False, port=int(PORT),
    ) as server:  # fmt: skip
        said = {"guardian": server.guardian_pid, "pid": server.pid, "own child": own.pid}
        Path(FOLDER, ".told").write_text(json.dumps(said))
        Path(FOLDER, ".told").rename(FOLDER + "/told")
        await anyio.sleep(110)


anyio.run(main)
