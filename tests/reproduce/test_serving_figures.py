"""Figures of serving systems: their rows and verdicts, on systems whose latency is a formula in place of a simulation."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from octavo.bench.waste import NUM_SLOTS, Shares, WasteCase, WasteRun
from octavo.core.occupancy import KVOccupancy
from octavo.reproduce import batched_sharegpt, chat_rates, chunk_overhead, kv_use, serving_arms
from octavo.reproduce.figure import SIMULATED, Figure, Row
from octavo.reproduce.serving_arms import MAX, ORACLE, PAGED, POW2, Ratio, ratio_row, request_level
from octavo.reproduce.setup import Setup
from octavo.simulator.dense_models import OPT_13B
from octavo.simulator.serving_study import GRID_RATIO, Load, Served, ServingStudy, Way, datasheet
from octavo.workload.lengths import Fixed
from octavo.workload.requests import Independent

QUICK = Setup(quick=True)
CAPACITY = {"paged": 8.0, "Orca-like (Oracle)": 4.0, "Orca-like (Pow2)": 3.0, "Orca-like (Max)": 2.0}


def capacity(way: Way) -> float:
    """Requests per second; request-level batching grows with its batch, engines add up, and apart is half as good again."""
    if way.scheduler.scheduling_policy == "static":
        return 0.02 * way.scheduler.max_num_seqs
    kept = 4.0 if way.cache.enable_prefix_caching else 1.0
    return kept * CAPACITY.get(way.name, 6.0) * way.num_devices * (1.5 if sum(way.roles) else 1.0)


@pytest.fixture
def formula(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, float]]:
    """Every simulation is a queue M/M/1 of the way's capacity; returns what is run."""
    runs = list[tuple[str, float]]()

    def run(study: ServingStudy, way: Way, rate: float, seed: int, slo: Any = None, num_requests: int | None = None) -> Any:
        runs.append((way.name, rate))
        left = capacity(way) - rate
        latency_s = study.served.decode_s() * (1 + rate / left) if left > 0 else float("inf")
        record = SimpleNamespace(e2e_s=100 * latency_s, num_output=100)
        attained = 1.0 if left > 0 else 0.0
        gap_s = 0.14 if way.scheduler.enable_chunked_prefill else 0.68
        ttft_s = 0.76 if way.scheduler.enable_chunked_prefill else 0.53
        times = {"ttft_s": {"p50": ttft_s}, "gap_s": {"p99": gap_s, "max": 2 * gap_s}}
        return SimpleNamespace(num_completed=1, num_arrived=1, records=[record], slo_attainment=attained, **times)

    monkeypatch.setattr(ServingStudy, "run", run)
    return runs


def figure_of(name: str) -> Figure:
    figure = importlib.import_module(f"octavo.reproduce.{name}").run(QUICK)
    assert isinstance(figure, Figure) and figure.evidence == SIMULATED
    assert all(row.published for row in figure.rows if row.hit is not None)
    return figure


def row_of(figure: Figure, beginning: str) -> Row:
    (row,) = (row for row in figure.rows if row.what.startswith(beginning))
    return row


@pytest.mark.parametrize("published", [(1.9, 2.1), (2.5, 3.0)])
def test_a_ratio_is_hit_when_the_brackets_allow_it(formula: list[tuple[str, float]], published: tuple[float, float]) -> None:
    study = ServingStudy(Served(OPT_13B, datasheet("a100-40gb"), 15_728), Load(Independent(Fixed(9), Fixed(9)), 1.0))
    row, found = ratio_row(study, Ratio("r", PAGED, (ORACLE,), published, "p"))
    assert found.low <= 2.0 <= found.high and found.high / found.low == pytest.approx(GRID_RATIO**2)
    assert row.hit is (published[0] < 2.1)
    assert row.ours.count("x") == 4 and row.published == "p"
    assert len(formula) == len(set(formula)), "each rate of each way is run once, for all limits"


