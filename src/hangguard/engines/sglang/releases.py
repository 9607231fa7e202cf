"""Which releases of SGLang were read and run: the sources that the rows of its tables name."""

from __future__ import annotations

LAST_READ = "0.5.23"
READ = "released source, 0.4.6.post5 to 0.5.23"
RAN = "log of a real start, 0.5.16 and 0.5.23"
