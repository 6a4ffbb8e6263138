"""Clusters of Splitwise (Patel et al., ISCA 2024) compared: designs, what they cost, and the highest rate at which each keeps its limits.

    design + rate + seed ─▶ trace ─▶ BlockCluster ─▶ slowdown ─▶ holds?      bracket: holds at, fails at      best split: who holds longest

Owns the machines' prices, the traces and the search; each run is done once and remembered. A bracket comes from one trace by seed on a grid
of rates: the next rate of the grid fails, but rates in between, other seeds and longer traces may say otherwise. So all seeds are shown.
Requests of a seed are the same at every rate and for every design, closer together.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path

from octavo.costs.tables import MachineTable, TableCost, read_machine_tables
from octavo.simulator.block_cluster import BlockCluster, ClusterResult, ClusterSpec
from octavo.simulator.rate_curve import RateBracket
from octavo.simulator.slowdown import Slowdown, slowdown_of
from octavo.simulator.split_search import SplitSearch
from octavo.workload.arrivals import OpenLoop
from octavo.workload.lengths import Recorded
from octavo.workload.requests import Independent
from octavo.workload.traces import read_trace

A100, H100, H100_CAPPED = "a100-80gb", "h100-80gb", "h100-80gb-pcap"
PRICES = {A100: 2.21, H100: 4.76, H100_CAPPED: 4.76}  # $ per GPU and hour, as the published simulator's notebook has them
POWERS = {A100: 24.8, H100: 44.0, H100_CAPPED: 30.8}  # units of its iso-power sizing; capped: GPUs at half, the machine at 0.7
KV_BYTES_PER_TOKEN = 2 * 70 * 14336 * 2  # BLOOM-176B in fp16
NUM_KV_TOKENS = (8 * 80 * 2**30 - 329e9) / KV_BYTES_PER_TOKEN  # on 8 GPUs of 80 GiB beside the weights
TRANSFER_S_PER_TOKEN = KV_BYTES_PER_TOKEN / (200 * 2**30)


@dataclass(frozen=True, slots=True)
class Design:
    """``num_prompt`` 0: a baseline, whose machines all run both phases and are ``token_hardware``."""

    name: str
    token_hardware: str
    num_token: int
    prompt_hardware: str = A100
    num_prompt: int = 0

    def __str__(self) -> str:
        split = f"{self.num_prompt}P+{self.num_token}T" if self.num_prompt else str(self.num_token)
        return f"{self.name} {split}"

    @property
    def num_machines(self) -> int:
        return self.num_prompt + self.num_token

    @property
    def cost(self) -> float:
        """$ per hour and GPU of a machine, summed over machines: ratios are those of the clusters' prices."""
        return self.num_prompt * PRICES[self.prompt_hardware] + self.num_token * PRICES[self.token_hardware]

    @property
    def power(self) -> float:
        """In units of ``POWERS``."""
        return self.num_prompt * POWERS[self.prompt_hardware] + self.num_token * POWERS[self.token_hardware]

    def split(self, num_prompt: int, power: float | None = None, cost: float | None = None) -> Design:
        """The same hardware with ``num_prompt`` prompt machines and as many token machines as the power or the cost allows; with neither,
        as many machines as now. There may be none left: ``num_token`` is then below 1."""
        if power is not None:
            num_token = int((power - num_prompt * POWERS[self.prompt_hardware]) / POWERS[self.token_hardware] + 1e-9)
        elif cost is not None:
            num_token = int((cost - num_prompt * PRICES[self.prompt_hardware]) / PRICES[self.token_hardware] + 1e-9)
        else:
            num_token = self.num_machines - num_prompt
        return Design(self.name, self.token_hardware, num_token, self.prompt_hardware, num_prompt)


@dataclass(frozen=True, slots=True)
class Bracket(RateBracket):
    """All objectives hold at ``holds_at``, and ``broken`` of them do not at ``fails_at``."""

    broken: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.holds_at:g} / {self.fails_at:g}"


@dataclass(frozen=True, slots=True)
class BestSplit:
    """``tried``: each split that was run, with the lowest rate at which it was seen to fail."""

    design: Design
    bracket: Bracket
    tried: tuple[tuple[Design, float], ...]


@dataclass(frozen=True, slots=True)
class StudyData:
    """``tables``: by hardware, with A100, H100 and capped H100 among them. ``lengths``: of prompts and outputs, by the workload's name."""

    tables: Mapping[str, MachineTable]
    lengths: Mapping[str, tuple[Recorded, Recorded]]

    @classmethod
    def read(cls, tables: Path, traces: Mapping[str, Path], model: str = "bloom-176b", tensor_parallel: int = 8) -> StudyData:
        """The table of measurements, and traces whose lengths make the workloads. Raises TableError, TraceError, OSError."""
        lengths = {}
        for name, path in traces.items():
            rows = read_trace(path).rows
            lengths[name] = Recorded(tuple(row.num_prompt for row in rows)), Recorded(tuple(row.num_output for row in rows))
        return cls(read_machine_tables(tables, model, tensor_parallel), lengths)


@dataclass(frozen=True, slots=True)
class StudyOptions:
    """Traces of ``duration_s`` with Poisson arrivals for each of ``seeds``, the first of which finds the best splits; rates on a grid of
    ``step`` requests per second. ``num_splits``: of the coarse search for the best one, which is refined around it."""

    duration_s: float = 120.0
    step: float = 5.0
    seeds: Seq[int] = (0, 1, 2)
    num_splits: int = 8

    @classmethod
    def quick(cls) -> StudyOptions:
        """A first look, in a tenth of the time. Short traces end before long queues have built up, so rates come out higher."""
        return cls(60.0, 10.0, (0,), 5)


