"""On GPUs: the watch over real servers is that of ``tests/real``."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "real"))
