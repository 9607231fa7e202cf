"""Counters out of Prometheus' text form. Pure.

https://prometheus.io/docs/instrumenting/exposition_formats/#text-based-format
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from hangguard.facts import Metric, Serving

_LINE = re.compile(r'(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>(?:[^"}]|"(?:[^"\\]|\\.)*")*)\})?[ \t]+(?P<value>\S+)')
_LABEL = re.compile(r'(?<!\w)(\w+)="((?:[^"\\]|\\.)*)"')

_REPLICAS = frozenset({"tp_rank", "pp_rank", "attn_cp_rank", "moe_dp_rank", "moe_ep_rank", "pid"})
"""Labels of ranks that work on the same requests: SGLang's --enable-metrics-for-all-schedulers has a line for each."""


def read_metrics(text: str, metrics: tuple[Metric, ...], *, at: float) -> Serving:
    """Return what the metrics say; a counter that is not among them is ``None``.

    Lines are added up over engines and models; of ranks that share the work the one that is furthest counts.
    """
    lines: dict[str, list[tuple[dict[str, str], float]]] = {metric.name: [] for metric in metrics}
    for name, labels, value in _lines(text, tuple(lines)):
        lines[name].append((labels, value))
    seen: dict[str, list[float]] = {}
    for metric in metrics:
        values = _values(metric, lines[metric.name])
        if values and metric.field not in seen:
            seen[metric.field] = values
    return Serving(
        running=_sum(seen.get("running")),
        waiting=_sum(seen.get("waiting")),
        generated_tokens=_sum(seen.get("generated_tokens")),
        prompt_tokens=_sum(seen.get("prompt_tokens")),
        is_asleep=min(seen["awake"]) == 0 if "awake" in seen else None,
        at=at,
    )


def _lines(text: str, names: tuple[str, ...]) -> Iterator[tuple[str, dict[str, str], float]]:
    for line in text.splitlines():
        if not line.startswith(names):
            continue
        found = _LINE.match(line)
        if found is None or found["name"] not in names:
            continue
        try:
            value = float(found["value"])
        except ValueError:
            continue
        if math.isfinite(value):
            yield found["name"], dict(_LABEL.findall(found["labels"] or "")), value


def _values(metric: Metric, lines: list[tuple[dict[str, str], float]]) -> list[float]:
    """Return one value for each line that counts, ranks that share their work taken together."""
    together: dict[tuple[tuple[str, str], ...], float] = {}
    for labels, value in lines:
        if all(re.fullmatch(pattern, labels.get(label, "")) for label, pattern in metric.labels):
            key = tuple(sorted(item for item in labels.items() if item[0] not in _REPLICAS))
            together[key] = max(value, together.get(key, value))
    return list(together.values())


def _sum(values: list[float] | None) -> int | None:
    total = math.inf if values is None else sum(values)
    return int(total) if math.isfinite(total) else None
