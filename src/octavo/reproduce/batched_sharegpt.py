"""PagedAttention (Kwon et al., SOSP 2023), figure 13a: requests that run at once, ShareGPT at 2 requests per second."""

from __future__ import annotations

from octavo.bench.waste import MEAN_OUTPUT, MEAN_PROMPT
from octavo.reproduce.batched import Batched, figure_of
from octavo.reproduce.figure import Figure
from octavo.reproduce.setup import Setup

NUMBER = 6
NAME = "batched-sharegpt"
PUBLISHED = {"max": 7.00, "pow2": 9.81, "oracle": 13.62, "paged": 30.42}


def run(setup: Setup) -> Figure:
    return figure_of(Batched(NUMBER, "ShareGPT", 2.0, (MEAN_PROMPT, MEAN_OUTPUT), PUBLISHED, 3600.0, 300.0), setup)
