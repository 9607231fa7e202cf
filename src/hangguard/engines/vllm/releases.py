"""Which releases of vLLM were read and run: the sources that the rows of its tables name."""

from __future__ import annotations

READ = "released source, 0.8.5 to 0.33.0"
RAN = "log of a real start, 0.26.0 and 0.32.0"
