"""Metrics of a cluster: every worker's samples with its name and role as labels, beside what the front end counts itself. Pure.

What a worker tells may be of another version, or wrong: what Prometheus' text format has no form for, or cannot have beside the rest, is
left out, and the rest is shown. One such line, and a scraper would drop all.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence

from octavo.engine.serving import MetricFamily

FRONT_END = "front_end"  # the role of what is no worker
Sample = tuple[Mapping[str, str], float | Sequence[float] | None]
_SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_count", "_sum")}  # of samples, by kind
_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_LABEL = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")


def merged_families(own: Iterable[MetricFamily], told: Iterable[tuple[str, str, Iterable[MetricFamily]]]) -> list[MetricFamily]:
    """``told``: a worker's name, its role, and what it counts. Families of one name become one; the front end's role is its own."""
    merged: dict[str, MetricFamily] = {}
    owners: dict[str, str] = {}  # of the names that samples have
    for worker, role, families in (("", FRONT_END, own), *told):
        for family in filter(_has_form, families):
            if any(owners.setdefault(name, family.name) != family.name for name in _sample_names(family)):
                continue
            into = merged.setdefault(family.name, MetricFamily(family.name, family.kind, family.help, [], family.bounds))
            if into.kind == family.kind and list(into.bounds) == list(family.bounds):
                into.samples += _marked(family, worker, role)
    return list(merged.values())


def _marked(family: MetricFamily, worker: str, role: str) -> list[Sample]:
    """Its samples with whose they are; of those that have the same labels the first."""
    found: dict[frozenset[tuple[str, str]], Sample] = {}
    for labels, value in family.samples:
        if _may_stand(family, labels, value):
            marked = {**labels, "worker": worker, "role": role}
            found.setdefault(frozenset(marked.items()), (marked, value))
    return list(found.values())


def _sample_names(family: MetricFamily) -> list[str]:
    return [family.name + suffix for suffix in _SUFFIXES[family.kind]]


def _has_form(family: MetricFamily) -> bool:
    bounds = list(family.bounds)
    are_classes = all(map(math.isfinite, bounds)) and all(low < high for low, high in zip(bounds, bounds[1:], strict=False))
    return _NAME.fullmatch(family.name) is not None and family.kind in _SUFFIXES and are_classes


def _may_stand(family: MetricFamily, labels: Mapping[str, str], value: float | Sequence[float] | None) -> bool:
    """A sample of the family's kind, with labels that are names. ``le`` is what a histogram's classes are told apart by."""
    has_names = all(_LABEL.fullmatch(name) and name != "le" for name in labels)
    if isinstance(value, Sequence):
        return has_names and family.kind == "histogram" and len(value) == len(family.bounds) + 2 and min(value[:-1]) >= 0
    return has_names and family.kind != "histogram"
