"""What figures measured on the engine have in common: how a machine and its engines are told, curves of latency by rate, and their ratios.

    workload ─▶ engines that differ in one switch, in turn ─▶ runs ─▶ a verdict on the shape, with the numbers beside it

Owns no figure. A ratio found on a small model on a CPU is not that of a large one on a GPU, so what such a figure judges is an order or a
trend; the published number stands beside ours without a verdict, unless the figure says by what measure they are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from functools import cache

from octavo.bench.in_process import Engines, Run, in_turn, serve, sustained_rate
from octavo.bench.limits import measure_limits
from octavo.engine.engine import Engine
from octavo.reproduce.figure import Line, Plot
from octavo.workload.requests import WorkloadRequest

Curve = tuple[tuple[float, float], ...]
"""(requests per second, seconds of latency), by rising rate."""

PROBE_S = 0.02  # for each way of reading and computing
NOT_TRANSFERABLE = "Of a small model on a CPU: numbers do not transfer to GPUs, where attention, sampling and the host weigh less."


def times(ratio: float) -> str:
    return f"{ratio:.2f}x"


def milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms"


def describe(engines: Engines) -> str:
    """Model and machine of a figure: what runs, and the limits that the machine has while it does."""
    return f"{engines.describe()}. {machine_limits(getattr(engines.first.backend, 'threads', 1))}"


@cache
def machine_limits(threads: int) -> str:
    """Measured once for all figures of a process."""
    limits = measure_limits(threads, PROBE_S)
    peaks = [f"{kind} {peak / 1e12:.2f} TOP/s" for kind in ("int8", "bf16", "f32") if (peak := limits.peak_rate(kind)) is not None]
    return f"The machine reads {limits.read_rate / 1e9:.0f} GB/s and computes {', '.join(peaks)}."


def measure_curves(
    engines: Mapping[str, Engine],
    rates: Seq[float],
    requests_at: Callable[[float], Iterable[WorkloadRequest]],
    latency: Callable[[Run], float],
) -> dict[str, Curve]:
    """The curve of each engine over ``rates``, ascending; at each rate all of them answer the same requests, in turn."""
    points: dict[str, list[tuple[float, float]]] = {name: [] for name in engines}
    for i, rate in enumerate(rates):
        for name in in_turn(list(engines), i):
            points[name].append((rate, latency(serve(engines[name], requests_at(rate)))))
    return {name: tuple(found) for name, found in points.items()}


def rate_ratio(ours: Curve, other: Curve, limit: float) -> tuple[str, bool | None]:
    """The highest rates that two curves over the same rates keep within ``limit`` of latency, the one over the other; and whether ours is
    the higher. None: the rates that were tried tell no difference."""
    a, b = sustained_rate(ours, limit), sustained_rate(other, limit)
    lowest, highest = ours[0][0], ours[-1][0]
    if a is None and b is None:
        return "neither keeps it", None
    if b is None:
        assert a is not None
        return f"above {times(a / lowest)}", True
    if a is None:
        return f"below {times(lowest / b)}", False
    if a == b == highest:
        return "both keep it at every rate", None
    return times(a / b), a > b


def curve_plot(title: str, curves: Mapping[str, Curve], value_label: str) -> Plot:
    lines = tuple(Line(name, tuple((rate, 1e3 * latency) for rate, latency in curve)) for name, curve in curves.items())
    return Plot(title, value_label, lines=lines, x_label="requests per second")