def test_of_a_baseline_the_best_setting_counts(formula: list[tuple[str, float]]) -> None:
    study = ServingStudy(Served(OPT_13B, datasheet("a100-40gb"), 15_728), Load(Independent(Fixed(9), Fixed(9)), 1.0))
    ways = tuple(map(request_level, (1, 32, 8)))
    assert ratio_row(study, Ratio("r", PAGED, ways))[1] == ratio_row(study, Ratio("r", PAGED, ways[1:2]))[1]
    assert ratio_row(study, Ratio("r", PAGED, ways))[0].hit is None


def test_baselines_differ_in_one_switch() -> None:
    assert PAGED.scheduler == ORACLE.scheduler == POW2.scheduler == MAX.scheduler
    assert [way.cache.kv_reservation for way in (PAGED, ORACLE, POW2, MAX, request_level(8))] == ["paged", "oracle", "pow2", "max", "max"]
    assert request_level(8).scheduler.scheduling_policy == "static"
    assert len({way.cache.enable_prefix_caching for way in (PAGED, ORACLE, POW2, MAX)}) == 1


@pytest.mark.usefixtures("formula")
def test_rates_at_equal_latency() -> None:
    figure = figure_of("paged_rates")
    assert [row.hit for row in figure.rows] == [True, None, True, True]  # 2x, 2.7x, 4x, 12.5x
    assert len(figure.plots) == 2 and len(figure.plots[1].lines) == 7


@pytest.mark.usefixtures("formula")
def test_a_shared_prefix() -> None:
    figure = figure_of("prefix_rates")
    assert [row.hit for row in figure.rows] == [False, None, False, None], "24 / 4 is neither 1.67 nor 3.58"
    assert all(found.low <= 6.0 <= found.high for found in figure.plots[0].ranges[::2])


@pytest.mark.usefixtures("formula")
def test_a_chatbot() -> None:
    assert [row.hit for row in figure_of("chat_rates").rows] == [True, False, False]


@pytest.mark.usefixtures("formula")
def test_iteration_level_batching() -> None:
    mixed, equal = figure_of("orca_mixed"), figure_of("orca_equal")
    assert row_of(mixed, "iteration-level batching is ahead at the paper's").hit is True
    assert row_of(mixed, "rate over request-level batching at the paper's").hit is False, "6 / 0.64 is not 36.9"
    assert {row.hit for row in equal.rows if "gap to" in row.what} == {False}, "the formula knows no lengths, so no gap shrinks"


@pytest.mark.usefixtures("formula")
def test_prefill_and_decode_apart() -> None:
    figure = figure_of("disaggregated")
    ratio = row_of(figure, "OPT-13B, apart over together, prompts first")
    assert ratio.ours.startswith("1.5") and ratio.hit is False
    assert sum("best split" in row.what for row in figure.rows) == 1


@pytest.mark.usefixtures("formula")
def test_chunks() -> None:
    figure = figure_of("chunk_overhead")
    assert row_of(figure, "openchat, chunks: P99 gap").hit is True and row_of(figure, "openchat, whole prompts: P50").hit is True
    assert row_of(figure, "arxiv, whole prompts: P50").hit is False
    assert row_of(figure, "openchat: chunks make the P99 gap shorter").ours == "yes (4.86x)"
    overheads = [float(row.ours.split()[0]) for row in figure.rows if "in chunks of 512" in row.what]
    assert len(overheads) == len(chunk_overhead.PROMPTS) and all(0 < overhead < 25 for overhead in overheads)


def test_published_lengths_of_chunked_prefill() -> None:
    for data in chunk_overhead.DATA_SETS:
        for lengths, (median, p90) in ((data.prompt_lengths, data.prompt), (data.output_lengths, data.output)):
            assert lengths.quantile(0.5) == pytest.approx(median, abs=1)
            assert lengths.quantile(0.9) == pytest.approx(p90, rel=0.07)


