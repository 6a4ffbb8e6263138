"""What would have helped a recorded window, and by how much: it is run again in the simulator, with one switch changed at a time.

    RecordedWindow ─▶ prices of its steps ─▶ the window unchanged ─▶ error against what was measured
                                          └▶ each switch          ─▶ figures with it

Gains are told between two simulations, so what the prices have wrong in both alike cancels; the error says how far to trust them. Owns the
comparison; the engines are ``simulation``'s, the switches ``switches``'.

As a program (``python -m octavo.simulator.what_if``) it reads a window, of an engine or of a cluster, as JSON from standard input
and writes one line of JSON for each result as soon as it is there, at low priority.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import asdict
from typing import TextIO

from octavo.core.cluster_window import ClusterWindow
from octavo.core.recorded_window import Figures, RecordedWindow, SwitchOutcome, WindowReplay
from octavo.costs.coefficients import coefficients_of
from octavo.costs.window_fit import fit_window
from octavo.distributed.router import Router, create_router
from octavo.simulator.cluster_what_if import ClusterWhatIf
from octavo.simulator.engine_spec import EngineSpec
from octavo.simulator.simulation import Simulation, SimulationOptions
from octavo.simulator.switches import Switch, spec_of, switches_of
from octavo.simulator.window_load import SEED, WindowLoad, load_of

_NICENESS = 15


def simulated(load: WindowLoad, specs: Seq[EngineSpec], by_prefix: bool = False) -> Figures:
    """Of the compared requests on these engines."""
    router: Router = create_router("prefix-affinity" if by_prefix else "shortest-queue", specs[0].cache.block_size)
    options = SimulationOptions(seed=SEED, concurrency=load.concurrency, keep_requests=True)
    return load.figures(Simulation(specs, router, options).run(load.requests).records)


class WhatIf:
    """The replays of one window. Raises ValueError for one that tells too little."""

    def __init__(self, window: RecordedWindow) -> None:
        known = window.engine.step_cost
        self.cost = fit_window(window.steps, None if known is None else coefficients_of(known), "steps of the window")
        self.load = load_of(window, self.cost)
        if not self.load.compared:
            raise ValueError("window: no request of it has ended; there is nothing to compare with")
        self._window = window
        self._spec = spec_of(window.engine, self.load, self.cost)
        self.switches: list[Switch] = switches_of(window, self.load, self._spec, self.cost)

    def base(self) -> WindowReplay:
        """The unchanged window; no outcomes yet."""
        figures = self.load.measured(), simulated(self.load, (self._spec,))
        notes = self.load.notes(self._window.engine)
        return WindowReplay(len(self._window.requests), len(self.load.compared), *figures, (), (), notes)

    def outcomes(self) -> Iterator[SwitchOutcome]:
        for one in self.switches:
            yield SwitchOutcome(one.kind, one.change, one.why, simulated(one.load or self.load, one.specs, one.by_prefix))


def what_if(window: RecordedWindow | ClusterWindow) -> WindowReplay:
    """All of it at once: seconds of computing."""
    one = WhatIf(window) if isinstance(window, RecordedWindow) else ClusterWhatIf(window)
    base = one.base()
    return WindowReplay(base.num_requests, base.num_compared, base.measured, base.replayed, tuple(one.outcomes()), (), base.notes)


def main(source: TextIO, out: TextIO) -> None:
    """Lines: {"switches": [change, ...]}, {"base": ...}, {"outcome": ...} for each switch; or {"error": why} alone."""

    def say(name: str, content: object) -> None:
        out.write(json.dumps({name: content}) + "\n")
        out.flush()

    try:
        data = json.load(source)
        one = ClusterWhatIf(ClusterWindow.of_dict(data)) if "workers" in data else WhatIf(RecordedWindow.of_dict(data))
    except ValueError as error:
        say("error", str(error))
        return
    say("switches", [switch.change for switch in one.switches])
    say("base", one.base().to_dict())
    for outcome in one.outcomes():
        say("outcome", asdict(outcome))


if __name__ == "__main__":
    if hasattr(os, "nice"):
        os.nice(_NICENESS)
    main(sys.stdin, sys.stdout)
