"""Goodput curves of a study of clusters: the share of requests that keep the limits, over the rate at which they come, for each design.

Draws what ``octavo bench goodput`` records, whenever that was; runs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.reproduce.figure import Line, Plot

_FLOOR = 50.0  # percent; a curve ends with its first point below it: farther down one is as good as another


def goodput_plot(record: Mapping[str, Any]) -> Plot:
    """A line for each arm of a goodput record: the mean over its seeds, at the rates that all of them were run at."""
    lines = []
    for arm in record["arms"]:
        split = f" {arm['num_prompt']}P+{arm['num_token']}T" if arm["num_prompt"] else f", {_WAYS[arm['way']]}"
        curves = [dict(points) for points in arm["attained"].values()]
        rates = sorted(set(curves[0]).intersection(*curves[1:]))
        points = [(rate, 100.0 * sum(curve[rate] for curve in curves) / len(curves)) for rate in rates]
        num_shown = 1 + next((i for i, (_, share) in enumerate(points) if share < _FLOOR), len(points))
        lines.append(Line(f"{arm['design']}{split}", tuple(points[:num_shown])))
    title = f"Share of requests within the limits, {record['workload']} lengths, clusters of equal power"
    needed = 100.0 * record["attainment"]
    return Plot(title, "% within the limits", lines=tuple(lines), x_label="requests per second", marks=(("needed", needed),))


_WAYS = {"first": "prompts first", "whole": "prompts whole", "chunked": "chunks", "apart": "apart", "mixed": "mixed"}