def test_conversations_carry_their_history() -> None:
    import random
    from itertools import islice

    pairs = list(islice(chat_rates.Conversations().lengths(random.Random(1)), 3000))
    assert max(prompt for prompt, _ in pairs) == max(output for _, output in pairs) == chat_rates.LONGEST
    share_cut = sum(prompt == chat_rates.LONGEST for prompt, _ in pairs) / len(pairs)
    assert 0.3 < share_cut < 0.8, "many conversations are longer than what is sent of them"
    alone = sum(prompt < 162 for prompt, _ in pairs) / len(pairs)
    assert 0.1 < alone < 1 / chat_rates.MEAN_ROUNDS, "a first round is short, and every 3.5th request is one"


# --- KV memory --------------------------------------------------------------------------------------------------------------------------


def waste_of(share: dict[str, float], batched: dict[str, float]) -> Callable[..., WasteRun]:
    """In place of a simulation: one sample of this share of token states and this batch."""

    def simulate(reservation: str, case: WasteCase, slowness: float = 1.0, lookahead: int = 1) -> WasteRun:
        shares = Shares()
        states = round((share[reservation] - (8.0 if lookahead > 1 else 0.0)) * NUM_SLOTS / 100)
        num_batched = round(100 * batched[reservation] * slowness)
        for i in range(100):  # so that a mean has two digits
            shares.add(KVOccupancy(NUM_SLOTS, num_token_states=states, num_free=NUM_SLOTS - states), (num_batched + i) // 100, 1)
        return WasteRun(shares, shares)

    return simulate


@pytest.mark.parametrize(("error", "hits"), [(0.0, 4), (2.9, 4), (3.2, 0)])
def test_kv_use_is_judged_by_points(monkeypatch: pytest.MonkeyPatch, error: float, hits: int) -> None:
    shares = {"max": 20.4 + error, "pow2": 26.8 - error, "oracle": 38.2 + error, "paged": 96.3 - error}
    monkeypatch.setattr(kv_use, "simulate", waste_of(shares, dict.fromkeys(shares, 1.0)))
    figure = kv_use.run(Setup(quick=True))
    judged = [row for row in figure.rows if row.hit is not None]
    assert [row.published for row in judged] == ["20.4 %", "26.8 %", "38.2 %", "96.3 %", "96.3 %"]
    assert judged[-1].what.startswith("paged, admission looks 64 tokens ahead") and judged[-1].hit is False
    assert sum(bool(row.hit) for row in judged) == hits
    assert len(figure.plots[0].ranges) == 5 and len(figure.plots[0].marks) == 4


def test_batched_requests_are_judged_by_a_share(monkeypatch: pytest.MonkeyPatch) -> None:
    batched = dict(batched_sharegpt.PUBLISHED) | {"paged": 13.0}
    monkeypatch.setattr("octavo.reproduce.batched.simulate", waste_of(dict.fromkeys(batched, 50.0), batched))
    figure = batched_sharegpt.run(QUICK)
    assert [row.hit for row in figure.rows] == [True, True, True, False, False, False, None]
    assert row_of(figure, "paged over Orca (Oracle)").published == "2.2x"
    assert row_of(figure, "paged over Orca (Max)").published == "4.3x"
    assert [line.label for line in figure.plots[0].lines] == list(kv_use.NAMES.values())
    assert [x for x, _ in figure.plots[0].lines[0].points] == [1.0, 2.0]


def test_limits_are_told_in_words() -> None:
    study = ServingStudy(Served(OPT_13B, datasheet("a100-40gb"), 15_728), Load(Independent(Fixed(9), Fixed(9)), 1.0))
    unit_ms = 1000 * study.served.decode_s()
    assert f"{2 * unit_ms:.0f}, {4 * unit_ms:.0f}, {8 * unit_ms:.0f} ms" in serving_arms.limits_in_words(study)
