"""PagedAttention (Kwon et al., SOSP 2023), figure 13b: requests that run at once, Alpaca at 30 requests per second.

Its published means are 19.31 tokens in and 58.45 out; the shape is that of ``bench.waste``, as for ShareGPT, since none is published.
"""

from __future__ import annotations

from octavo.reproduce.batched import Batched, figure_of
from octavo.reproduce.figure import Figure
from octavo.reproduce.setup import Setup

NUMBER = 7
NAME = "batched-alpaca"
PUBLISHED = {"max": 7.00, "pow2": 43.24, "oracle": 72.75, "paged": 132.44}


def run(setup: Setup) -> Figure:
    return figure_of(Batched(NUMBER, "Alpaca", 30.0, (19.31, 58.45), PUBLISHED, 300.0, 60.0), setup)
