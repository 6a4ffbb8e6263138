"""What would have helped a recorded window, and by how much: it is run again in the simulator, with one switch changed at a time.

    RecordedWindow ─▶ prices of its steps ─▶ the window unchanged ─▶ error against what was measured
                                          └▶ each switch          ─▶ figures with it

Gains are told between two simulations, so what the prices have wrong in both alike cancels; the error says how far to trust them. Owns the
comparison; the engines are ``simulation``'s, the switches ``switches``'.

As a program (``python -m octavo.simulator.what_if``) it reads a window as JSON from standard input and writes one line of JSON for each
result as soon as it is there, at low priority.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import asdict
from typing import TextIO

from octavo.core.recorded_window import Figures, RecordedWindow, SwitchOutcome, WindowReplay, WindowRequest, figures_of
from octavo.costs.coefficients import coefficients_of
from octavo.costs.window_fit import fit_window
from octavo.distributed.router import Router, create_router
from octavo.simulator.engine_spec import EngineSpec
from octavo.simulator.simulation import Simulation, SimulationOptions
from octavo.simulator.switches import Switch, spec_of, switches_of
from octavo.simulator.window_load import SEED, WindowLoad, load_of

_NICENESS = 15
_MOST_MISSING = 0.02  # of the compared requests that a simulation may leave out, refused ones, before it tells nothing


def simulated(load: WindowLoad, specs: Seq[EngineSpec], by_prefix: bool = False) -> Figures:
    """Of the compared requests on these engines."""
    router: Router = create_router("prefix-affinity" if by_prefix else "shortest-queue", specs[0].cache.block_size)
    options = SimulationOptions(seed=SEED, concurrency=load.concurrency, keep_requests=True)
    report = Simulation(specs, router, options).run(load.requests)
    ended = [
        WindowRequest(record.arrival_s, 0, record.num_output, 0, wall_s=record.e2e_s, ttft_s=record.ttft_s, itl_s=record.itl_s)
        for record in report.records
        if int(record.request_id) in load.compared
    ]
    return figures_of(ended if len(ended) >= (1.0 - _MOST_MISSING) * len(load.compared) else ())


class WhatIf:
    """The replays of one window. Raises ValueError for one that tells too little."""

    def __init__(self, window: RecordedWindow) -> None:
        known = window.engine.step_cost
        self.cost = fit_window(window.steps, None if known is None else coefficients_of(known), "steps of the window")
        self.load = load_of(window, self.cost)
        if not self.load.compared:
            raise ValueError("window: no request of it has ended; there is nothing to compare with")
        self._window = window
        self._spec = spec_of(window, self.load, self.cost)
        self.switches: list[Switch] = switches_of(window, self.load, self._spec, self.cost)

    def base(self) -> WindowReplay:
        """The unchanged window; no outcomes yet."""
        figures = figures_of(list(self.load.compared.values())), simulated(self.load, (self._spec,))
        return WindowReplay(len(self._window.requests), len(self.load.compared), *figures, (), (), self._notes())

    def outcomes(self) -> Iterator[SwitchOutcome]:
        for one in self.switches:
            yield SwitchOutcome(one.kind, one.change, one.why, simulated(one.load or self.load, one.specs, one.by_prefix))

    def _notes(self) -> tuple[str, ...]:
        engine, notes = self._window.engine, []
        if self.load.concurrency is not None:
            notes.append(f"taken as a closed loop: {self.load.concurrency} clients that each wait for their answer")
        if engine.acceptance is None and engine.foreseen is None:
            notes.append("too few answers have been seen to tell what speculation would gain")
        if engine.has_tiers:
            notes.append("the tiers of the KV cache are left out")
        return tuple(notes)


def what_if(window: RecordedWindow) -> WindowReplay:
    """All of it at once: seconds of computing."""
    one = WhatIf(window)
    base = one.base()
    return WindowReplay(base.num_requests, base.num_compared, base.measured, base.replayed, tuple(one.outcomes()), (), base.notes)


def main(source: TextIO, out: TextIO) -> None:
    """Lines: {"switches": [change, ...]}, {"base": ...}, {"outcome": ...} for each switch; or {"error": why} alone."""

    def say(name: str, content: object) -> None:
        out.write(json.dumps({name: content}) + "\n")
        out.flush()

    try:
        one = WhatIf(RecordedWindow.of_dict(json.load(source)))
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
