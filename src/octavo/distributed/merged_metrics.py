"""Metrics of a cluster: every worker's samples with its name and role as labels, beside what the front end counts itself. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from octavo.engine.serving import MetricFamily

FRONT_END = "front_end"  # the role of what is no worker


def merged_families(own: Iterable[MetricFamily], told: Iterable[tuple[str, str, Iterable[MetricFamily]]]) -> list[MetricFamily]:
    """``told``: a worker's name, its role, and what it counts. Families of one name become one; the front end's role is its own."""
    merged: dict[str, MetricFamily] = {}
    for worker, role, families in (("", FRONT_END, own), *told):
        for family in families:
            into = merged.setdefault(family.name, MetricFamily(family.name, family.kind, family.help, [], family.bounds))
            if into.kind != family.kind or list(into.bounds) != list(family.bounds):
                continue  # of another version: what cannot be shown beside the others is left out
            into.samples += [({**labels, "worker": worker, "role": role}, value) for labels, value in family.samples]
    return list(merged.values())
