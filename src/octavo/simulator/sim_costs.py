"""Prices for routers of a simulation: each engine's own cost model."""

from __future__ import annotations

from typing import cast

from octavo.distributed.views import Costs, EngineView
from octavo.simulator.sim_engine import SimEngine


class SimCosts(Costs):
    """Of engines that are all ``SimEngine``."""

    def prompt_s(self, engine: EngineView, start: int, num_tokens: int) -> float:
        return cast(SimEngine, engine).prompt_s(start, num_tokens)

    def token_s(self, engine: EngineView, num_sequences: int, num_context: int) -> float:
        return cast(SimEngine, engine).token_s(num_sequences, num_context)
