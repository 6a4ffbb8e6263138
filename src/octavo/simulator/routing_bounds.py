"""The least prompt tokens that routers can let engines compute of conversations: what ways of routing are held against.

    least        every block once, in caches without end: no router computes less
    one cache    one engine with the blocks of all, as fast as all: what there is to evict is the oldest of all there is
    by session   each conversation where it began, which is with whom the fewest prompt tokens were sent so far: nobody has to see a cache

The last two run real caches, which evict the least recently used; with these caches no more is known in advance. Owns these three alone.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

from octavo.backends.sim import PlaceholderText
from octavo.core.prefix_index import Namespace, prompt_keys
from octavo.costs.scaled import scaled
from octavo.distributed.router import RoundRobin
from octavo.distributed.views import EngineView, Router, RouteRequest
from octavo.simulator.engine_spec import EngineSpec
from octavo.simulator.routing_study import ANSWER_TOKEN, RoutingCase
from octavo.simulator.simulation import Simulation, SimulationOptions
from octavo.workload.requests import WorkloadRequest

BOUNDS = ("least", "one cache", "by session")


@dataclass(frozen=True, slots=True)
class Bound:
    name: str
    seed: int
    num_prompt: int
    num_computed: int

    def to_dict(self) -> dict[str, object]:
        return {"bound": self.name, "seed": self.seed, "num_prompt": self.num_prompt, "num_computed": self.num_computed}


class BySession(Router):
    """A session that is new goes where the fewest prompt tokens were sent so far, and stays there."""

    def __init__(self) -> None:
        self._homes = dict[str, int]()
        self._num_sent = dict[int, int]()

    def choose(self, request: RouteRequest, engines: Seq[EngineView]) -> int:
        place = min(range(len(engines)), key=lambda i: self._num_sent.get(i, 0))
        if request.session is not None:
            place = self._homes.setdefault(request.session, place)
        self._num_sent[place] = self._num_sent.get(place, 0) + request.num_prompt
        return place


def least_computed(requests: Seq[WorkloadRequest], block_size: int) -> int:
    """Prompt tokens that are computed when every full block of prompts that came before, and of the answers to them, is found."""
    seen, num_computed = set[bytes](), 0
    for request in requests:
        prompt = request.prompt_token_ids
        num_found = 0
        for key in prompt_keys("sim", Namespace(), prompt, block_size):
            if key not in seen:
                break
            num_found += 1
        num_computed += len(prompt) - num_found * block_size
        seen.update(prompt_keys("sim", Namespace(), prompt + [ANSWER_TOKEN] * request.num_output, block_size))
    return num_computed


def bounds(spec: EngineSpec, case: RoutingCase, seed: int) -> list[Bound]:
    """In the order of ``BOUNDS``."""
    requests = case.requests(seed)
    num_prompt = sum(len(request.prompt_token_ids) for request in requests)
    whole = replace(spec, num_blocks=spec.num_blocks * case.num_engines, cost=scaled(spec.cost, 1.0 / case.num_engines))
    computed = (
        least_computed(requests, spec.cache.block_size),
        _computed([whole], RoundRobin(), requests, seed),
        _computed([spec] * case.num_engines, BySession(), requests, seed),
    )
    return [Bound(name, seed, num_prompt, num_computed) for name, num_computed in zip(BOUNDS, computed, strict=True)]


def _computed(specs: Seq[EngineSpec], router: Router, requests: Seq[WorkloadRequest], seed: int) -> int:
    text = PlaceholderText(only=ANSWER_TOKEN)
    report = Simulation([replace(spec, text=text) for spec in specs], router, SimulationOptions(seed=seed)).run(requests)
    return report.prompt_tokens - report.cached_tokens
