"""Trials: fleets of engines under the load at a rate, each simulated once by seed, with a limit on all of them together.

A trial stops as soon as too many requests have missed their limits, so that fleets which fail cost little. Deterministic: what is left out
when the limit is reached depends on the order of questions, never on the clock.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from octavo.distributed.handoff import Link
from octavo.distributed.router import ShortestQueue
from octavo.planning.kinds import Engine, KindFit
from octavo.planning.load import PlanLoad
from octavo.simulator.handing_over import HandoffOptions
from octavo.simulator.records import Slo
from octavo.simulator.simulation import Simulation, SimulationOptions

_TURNS = 6  # requests of a trial for each that runs at a time
_LEAST_REQUESTS = 200  # of a trial, for each engine


class TrialLimit(RuntimeError):
    """As many requests as were allowed have been simulated."""


@dataclass(frozen=True, slots=True)
class Group:
    """``count`` engines alike. ``name``: that of their ``KindFit``."""

    name: str
    role: str
    count: int


@dataclass(frozen=True, slots=True)
class Fleet:
    """``cells`` equal parts, each with a router of its own and ``groups`` of engines: what is simulated is one of them."""

    groups: tuple[Group, ...]
    cells: int = 1

    @property
    def cell_size(self) -> int:
        return sum(group.count for group in self.groups)

    @property
    def num_engines(self) -> int:
        return self.cells * self.cell_size

    @property
    def is_split(self) -> bool:
        return len(self.groups) > 1

    def count(self, role: str) -> int:
        """Engines of that role, over all cells."""
        return self.cells * sum(group.count for group in self.groups if group.role == role)

    def __str__(self) -> str:
        words = {"both": "", "prefill": " for prefill", "decode": " for decode"}
        return " + ".join(f"{self.cells * group.count} x {group.name}{words[group.role]}" for group in self.groups)


@dataclass(frozen=True, slots=True)
class Trial:
    """A fleet at a rate, with one seed. ``stopped``: too many requests had missed their limits before the end; ``attainment``, the share
    within the limits, then counts those that had ended. ``broken``: share of requests that broke each limit."""

    fleet: Fleet
    rate: float
    seed: int
    holds: bool
    stopped: bool
    attainment: float
    broken: dict[str, float]
    num_requests: int
    watts: float
    ttft_p90_s: float | None
    itl_p90_s: float | None
    first_refusal: str | None = None

    def to_dict(self) -> dict[str, object]:
        return {
            "fleet": str(self.fleet), "rate": self.rate, "seed": self.seed, "holds": self.holds, "stopped_early": self.stopped,
            "attainment": self.attainment, "broken": self.broken, "num_requests": self.num_requests,
            "ttft_p90_s": self.ttft_p90_s, "itl_p90_s": self.itl_p90_s,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class TrialOptions:
    """``attainment``: share of requests that are to be within ``slo``. ``most_requests``: of one trial; ``most_simulated``: of all."""

    slo: Slo
    attainment: float = 0.9
    seeds: Seq[int] = (0, 1, 2)
    arrivals: str = "poisson"
    most_requests: int = 2000
    most_simulated: int = 24_000
    link_bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        if not 0.0 < self.attainment <= 1.0:
            raise ValueError(f"attainment: {self.attainment!r} is not allowed; above 0 and at most 1")
        if not self.seeds or len(set(self.seeds)) != len(self.seeds):
            raise ValueError(f"seeds: {list(self.seeds)!r} is not allowed; at least one, and each once")
        for name in ("most_requests", "most_simulated"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: {getattr(self, name)!r} is not allowed; at least 1")


@dataclass(slots=True)
class Trials:
    """``sequences``: how many run at a time on an engine of each fit, about: a trial is several times as long."""

    engine: Engine
    load: PlanLoad
    options: TrialOptions
    fits: dict[str, KindFit]
    sequences: dict[str, int]
    progress: Callable[[Trial], None] = lambda trial: None
    num_simulated: int = 0
    done: list[Trial] = field(default_factory=list)
    _known: dict[tuple[Fleet, float, int, float], Trial] = field(default_factory=dict)

    def holds(self, fleet: Fleet, rate: float, seed: int) -> bool:
        return self.trial(fleet, rate, seed).holds

    def trial(self, fleet: Fleet, rate: float, seed: int, slower: float = 1.0) -> Trial:
        """``rate``: of the whole fleet. ``slower``: every step takes so many times as long. Raises TrialLimit."""
        key = fleet, rate, seed, slower
        if key not in self._known:
            if self.num_simulated >= self.options.most_simulated:
                raise TrialLimit(f"{self.options.most_simulated} requests have been simulated")
            self._known[key] = found = self._run(fleet, rate, seed, slower)
            self.num_simulated += found.num_requests
            if slower == 1.0:
                self.done.append(found)
            self.progress(found)
        return self._known[key]

    def num_requests(self, fleet: Fleet) -> int:
        """Of a trial: enough for a steady state to come about, several times what runs at once."""
        running = sum(group.count * self.sequences[group.name] for group in fleet.groups)
        return min(max(_TURNS * running, _LEAST_REQUESTS * fleet.cell_size), self.options.most_requests)

    def _run(self, fleet: Fleet, rate: float, seed: int, slower: float) -> Trial:
        options, num_requests = self.options, self.num_requests(fleet)
        specs = [
            self.fits[group.name].spec(self.engine, group.role, slower) for group in fleet.groups for _ in range(group.count)
        ]  # fmt: skip
        most_misses = int((1.0 - options.attainment) * num_requests + 1e-9)
        run_options = SimulationOptions(options.slo, seed, most_misses=most_misses, handoff=HandoffOptions(self._link(fleet)))
        requests = self.load.requests(rate / fleet.cells, seed, num_requests, options.arrivals)
        report = Simulation(specs, ShortestQueue(), run_options).run(requests)
        num_ended = report.num_completed + report.num_refused + report.num_failed
        attained = round((report.slo_attainment or 0.0) * report.num_arrived)
        stopped = num_ended < num_requests
        attainment = attained / num_ended if num_ended else 0.0
        broken = {name: count / num_ended for name, count in report.num_broken.items()}
        watts = report.energy_j / report.duration_s * fleet.cells if report.duration_s else 0.0
        return Trial(
            fleet, rate, seed, not stopped and attained >= num_requests - most_misses, stopped, attainment, broken, report.num_arrived,
            watts, report.ttft_s["p90"], report.itl_s["p90"], report.first_refusal,
        )  # fmt: skip

    def _link(self, fleet: Fleet) -> Link:
        """As fast as the slower end."""
        ends = [self.fits[group.name].kind for group in fleet.groups]
        bytes_per_s = self.options.link_bytes_per_s or min(kind.link_bytes_per_s for kind in ends)
        return Link(bytes_per_s, max(kind.link_latency_s for kind in ends))