@dataclass(slots=True)
class Study:
    """Runs of clusters, each done once. ``num_requests`` and ``num_runs`` count what was simulated."""

    data: StudyData
    options: StudyOptions = field(default_factory=StudyOptions)
    num_runs: int = 0
    num_requests: int = 0
    _slowdowns: dict[tuple[Design, str, str, float, int], Slowdown] = field(default_factory=dict)

    # --- runs ---------------------------------------------------------------------------------------------------------------------------

    def requests(self, workload: str, rate: float, seed: int) -> Iterator[tuple[float, int, int]]:
        """(arrival, prompt tokens, output tokens). Those of a seed do not depend on the rate, but for how many there are. Prompt and output
        are drawn independently of each other, as published."""
        times = OpenLoop(rate).times(random.Random(f"{seed}:arrivals"))
        lengths = Independent(*self.data.lengths[workload]).lengths(random.Random(f"{seed}:lengths"))
        arrivals = takewhile(lambda time_s: time_s < self.options.duration_s, times)
        return ((time_s, *pair) for time_s, pair in zip(arrivals, lengths, strict=False))

    def run(self, design: Design, lookup: str, rate: float, seed: int, workload: str = "conversation") -> ClusterResult:
        """One run of one cluster, to its end."""
        result = BlockCluster(self.spec(design, lookup)).run(self.requests(workload, rate, seed))
        self.num_runs += 1
        self.num_requests += len(result.ttft_s)
        return result

    def spec(self, design: Design, lookup: str) -> ClusterSpec:
        """The cluster of a design. Machines of the published program are in the order A100, H100 and so on; ties go by it."""
        kinds = [(design.token_hardware, False)] * design.num_token
        prompts = [(design.prompt_hardware, True)] * design.num_prompt
        kinds = kinds + prompts if design.prompt_hardware > design.token_hardware else prompts + kinds
        costs = {hardware: TableCost(self.data.tables[hardware], lookup) for hardware in {hardware for hardware, _ in kinds}}
        machines = [(costs[hardware], is_prompt) for hardware, is_prompt in kinds]
        return ClusterSpec(machines, design.num_prompt > 0, NUM_KV_TOKENS, TRANSFER_S_PER_TOKEN)

    def slowdown(self, design: Design, lookup: str, rate: float, seed: int, workload: str = "conversation") -> Slowdown:
        """Against an idle A100 machine."""
        key = (design, lookup, workload, rate, seed)
        if key not in self._slowdowns:
            self._slowdowns[key] = slowdown_of(self.run(design, lookup, rate, seed, workload), self.data.tables[A100])
        return self._slowdowns[key]

    def holds(self, design: Design, lookup: str, rate: float, seed: int, workload: str = "conversation") -> bool:
        return self.slowdown(design, lookup, rate, seed, workload).holds

    # --- searches -----------------------------------------------------------------------------------------------------------------------

    def bracket(self, design: Design, lookup: str, seed: int, workload: str = "conversation", guess: float | None = None) -> Bracket:
        """The highest rate of the grid that holds, found by halving between one that holds and one that fails: it takes as given that
        what fails at a rate fails at higher ones. ``guess``: where to begin."""
        step = self.options.step
        low, high = 0, 0  # in steps of the grid; 0: not known
        at = max(1, round((guess or 8 * step) / step))
        while not high or high - low > 1:
            if self.holds(design, lookup, at * step, seed, workload):
                low = at
            else:
                high = at
            if not high:
                at = low + max(1, low // 4)
            elif not low:
                at = max(1, high - max(1, high // 4))
                if high == 1:
                    break
            else:
                at = (low + high) // 2
        broken = self.slowdown(design, lookup, high * step, seed, workload).broken
        return Bracket(low * step, high * step, tuple(broken))

    def brackets(self, design: Design, lookup: str, workload: str = "conversation") -> list[Bracket]:
        """One for each seed."""
        found: list[Bracket] = []
        for seed in self.options.seeds:
            found.append(self.bracket(design, lookup, seed, workload, found[0].holds_at if found else None))
        return found

    def best_split(
        self, design: Design, lookup: str, power: float | None = None, cost: float | None = None, workload: str = "conversation"
    ) -> BestSplit:
        """Of all numbers of prompt machines within the power, the cost or the number of machines of ``design``, the one that holds at the
        highest rate; of equals the first that was found. First ``num_splits`` evenly, then halving the distance to the best.

        A split is only tried at the next rate above the best one so far, so worse ones cost one run each.
        """
        seed, step = self.options.seeds[0], self.options.step

        def rates(num_prompt: int, best: float) -> tuple[float, float]:
            tried = design.split(num_prompt, power, cost)
            rate = best or self.bracket(tried, lookup, seed, workload).holds_at
            while self.holds(tried, lookup, rate + step, seed, workload):
                rate += step
            return rate, rate + step

        search = SplitSearch(lambda num_prompt: design.split(num_prompt, power, cost).num_token, rates)
        search.run(design.num_prompt, self.options.num_splits)
        if not search.best:
            limit = f"power: {power!r}" if cost is None else f"cost: {cost!r}"
            raise ValueError(f"{limit} is not allowed; it leaves {design} no machine for prompts or none for tokens")
        best = design.split(search.best, power, cost)
        tried = tuple((design.split(num_prompt, power, cost), rate) for num_prompt, rate in search.tried.items())
        return BestSplit(best, self.bracket(best, lookup, seed, workload, search.holds_at), tried)
