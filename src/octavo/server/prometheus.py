"""GET /metrics: families of samples in Prometheus' text format. Which there are is the business of ``engine.metric_families``."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from octavo.engine.serving import MetricFamily

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric


def exposition(families: Sequence[MetricFamily]) -> tuple[bytes, bytes]:
    """(body, content type)."""
    from prometheus_client import CollectorRegistry
    from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(families))
    return generate_latest(registry), CONTENT_TYPE_LATEST.encode()


class _Collector:
    def __init__(self, families: Sequence[MetricFamily]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        return map(_metric, self._families)


def _metric(family: MetricFamily) -> Metric:
    from prometheus_client.metrics_core import Metric

    metric = Metric(family.name, family.help, family.kind)
    suffix = "_total" if family.kind == "counter" else ""
    for labels, value in family.samples:
        if isinstance(value, Sequence):
            _add_histogram(metric, family, labels, value)
        else:
            metric.add_sample(family.name + suffix, dict(labels), math.nan if value is None else value)
    return metric


def _add_histogram(metric: Metric, family: MetricFamily, labels: Mapping[str, str], counts: Sequence[float]) -> None:
    count = 0.0
    for bound, n in zip((*map(str, family.bounds), "+Inf"), counts, strict=False):
        count += n
        metric.add_sample(family.name + "_bucket", {**labels, "le": bound}, count)
    metric.add_sample(family.name + "_count", dict(labels), count)
    metric.add_sample(family.name + "_sum", dict(labels), counts[-1])
