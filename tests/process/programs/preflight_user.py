"""A program that looks around before a launch, with a guardian of the test's making; prints what it found as JSON.

usage: preflight_user.py GUARDIAN WITHIN
"""

import json
import sys
import time

from hangguard import preflight
from hangguard.act import _link
from hangguard.report.preflight import as_json

_link.GUARDIAN = sys.argv[1]
began = time.monotonic()
found = preflight([sys.executable, "-c", "pass"], url="http://127.0.0.1:{port}", within=float(sys.argv[2]))
print(json.dumps({**as_json(found), "took": time.monotonic() - began}))
