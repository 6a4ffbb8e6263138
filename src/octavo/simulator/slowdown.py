"""The nine objectives of Splitwise (Patel et al., ISCA 2024, section V): how much slower than on an idle reference machine requests may be.

Owns percentiles and limits. Times are compared per request with those of the reference at the request's own prompt length, by the published
axis of the table whatever look-up the run itself used; then percentiles are taken over all requests.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from octavo.costs.tables import MachineTable
from octavo.simulator.block_cluster import ClusterResult

SHARES = (0.5, 0.9, 0.99)
LIMITS = {"ttft": (2.0, 3.0, 6.0), "tbt": (1.25, 1.5, 5.0), "e2e": (1.25, 1.5, 5.0)}


def percentiles(values: Seq[float]) -> tuple[float, ...]:
    """At ``SHARES``, between two values by a straight line; all infinite when a value is nan: somebody never ended."""
    ordered = sorted(values)
    if not ordered:
        raise ValueError("values: at least one is needed")
    if any(map(math.isnan, ordered)):
        return (math.inf,) * len(SHARES)
    found = []
    for share in SHARES:
        place = (len(ordered) - 1) * share
        low = int(place)
        high = min(low + 1, len(ordered) - 1)
        found.append(ordered[low] + (ordered[high] - ordered[low]) * (place - low))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Slowdown:
    """Percentiles of ttft, tbt and e2e over those of the reference, at ``SHARES``."""

    ttft: tuple[float, ...]
    tbt: tuple[float, ...]
    e2e: tuple[float, ...]

    @property
    def broken(self) -> list[str]:
        """The objectives that are not kept, such as "ttft p99"."""
        return [
            f"{name} p{share * 100:g}"
            for name, limits in LIMITS.items()
            for share, limit, value in zip(SHARES, limits, getattr(self, name), strict=True)
            if not value < limit
        ]

    @property
    def holds(self) -> bool:
        """Whether all nine are below their limits."""
        return not self.broken


def slowdown_of(result: ClusterResult, reference: MachineTable) -> Slowdown:
    """Of a run with at least one request."""
    ttft, tbt, e2e = [], [], []
    for num_prompt, num_output, ttft_s, tbt_s, e2e_s in zip(
        result.num_prompt, result.num_output, result.ttft_s, result.tbt_s, result.e2e_s, strict=True
    ):
        prompt_s, token_s = reference.prompt_s(num_prompt), reference.token_s(num_prompt)
        ttft.append(ttft_s / prompt_s)
        tbt.append(tbt_s / token_s)
        e2e.append(e2e_s / (prompt_s + token_s * (num_output - 1)))
    return Slowdown(percentiles(ttft), percentiles(tbt), percentiles(e2e))
