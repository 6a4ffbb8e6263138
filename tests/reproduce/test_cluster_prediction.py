"""Workers in the simulator: every token when it is made where the law of the steps is known, and that law found again in measured ones."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping

import pytest

from octavo.bench.cluster_ways import Delivered, Overlap, Probe, Way
from octavo.bench.logged_worker import LoggedStep
from octavo.core.cost import StepShape
from octavo.costs.coefficients import Coefficients
from octavo.distributed.handoff import Link
from octavo.distributed.wire import WorkerLimits
from octavo.reproduce.cluster_prediction import KindCost, Predictor, delivery_of, learned, link_of, measured, specs_of, to_both_means
from octavo.reproduce.crowding import pace_of
from octavo.simulator.shared_host import Crowding
from octavo.workload.arrivals import OpenLoop
from octavo.workload.lengths import LogNormal
from octavo.workload.requests import Independent, TokenRange, Workload, WorkloadRequest
from tests.engine.timed import HOST_S, Law, TimedRun
from tests.reproduce.virtual_cluster import serve

LAW = Law(pair=3e-7)
BASE = Coefficients((LAW.row, LAW.pair, LAW.position, 0.0, LAW.logit_row, LAW.step), HOST_S)
COST = KindCost(BASE)
NUM_BLOCKS, KV_BYTES = 800, 1000
PAIR, BOTH = {"prefill": 1, "decode": 1}, {"both": 2}
SETTINGS = {"max_num_seqs": 16, "max_num_batched_tokens": 64}
WHOLE = {"max_num_seqs": 16, "max_num_batched_tokens": 512, "enable_chunked_prefill": False, "scheduling_policy": "prefill_first"}


def timed(settings: Mapping[str, object]) -> TimedRun:
    return TimedRun(LAW, num_kv_blocks=NUM_BLOCKS, **settings)


def requests_at(rate: float, number: int, vocab_size: int) -> list[WorkloadRequest]:
    lengths = Independent(LogNormal(60.0, 0.8, 2, 300), LogNormal(20.0, 0.7, 1, 60))
    return list(Workload(OpenLoop(rate), lengths, number, tokens=TokenRange(4, vocab_size), seed=3).requests())


def limits_of(run: TimedRun) -> WorkerLimits:
    engine = run.engine
    return WorkerLimits(
        engine.max_model_len, engine.scheduler.limits.max_total_tokens, 16, run.device.vocab_size, engine.config.cache.block_size,
        engine.num_kv_blocks, KV_BYTES,
    )  # fmt: skip


@pytest.mark.parametrize("rate", [2.0, 25.0, 80.0])
@pytest.mark.parametrize(
    ("workers", "settings"), [(PAIR, SETTINGS), (BOTH, SETTINGS), (BOTH, WHOLE)], ids=["apart", "chunks", "prompts first"]
)
def test_where_the_law_is_known_every_token_comes_when_it_is_said_to(
    rate: float, workers: dict[str, int], settings: dict[str, object]
) -> None:
    """From idle to overload, by every way of serving: nothing but the cost of a step is left to be wrong."""
    runs = [timed(settings), timed(settings)]
    requests = requests_at(rate, 60, runs[0].device.vocab_size)
    link = Link(2e6, 0.004) if "prefill" in workers else None
    real = serve(runs, requests, link, KV_BYTES, in_s=0.002, out_s=0.003)
    predictor = Predictor(COST, Crowding(), Link(2e6, 0.004), 0.002, 0.003)
    found = predictor.answers(Way("some", workers, runs[0].engine.config), limits_of(runs[0]), requests)
    assert len(found) == len(real) == 60
    for guess, one in zip(found, real, strict=True):
        assert guess[:2] == pytest.approx(one[:2], rel=1e-9, abs=1e-9)
        assert guess.gaps_s == pytest.approx(one.gaps_s, rel=1e-9, abs=1e-9)
    if rate > 50:
        assert max(one.ttft_s for one in real) > 0.2, "nobody had to wait"


def test_busy_neighbours_are_in_the_answers() -> None:
    """Two replicas that are never idle: every step takes what it does beside a busy neighbour."""
    run = timed(SETTINGS)
    way, limits = Way("some", BOTH, run.engine.config), limits_of(run)
    requests = [WorkloadRequest(0.0, [5] * 8, 200)] * 2
    alone, crowded = (
        Predictor(COST, crowding, Link(1e9), 0.0, 0.0).answers(way, limits, requests)
        for crowding in (Crowding(), Crowding(0.5, 0.2, 0.3, 0.1))
    )
    prompt_s = alone[0].first_s
    assert crowded[0].first_s == pytest.approx(1.1 * prompt_s, rel=1e-6)
    assert crowded[0].last_s == pytest.approx(1.1 * prompt_s + 1.5 * (alone[0].last_s - prompt_s), rel=1e-6)
    single = Predictor(COST, Crowding(0.5, 0.5, 0.5, 0.5), Link(1e9), 0.0, 0.0).answers(way, limits, requests[:1])
    assert single[0].last_s == pytest.approx(alone[0].last_s, rel=1e-6)


def test_tokens_are_read_when_they_were_before() -> None:
    """All are 2 ms late beside nobody, and 50 ms beside a prompt: who is alone has them 2 ms after their steps, whatever else is known."""
    decodes, prompt = StepShape(1, 1, 1, 9, 9), StepShape(9, 1, 1, 9, 45)
    delivered = [Delivered(0.002, None)] * 30 + [Delivered(-0.1, decodes)] * 3 + [Delivered(0.05, prompt)] * 30
    run = timed(SETTINGS)
    way, limits, requests = Way("some", BOTH, run.engine.config), limits_of(run), [WorkloadRequest(0.0, [5] * 8, 20)]
    at_once = Predictor(COST, Crowding(), Link(1e9), 0.001, 0.0)
    late = dataclasses.replace(at_once, out_s=0.7, delivery=delivery_of(delivered))
    (guess,), (exact,) = late.answers(way, limits, requests), at_once.answers(way, limits, requests)
    assert guess.first_s == pytest.approx(exact.first_s + 0.002) and guess.gaps_s == pytest.approx(exact.gaps_s)
    assert late.back_s == pytest.approx((0.002, 0.05)) and at_once.back_s == (0.0, 0.0)
    assert delivery_of([]) is None and late.draws and not at_once.draws


def test_a_slower_pace_slows_all() -> None:
    predictor = Predictor(COST, Crowding(0.1, 0.2, 0.3, 0.4), Link(1e9), 0.0, 0.0)
    decodes = step(StepShape(4, 4, 4, 80, 80), "decode", 0.02)
    steps = [(decodes, Overlap()), (step(StepShape(64, 1, 1, 64, 2080), "prefill", 0.05), Overlap(0.0, 1.0))]
    bias = predictor.bias(steps)
    assert predictor.at_pace(bias).bias(steps) == pytest.approx(0.0, abs=1e-12) and predictor.bias([]) == 0.0


def test_capacity_is_what_busy_workers_serve() -> None:
    run = timed(SETTINGS)
    requests = [WorkloadRequest(0.0, [5] * 4, 1)] * 256
    step_s = HOST_S + LAW.step + 64 * LAW.row + 16 * LAW.logit_row + 16 * 4 * LAW.position + 16 * 10 * LAW.pair
    found = Predictor(COST, Crowding(), Link(1e9), 0.0, 0.0).capacity(Way("some", BOTH, run.engine.config), limits_of(run), requests)
    assert found == pytest.approx(2 * 16 / step_s, rel=0.2)


def test_workers_are_what_the_way_has() -> None:
    run = timed(SETTINGS)
    specs = specs_of(Way("some", PAIR, run.engine.config), limits_of(run), COST)
    assert [(spec.name, spec.role) for spec in specs] == [("prefill-0", "prefill"), ("decode-1", "decode")]
    assert {(spec.num_blocks, spec.kv_bytes_per_token, spec.scheduler.max_num_batched_tokens) for spec in specs} == {
        (NUM_BLOCKS, KV_BYTES, 64)
    }


# --- learning ---------------------------------------------------------------------------------------------------------------------------


def step(shape: StepShape, kind: str, total_s: float, idle: bool = False) -> LoggedStep:
    return LoggedStep(0.0, shape, kind, total_s - HOST_S, total_s, idle)


def steps_of(law: Law, crowding: Crowding, number: int = 400, prompt_by: float = 1.0) -> list[tuple[LoggedStep, Overlap]]:
    """Steps of all kinds by ``law``, half of them beside busy neighbours; those with prompts ``prompt_by`` times as long."""
    rng, out = random.Random(5), []
    for i in range(number):
        shape, is_prompt = StepShape(), i % 2 == 0
        if is_prompt:
            shape.add(0, rng.randint(4, 300), 1)
        for _ in range(rng.randint(0 if is_prompt else 1, 16)):
            shape.add(rng.randint(10, 400), 1, 1)
        kind = "decode" if not is_prompt else "mixed" if shape.num_sequences > 1 else "prefill"
        busy, prompts = rng.choice((0.0, 1.0, rng.random())), rng.choice((0.0, 1.0, rng.random()))
        overlap = Overlap(busy * (1.0 - prompts), busy * prompts)
        total_s = (law.seconds(shape) + HOST_S) * (prompt_by if is_prompt else 1.0) / pace_of(crowding, shape, overlap)
        out.append((step(shape, kind, total_s), overlap))
    return out


@pytest.mark.parametrize("crowding", [Crowding(), Crowding(0.4, 0.2, 0.0, 0.1)])
def test_a_law_is_found_again(crowding: Crowding) -> None:
    probes = {"apart": [Probe(n, 0.001, 0.002, 0.003 + n * KV_BYTES / 1e8, n * KV_BYTES) for n in (16, 128, 480)]}
    predictor = learned(steps_of(LAW, crowding), probes, [Delivered(0.003, None)] * 5, "some")
    assert predictor.crowding == pytest.approx(crowding, abs=0.03)
    assert (predictor.in_s, predictor.out_s) == (0.001, 0.002) and predictor.back_s == (0.003, 0.003)
    assert predictor.link.bytes_per_s == pytest.approx(1e8) and predictor.link.latency_s == pytest.approx(0.003)
    for one, overlap in steps_of(LAW, crowding, 40):
        assert predictor.step_s(one, overlap) == pytest.approx(one.total_s, rel=0.05)


def test_both_kinds_of_steps_have_their_mean() -> None:
    """What holds up steps that decode says nothing of prompts."""
    steps = [measured(one) for one, _ in steps_of(LAW, Crowding(), prompt_by=1.2)]
    corrected = to_both_means(BASE, steps)
    assert corrected.decode_by == pytest.approx(1.0) and corrected.prompt_by == pytest.approx(1.2)
    for decodes in (True, False):
        some = [one for one in steps if (one.kind == "decode") is decodes]
        assert sum(corrected.seconds_of(one.shape) for one in some) == pytest.approx(sum(one.total_s for one in some))
    assert to_both_means(BASE, []) == COST


def test_links_of_hand_offs() -> None:
    late = [Probe(n, 0.0, 0.0, 0.005 + n * 1e-6, n * 1000) for n in range(10, 100, 10)]
    late[3] = late[3]._replace(handoff_s=0.5)  # held up
    assert link_of(late).bytes_per_s == pytest.approx(1e9, rel=1e-6) and link_of(late).latency_s == pytest.approx(0.005)
    none = link_of([Probe(16, 0.0, 0.0, None, 1000)])
    assert none.latency_s == 0.0 and none.copy(10**6, 1.0) == pytest.approx(1.0, abs=1e-5)
    falling = link_of([Probe(n, 0.0, 0.0, 0.005 - n * 1e-6, n * 1000) for n in (10, 20)])
    assert falling.latency_s > 0.0 and falling.bytes_per_s >= 1e12 * (1 - 1e-9)
