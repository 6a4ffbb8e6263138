"""A simulated cluster with a front end before it: requests wait there, and engines are seen as they tell, not as they are.

Owns what of a simulation is another with one; who goes where and when is ``front_end``'s.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from collections.abc import Set

from octavo.core.request import ParameterError, Request
from octavo.distributed.dispatcher import QueueFull
from octavo.distributed.roles import RolePools
from octavo.distributed.router import Router, RouteRequest, ShortestQueue
from octavo.simulator.engine_spec import EngineSpec
from octavo.simulator.front_end import FrontEnd, FrontEndOptions
from octavo.simulator.sim_engine import SimEngine
from octavo.simulator.simulation import Simulation, SimulationOptions
from octavo.workload.requests import WorkloadRequest


class FrontedSimulation(Simulation):
    """As in a cluster, engines of role both may stand in for those that go on with answers. ValueError for ``options`` that only a
    simulation without a front end has."""

    def __init__(
        self,
        specs: Seq[EngineSpec],
        router: Router | None,
        options: SimulationOptions | None = None,
        front_end: FrontEndOptions | None = None,
    ) -> None:
        options = options or SimulationOptions()
        if options.scale or options.mixed is not None:
            raise ValueError("scale, mixed: they are not allowed with a front end, which has roles of its own and all its engines")
        self._chosen, self._by = front_end or FrontEndOptions(), router or ShortestQueue()
        self._most_output: dict[str, int] = {}  # of live requests that allow more than they make
        super().__init__(specs, self._by, options)

    def _check_roles(self, roles: Set[str]) -> None:
        if "both" not in roles:
            super()._check_roles(roles)

    def _make_pools(self) -> RolePools:
        self._front = FrontEnd(self._by, self._chosen, self.engines, self.clock.now)
        return self._front.pools

    # --- engines --------------------------------------------------------------------------------------------------------------------------

    def _due_s(self) -> float:
        return self._front.next_s()

    def _stepped(self, engine: SimEngine) -> None:
        self._front.stepped(engine)

    def _begin_steps(self, now: float) -> None:
        """What waits and may go goes to its engine first."""
        while len(self._front) and (sent := self._front.next(now)) is not None:
            if sent.receiver is not None:
                self._requests[sent.request.request_id] = sent.request, sent.receiver
            self._add(self.engines[sent.engine], sent.request)
        super()._begin_steps(now)

    @property
    def _is_held(self) -> bool:
        return bool(len(self._front))

    def _closed(self, index: int) -> None:
        self._front.closed(index)

    def _lost(self, index: int) -> None:
        self._front.gone(index)

    def _opened(self, index: int) -> None:
        self._front.back(index)
        super()._opened(index)

    # --- requests -------------------------------------------------------------------------------------------------------------------------

    def _request(self, work: WorkloadRequest, number: int, arrival_s: float) -> Request:
        request = super()._request(work, number, arrival_s)
        if work.most_output is not None:
            self._most_output[request.request_id] = work.most_output
        return request

    def _place(self, request: Request) -> bool:
        """A request waits until its turn is. False: it can never run."""
        place = self._chosen.placed.get(request.request_id)
        if place is not None and place not in self._down:
            return self._add(self.engines[place], request)
        try:
            self._front.submit(request, self._told_of(request), self.clock.now())
        except (ParameterError, QueueFull) as error:
            return self._refuse(request, error)
        return True

    def _place_again(self, request: Request) -> None:
        try:
            self._front.resubmit(request, self._told_of(request))
        except ParameterError as error:
            self._refuse(request, error)

    def _told_of(self, request: Request) -> RouteRequest:
        """No more than a real front end knows: not how long its answer will be."""
        name, num_output = request.request_id, request.params.max_tokens
        told = request.session, self._keys_of(request), request.priority, request.user, self._most_output.get(name, num_output)
        return RouteRequest(name, len(request.prompt_token_ids), None, *told)

    def _routed(self, request_id: str, num_output: int | None) -> None:
        self._most_output.pop(request_id, None)
        self._front.ended(request_id, num_output)
