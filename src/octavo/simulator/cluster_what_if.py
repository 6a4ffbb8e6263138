"""What would have helped a recorded window of a cluster, and by how much: as ``what_if``, with the whole cluster in the simulator.

    ClusterWindow ─▶ prices of each worker's steps ─▶ front end, router, roles, hand-offs, schedulers ─▶ error, then each switch

Owns the comparison; the cluster is ``simulation``'s, with the front end's own objects in it, the switches are ``cluster_switches``'.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import replace

from octavo.core.cluster_window import ClusterWindow
from octavo.core.recorded_window import Figures, SwitchOutcome, WindowReplay
from octavo.costs.coefficients import Coefficients, coefficients_of
from octavo.costs.window_fit import MIN_STEPS, fit_window
from octavo.distributed.dispatcher import Backpressure
from octavo.distributed.handoff import HandoffLimits, Link
from octavo.distributed.roles import MixedLimits
from octavo.distributed.router import Router, SoonestDone, create_router
from octavo.simulator.cluster_switches import ClusterSwitch, Setup, cluster_switches, setup_of
from octavo.simulator.front_end import FrontEndOptions
from octavo.simulator.fronted import FrontedSimulation
from octavo.simulator.handing_over import HandoffOptions
from octavo.simulator.simulation import SimulationOptions
from octavo.simulator.switches import KV_BYTES
from octavo.simulator.window_load import SEED, WindowLoad, load_of

UNSEEN_LINK = Link(1e9, 3e-3)  # about what shared memory between two workers of a host does (docs/cluster.md)
_MOST_POINTS = 200  # of a line: twenty thousand slopes
_FASTEST = 1e13  # bytes a second of a link that shows no slope


def costs_of(window: ClusterWindow) -> tuple[Coefficients, list[Coefficients]]:
    """What the steps of all cost, and of each worker: in the form of the former, at its own pace. A worker of one role alone has not seen
    what it would be asked to do in another. Raises FitError."""
    known = window.engine.step_cost
    base = None if known is None else coefficients_of(known)
    every = fit_window(window.steps, base, "steps of the window")
    own = [
        fit_window(worker.steps, every, f"steps of {worker.name}") if _num_priced(worker.steps) >= MIN_STEPS else every
        for worker in window.workers
    ]
    return every, own


def _num_priced(steps: Seq[Seq[float]]) -> int:
    return sum(step[0] > 0 and step[-1] > 0.0 for step in steps)


def handoffs_of(window: ClusterWindow) -> HandoffOptions:
    """What goes in one piece takes what such hand-offs took, what goes layer by layer what those took from the first token on. Of a kind
    that was not seen: in one piece UNSEEN_LINK, layer by layer the link of the others, of which the last step hides all but a layer."""
    told, engine = window.front_end.handover, window.engine
    is_packed, token_bytes = told.wire_dtype == "int8", engine.kv_bytes_per_token
    if is_packed:
        token_bytes = round(token_bytes * KV_BYTES["int8"] / KV_BYTES[engine.kv_dtype])
    kinds: tuple[list[tuple[float, float]], ...] = ([], [])
    for num_tokens, seconds in window.hand_offs:
        kinds[num_tokens >= told.min_layerwise].append((num_tokens * token_bytes, seconds))
    whole, layerwise = map(link_of, kinds)
    limits, link = HandoffLimits(told.reserve_s, told.copy_s), whole or UNSEEN_LINK
    link = link if layerwise is not None else replace(link, num_layers=engine.num_kv_layers)
    most = token_bytes if is_packed else None
    return HandoffOptions(link, limits, min_layerwise=told.min_layerwise, layerwise=layerwise, most_token_bytes=most)


def link_of(points: Seq[tuple[float, float]]) -> Link | None:
    """A line through (bytes, seconds) of hand-offs: the middle one of the slopes between any two (Theil, 1950; Sen, 1968), and of what is
    left beside it; where all are as large, as fast as UNSEEN_LINK if they were. None: there are none."""
    points = points[:: -(-len(points) // _MOST_POINTS) or 1]
    if not points:
        return None
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for i, a in enumerate(points) for b in points[i + 1 :] if a[0] != b[0]]
    alike_s = min(1.0 / UNSEEN_LINK.bytes_per_s, statistics.median(seconds for _, seconds in points) / max(1.0, points[0][0]))
    each_s = max(1.0 / _FASTEST, statistics.median(slopes) if slopes else alike_s)
    return Link(1.0 / each_s, max(0.0, statistics.median(seconds - num_bytes * each_s for num_bytes, seconds in points)))


class ClusterWhatIf:
    """The replays of one window. Raises ValueError for one that tells too little."""

    def __init__(self, window: ClusterWindow) -> None:
        self._window, self._handoff = window, handoffs_of(window)
        every, own = costs_of(window)
        self.load = load_of(window, every)
        if not self.load.compared:
            raise ValueError("window: no request of it has ended; there is nothing to compare with")
        self.setup = setup_of(window, self.load, own)
        made = [one.num_output for one in window.requests]
        self._guess = None if window.from_start else max(1, round(statistics.fmean(made)))
        self.switches: list[ClusterSwitch] = cluster_switches(window, self.load, self.setup, every)

    def base(self) -> WindowReplay:
        """The unchanged window; no outcomes yet."""
        figures = self.load.measured(), self.simulated(self.load, self.setup)
        notes = (*self._window.notes, *self.load.notes(self._window.engine))
        return WindowReplay(len(self._window.requests), len(self.load.compared), *figures, (), (), notes)

    def outcomes(self) -> Iterator[SwitchOutcome]:
        for one in self.switches:
            yield SwitchOutcome(one.kind, one.change, one.why, self.simulated(one.load or self.load, one.setup))

    def simulated(self, load: WindowLoad, setup: Setup) -> Figures:
        """Of the compared requests on this cluster."""
        told = setup.front_end
        limits = Backpressure(told.most_pending_s, told.most_sequences)
        names = [worker.name for worker in self._window.workers]
        placed = {str(number): _place(names[worker], worker, setup) for number, worker in enumerate(load.warmed)}
        mixed = MixedLimits() if self._guess is None else MixedLimits(guess_output=self._guess)
        front_end = FrontEndOptions(limits, mixed, told.may_borrow, placed)
        options = SimulationOptions(
            seed=SEED, concurrency=load.concurrency, keep_requests=True, handoff=self._handoff, outages=setup.outages(load.begin_s)
        )  # fmt: skip
        router = self._router(told.router, setup.specs[0].cache.block_size)
        return load.figures(FrontedSimulation(setup.specs, router, options, front_end).run(load.requests).records, self._window.way_s)

    def _router(self, name: str, block_size: int) -> Router:
        """What it has learned of answers it knows from the beginning, where the real one had seen some before the window."""
        if name == "soonest" and self._guess is not None:
            return SoonestDone(block_size, guess_output=self._guess)
        return create_router(name, block_size)


def _place(name: str, worker: int, setup: Setup) -> int:
    """Who has what the cache of ``name``, the worker of that number, had: itself, if it is there and computes prompts; else one that does,
    each its share. A new one has nothing."""
    able = [place for place, spec in enumerate(setup.specs) if spec.role != "decode"]
    return next((place for place in able if setup.specs[place].name == name), able[worker % len(able)])
