"""How workers of one host hold up each other's steps, and how much steps differ beside that, told from steps that they have logged.

    steps, each with what its neighbours did ─▶ ``crowding_of``, ``spread_of`` ─▶ what ``simulator.shared_host`` is told

A step that would take W alone makes progress at 1 / (1 + s) beside a neighbour, so that it takes W (1 + s x), where x is the share of its
*work* that was done beside it: a straight line, from which s is read for each kind of step beside each kind. Pure arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import NamedTuple

from octavo.bench.cluster_ways import Overlap
from octavo.bench.logged_worker import LoggedStep
from octavo.core.cost import StepShape
from octavo.simulator.shared_host import Crowding, Spread, StepKind, Taken

HELD_UP = 3.0  # times its prediction: more of a step is not looked at where means are told
_MIN_SPREAD = 0.1  # of overlaps, in standard deviations: below, nothing can be told of neighbours
_NUM_ROUNDS = 4  # until shares of work, which go by what is to be found, change no more


class Predicted(NamedTuple):
    """A step that was logged, what it was predicted to take alone, and what its neighbours did meanwhile."""

    step: LoggedStep
    seconds: float
    overlap: Overlap


def pace_of(crowding: Crowding, shape: StepShape, overlap: Overlap) -> float:
    """How much of a step's time it would have taken alone; exact where its neighbours were busy one at a time."""
    kind = StepKind.of(shape)
    lost = 0.0
    for beside, share in zip((StepKind.DECODE, StepKind.PROMPT), overlap, strict=True):
        more = crowding.of(kind, beside)
        lost += share * more / (1.0 + more)
    return max(0.0, 1.0 - lost)


# --- what neighbours add ----------------------------------------------------------------------------------------------------------------


def crowding_of(steps: Iterable[Predicted]) -> Crowding:
    """What neighbours add to a step of each kind, 0 where overlaps are too much alike to tell. Steps weigh by what they were predicted to
    take."""
    known = [one for one in steps if not one.step.follows_idleness and one.seconds > 0.0]
    found = [_added([one for one in known if one.step.shape.only_decodes is decodes]) for decodes in (True, False)]
    return Crowding(*found[0], *found[1])


def _added(steps: Seq[Predicted]) -> tuple[float, float]:
    """To steps of one kind, by neighbours that decode and by those with prompts."""
    added = (0.0, 0.0)
    rows = [(one.seconds, min(HELD_UP, one.step.total_s / one.seconds), one.overlap) for one in steps]
    for _ in range(_NUM_ROUNDS if rows else 0):
        added = _steepness([(weight, times, _of_work(overlap, added)) for weight, times, overlap in rows])
    return added


def _of_work(overlap: Overlap, added: tuple[float, float]) -> tuple[float, float]:
    """Shares of a step's work, from those of its time."""
    decode, prompt = (share / (1.0 + more) for share, more in zip(overlap, added, strict=True))
    alone = max(0.0, 1.0 - sum(overlap))
    total = alone + decode + prompt
    return (decode / total, prompt / total) if total else (0.0, 0.0)


def _steepness(rows: Seq[tuple[float, float, tuple[float, float]]]) -> tuple[float, float]:
    """Of (weight, y, x): the plane y = a (1 + b x) with the least squares among those whose b are not below 0; the b."""
    total = sum(weight for weight, _, _ in rows)
    mean_y = sum(weight * y for weight, y, _ in rows) / total
    means = [sum(weight * x[i] for weight, _, x in rows) / total for i in (0, 1)]
    vv, ww, vw, vy, wy = 0.0, 0.0, 0.0, 0.0, 0.0
    for weight, y, x in rows:
        v, w, share = x[0] - means[0], x[1] - means[1], weight / total
        vv, ww, vw = vv + share * v * v, ww + share * w * w, vw + share * v * w
        vy, wy = vy + share * v * (y - mean_y), wy + share * w * (y - mean_y)
    least = _MIN_SPREAD**2
    tries = [(0.0, 0.0)]
    if vv >= least:
        tries.append((vy / vv, 0.0))
    if ww >= least:
        tries.append((0.0, wy / ww))
    if min(vv, ww) >= least and vv * ww - vw * vw >= least * max(vv, ww):
        det = vv * ww - vw * vw
        tries.append(((vy * ww - wy * vw) / det, (wy * vv - vy * vw) / det))
    allowed = [(p, q) for p, q in tries if min(p, q) >= 0.0 and mean_y - p * means[0] - q * means[1] > 0.0]
    p, q = max(allowed, key=lambda pq: 2.0 * (pq[0] * vy + pq[1] * wy) - pq[0] ** 2 * vv - 2.0 * pq[0] * pq[1] * vw - pq[1] ** 2 * ww)
    level = mean_y - p * means[0] - q * means[1]
    return p / level, q / level


# --- what else happens ------------------------------------------------------------------------------------------------------------------


def spread_of(crowding: Crowding, steps: Iterable[Predicted]) -> Spread:
    """Of steps that only decode, by what they were mostly beside: what they took alone over what they were predicted to. It says nothing of
    the mean, which the prediction has: that is 1 beside anything, those that were held up for long cut."""
    found = dict[StepKind | None, list[Taken]]()
    for one in steps:
        if one.seconds > 0.0 and one.step.shape.only_decodes:
            times = one.step.total_s * pace_of(crowding, one.step.shape, one.overlap) / one.seconds
            found.setdefault(_mostly_beside(one.overlap), []).append(Taken(one.seconds, times))
    return Spread({beside: _about_one(some) for beside, some in found.items()})


def _mostly_beside(overlap: Overlap) -> StepKind | None:
    if 1.0 - sum(overlap) >= max(overlap):
        return None
    return StepKind.DECODE if overlap.decode > overlap.prompt else StepKind.PROMPT


def _about_one(taken: Seq[Taken]) -> list[Taken]:
    mean = sum(one.seconds * min(HELD_UP, one.times) for one in taken) / sum(one.seconds for one in taken)
    return [Taken(one.seconds, one.times / mean) for one in taken] if mean else list(taken)
