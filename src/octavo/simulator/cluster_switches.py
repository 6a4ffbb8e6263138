"""The switches of a cluster, each as what a simulation of it looks like with that one changed. Plain lists; runs nothing.

Those of an engine are thrown on all workers at once (``switches``); here are the others: how many workers, what each does, and who gets
what.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from octavo.core.cluster_window import ClusterWindow, WindowAbsence, WindowFrontEnd
from octavo.costs.coefficients import Coefficients
from octavo.distributed.router import ROUTERS
from octavo.simulator.engine_spec import EngineSpec
from octavo.simulator.outages import Outage
from octavo.simulator.switches import ONE_SALT, Switch, can_hand_over, own_switches, spec_of, unsalted
from octavo.simulator.window_load import WindowLoad

_CALLED = {"both": "worker", "prefill": "prefill worker", "decode": "decode worker"}
_ROUTERS = {
    "shortest-queue": "to the worker with the fewest tokens to compute",
    "predicted-seconds": "to the worker that is done soonest with what it has",
    "round-robin": "to each worker in turn",
    "prefix-affinity": "requests that begin alike go to the same worker, unless that has much more to do",
    "soonest": "to where it would be done soonest, by what is cached and what waits there",
}


@dataclass(frozen=True, slots=True)
class Setup:
    """A cluster: its workers, and how requests are spread. ``absences``: of workers by their names; all others are there all the time."""

    specs: tuple[EngineSpec, ...]
    front_end: WindowFrontEnd
    absences: Mapping[str, tuple[WindowAbsence, ...]] = field(default_factory=dict)

    def stays(self, spec: EngineSpec) -> bool:
        """It is there in the end: those that are not are none that a flag counts, or that could be switched."""
        return all(one.to_s is not None for one in self.absences.get(spec.name, ()))

    @property
    def staying(self) -> list[EngineSpec]:
        return [spec for spec in self.specs if self.stays(spec)]

    @property
    def roles(self) -> list[str]:
        """Of those that stay."""
        return [spec.role for spec in self.staying]

    def with_roles(self, roles: Iterable[str]) -> Setup:
        """The same workers in other roles; those that do not stay do both."""
        given = iter(roles)
        specs = tuple(replace(spec, role=next(given) if self.stays(spec) else "both") for spec in self.specs)
        assert next(given, None) is None, "more roles than workers"
        return replace(self, specs=specs)

    def without(self, spec: EngineSpec) -> Setup:
        return replace(self, specs=tuple(one for one in self.specs if one is not spec))

    def outages(self, begin_s: float) -> list[Outage]:
        """``begin_s``: when the window begins in the simulation."""
        found = []
        for place, spec in enumerate(self.specs):
            for one in self.absences.get(spec.name, ()):
                at_s, back_s = begin_s + one.from_s if one.from_s else 0.0, math.inf if one.to_s is None else begin_s + one.to_s
                found.append(Outage(place, at_s, back_s, one.drained, one.is_new))
        return found

    @property
    def flag(self) -> str:
        """As the command line has it."""
        counts, num = Counter(self.roles), len(self.roles)
        named = ",".join(f"{role}={counts[role]}" for role in ("both", "prefill", "decode") if counts[role])
        return f"--workers {num}" if num == counts["both"] else f"--workers {named}"


@dataclass(frozen=True, slots=True)
class ClusterSwitch:
    """See ``Switch``."""

    kind: str
    change: str
    why: str
    setup: Setup
    load: WindowLoad | None = None  # None: the window's


def setup_of(window: ClusterWindow, load: WindowLoad, costs: Iterable[Coefficients]) -> Setup:
    """The recorded cluster, unchanged. ``costs``: of the steps of each worker. All have the same settings, each its own size."""
    same = window.engine
    specs = []
    for worker, cost in zip(window.workers, costs, strict=True):
        engine = replace(
            worker.engine, scheduler=same.scheduler, cache=same.cache, spec=same.spec, kv_dtype=same.kv_dtype, acceptance=same.acceptance
        )
        specs.append(replace(spec_of(engine, load, cost), name=worker.name, role=worker.role))
    return Setup(tuple(specs), window.front_end, {worker.name: worker.absences for worker in window.workers if worker.absences})


def cluster_switches(window: ClusterWindow, load: WindowLoad, setup: Setup, cost: Coefficients) -> list[ClusterSwitch]:
    """All that can be tried, the ones that help most often first."""
    return [
        *_more(setup), *_of_engines(window, setup), *_roles(setup), *_routers(setup), *_fewer(setup), *_salt(window, setup, cost),
    ]  # fmt: skip


def _more(setup: Setup) -> Iterator[ClusterSwitch]:
    for role in dict.fromkeys(setup.roles):
        like = next(spec for spec in setup.staying if spec.role == role)
        more = replace(setup, specs=(*setup.specs, replace(like, name=f"another {like.name}")))
        yield ClusterSwitch(f"more_{role}", f"one {_CALLED[role]} more ({more.flag})", f"on a machine like that of {like.name}", more)


def _fewer(setup: Setup) -> Iterator[ClusterSwitch]:
    for role, number in Counter(setup.roles).items():
        if number > 1:
            fewer = setup.without([spec for spec in setup.staying if spec.role == role][-1])
            why = "a machine less to pay for, if what it costs in time is bearable"
            yield ClusterSwitch(f"fewer_{role}", f"one {_CALLED[role]} less ({fewer.flag})", why, fewer)


def _of_engines(window: ClusterWindow, setup: Setup) -> Iterator[ClusterSwitch]:
    """Of each worker the same switch: which there are follows from the settings, which all share."""
    for alike in zip(*(own_switches(window, spec) for spec in setup.specs), strict=True):
        specs = tuple(spec for one in alike for spec in one.specs)
        yield ClusterSwitch(alike[0].kind, _change(alike), alike[0].why, replace(setup, specs=specs))


def _change(alike: tuple[Switch, ...]) -> str:
    """Of workers of different sizes: the pool alone is a number of each."""
    changes = {one.change for one in alike}
    return changes.pop() if len(changes) == 1 else "twice the KV blocks of each worker (--kv-cache-memory or --num-kv-blocks)"


def _roles(setup: Setup) -> Iterator[ClusterSwitch]:
    """Prefill and decode apart, together, or in other parts, by as many workers."""
    num, counts = len(setup.roles), Counter(setup.roles)
    if counts["both"] == num and num > 1 and all(map(can_hand_over, setup.specs)):
        for num_prefill in dict.fromkeys((1, num // 2, num - 1)):
            apart = setup.with_roles(["prefill"] * num_prefill + ["decode"] * (num - num_prefill))
            why = "no prompt stands between the tokens of an answer, and KV goes from one to the other"
            yield ClusterSwitch("apart", f"prefill and decode apart ({apart.flag})", why, apart)
    if not counts["both"]:
        together = setup.with_roles(["both"] * num)
        why = "every worker does both, and no KV is moved"
        yield ClusterSwitch("together", f"prefill and decode together ({together.flag})", why, together)
        for role, other in (("decode", "prefill"), ("prefill", "decode")):
            if counts[role] > 1:
                last = max(i for i, one in enumerate(setup.roles) if one == role)
                moved = setup.with_roles([*setup.roles[:last], other, *setup.roles[last + 1 :]])
                yield ClusterSwitch("split", f"{moved.flag}", f"one worker does {other} in place of {role}", moved)


def _routers(setup: Setup) -> Iterator[ClusterSwitch]:
    """Where there is somebody to choose from."""
    if sum(spec.role != "decode" for spec in setup.specs) < 2:
        return
    for name in ROUTERS:
        if name != setup.front_end.router:
            other = replace(setup, front_end=replace(setup.front_end, router=name))
            yield ClusterSwitch("router", f"--router {name}", f"a request goes {_ROUTERS[name]}", other)


def _salt(window: ClusterWindow, setup: Setup, cost: Coefficients) -> Iterator[ClusterSwitch]:
    shared = unsalted(window, setup.specs[0], cost)
    if shared is not None:
        one = replace(setup, specs=tuple(replace(spec, text=shared.text) for spec in setup.specs))
        yield ClusterSwitch("salt", ONE_SALT, "equal beginnings of all are computed once", one, shared)
