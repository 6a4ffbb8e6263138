"""What a simulation is told beside its engines, its router and its requests. Plain data."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from octavo.distributed.autoscale import ScaleLimits
from octavo.distributed.roles import MixedLimits
from octavo.simulator.handing_over import HandoffOptions
from octavo.simulator.outages import Outage
from octavo.simulator.records import Slo
from octavo.simulator.shared_host import HostSharing


@dataclass(frozen=True, slots=True)
class SimulationOptions:
    """``concurrency``: a closed loop of so many requests at a time; None: requests come when they are due. ``until_s``: stop there, with
    requests still on their way. ``most_misses``: stop as well when more requests than that have ended outside of ``slo``."""

    slo: Slo = field(default_factory=Slo)
    seed: int = 0
    concurrency: int | None = None
    until_s: float | None = None
    most_misses: int | None = None
    keep_requests: bool = False
    keep_gaps: bool = False
    handoff: HandoffOptions = field(default_factory=HandoffOptions)  # where there are prefill engines
    mixed: MixedLimits | None = None  # prefill and decode engines lend each other a hand
    outages: Seq[Outage] = ()
    hosts: Seq[HostSharing] = ()  # engines that hold each other up; nobody does so to those that are in none
    scale: Mapping[str, ScaleLimits] = field(default_factory=dict)  # roles whose engines come and go with the load, and how many
    jump: bool = True  # take steps that only repeat at once: the same figures, sooner
