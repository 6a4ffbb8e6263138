"""The smallest cluster that holds a rate: which of many sizes, and at which split. Shared by the figures at equal throughput."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from octavo.simulator.splitwise_study import Design, Study


@dataclass(frozen=True, slots=True)
class Least:
    """``budget``: the smallest that was found to do, with ``design``; None: not even the largest does. ``num_tried``: designs that were
    run."""

    budget: float | None
    design: Design | None
    num_tried: int


def least_budget(
    study: Study, budgets: Seq[float], designs: Callable[[float], Iterable[Design]], lookup: str, rate: float, workload: str
) -> Least:
    """The smallest of ``budgets``, which ascend, with a design that holds ``rate`` for all seeds; found by halving, which takes as given
    that more never does worse. Designs near the split that held last are tried first."""
    low, high, best, num_tried = -1, len(budgets), None, 0
    while high - low > 1:
        at = (low + high) // 2
        held = None
        share = None if best is None else best.num_prompt / best.num_machines
        for design in sorted(designs(budgets[at]), key=lambda d: 0.0 if share is None else abs(d.num_prompt / d.num_machines - share)):
            num_tried += 1
            if all(study.holds(design, lookup, rate, seed, workload) for seed in study.options.seeds):
                held = design
                break
        if held is None:
            low = at
        else:
            high, best = at, held
    return Least(None if best is None else budgets[high], best, num_tried)


def splits(design: Design, num_splits: int, power: float | None = None, cost: float | None = None) -> list[Design]:
    """About ``num_splits`` of the splits of ``design``'s hardware within the power or the cost, evenly by prompt machines."""
    every = list[Design]()
    while True:
        candidate = design.split(len(every) + 1, power, cost)
        if candidate.num_token < 1:
            break
        every.append(candidate)
    stride = max(1, round(len(every) / num_splits))
    return every[stride - 1 :: stride]
