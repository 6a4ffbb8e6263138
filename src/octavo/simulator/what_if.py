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
import math
import os
import sys
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import asdict
from typing import TextIO

from octavo.core.recorded_window import Figures, RecordedWindow, SwitchOutcome, WindowReplay
from octavo.costs.step_fit import fit_steps
from octavo.distributed.router import Router, create_router
from octavo.simulator.engine_spec import EngineSpec
from octavo.simulator.simulation import Simulation, SimulationOptions
from octavo.simulator.switches import Switch, spec_of, switches_of
from octavo.simulator.window_load import SEED, WindowLoad, load_of

_NICENESS = 15
_MOST_MISSING = 0.02  # of the compared requests that a simulation may leave out, refused ones, before it tells nothing

Times = tuple[float, float, float | None, float | None, int]
"""(arrival, wall, ttft, itl, output tokens) of a request, in seconds."""


def figures_of(times: Seq[Times]) -> Figures:
    """Percentiles by nearest rank."""
    if not times:
        return Figures(None, None, None, None, None, None)
    ttft = sorted(one[2] for one in times if one[2] is not None)
    itl = sorted(one[3] for one in times if one[3] is not None)
    num_tokens = sum(one[4] for one in times)
    lasted_s = max(one[0] + one[1] for one in times) - min(one[0] for one in times)
    return Figures(
        sum(one[1] for one in times) / len(times), _rank(ttft, 0.5), _rank(ttft, 0.99), _rank(itl, 0.5), _rank(itl, 0.99),
        lasted_s / num_tokens if num_tokens else None,
    )  # fmt: skip


def _rank(ordered: Seq[float], share: float) -> float | None:
    return ordered[math.ceil(share * len(ordered)) - 1] if ordered else None


def simulated(load: WindowLoad, specs: Seq[EngineSpec], by_prefix: bool = False) -> Figures:
    """Of the compared requests on these engines."""
    router: Router = create_router("prefix-affinity" if by_prefix else "shortest-queue", specs[0].cache.block_size)
    options = SimulationOptions(seed=SEED, concurrency=load.concurrency, keep_requests=True)
    report = Simulation(specs, router, options).run(load.requests)
    times = [
        (record.arrival_s, record.e2e_s, record.ttft_s, record.itl_s, record.num_output)
        for record in report.records
        if int(record.request_id) in load.compared
    ]
    return figures_of(times if len(times) >= (1.0 - _MOST_MISSING) * len(load.compared) else ())


def measured(load: WindowLoad) -> Figures:
    return figures_of([(r.arrival_s, r.wall_s or 0.0, r.ttft_s, r.itl_s, r.num_output) for r in load.compared.values()])


class WhatIf:
    """The replays of one window. Raises ValueError for one that tells too little."""

    def __init__(self, window: RecordedWindow) -> None:
        self.cost = fit_steps(window.steps, "steps of the window")
        self.load = load_of(window, self.cost)
        if not self.load.compared:
            raise ValueError("window: no request of it has ended; there is nothing to compare with")
        self._window = window
        self._spec = spec_of(window, self.load, self.cost)
        self.switches: list[Switch] = switches_of(window, self.load, self._spec, self.cost)

    def base(self) -> WindowReplay:
        """The unchanged window; no outcomes yet."""
        figures = measured(self.load), simulated(self.load, (self._spec,))
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
        if engine.has_groups:
            notes.append("the window of sliding-window layers is left out: all KV counts as kept")
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
