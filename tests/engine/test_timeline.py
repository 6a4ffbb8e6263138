"""Every moment of a request is charged to one cause: on a device of known cost every part to the digit, and without a gap for any load."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from octavo.core.cost import StepShape
from octavo.core.match_report import MatchEnd
from octavo.core.request import BeamParams, FinishReason, SamplingParams
from octavo.core.speculative_params import SpeculativeParams
from octavo.core.step import StepPlan
from octavo.engine.causes import Cause
from octavo.engine.engine import Engine
from octavo.engine.request_record import RecordState, RequestRecord
from tests.engine.planted import with_known_price
from tests.engine.scripted import bigram_engine
from tests.engine.timed import HOST_S, Law, TimedRun


def seconds(run_or_engine: TimedRun | Engine, name: str) -> list[float]:
    engine = run_or_engine.engine if isinstance(run_or_engine, TimedRun) else run_or_engine
    record = engine.timeline.find(name)
    assert record is not None
    return engine.timeline.seconds_of(record, engine.clock.now())


def unexplained(record: RequestRecord) -> float:
    """The remainder of an ended request as a share of its wall time."""
    assert record.end_s is not None
    wall_s = record.end_s - record.received_s
    return abs(wall_s - sum(record.seconds)) / max(wall_s, 1e-12)


def mixed_load(engine: Engine, num_requests: int, seed: int) -> Iterator[None]:
    """Requests of many kinds, added a few at a time between steps; some are aborted on the way."""
    rng, shared = random.Random(seed), [random.Random(1).randrange(4, 200) for _ in range(64)]
    added = 0
    while added < num_requests or engine.has_work:
        for _ in range(min(num_requests - added, rng.choice((0, 0, 1, 2, 5)))):
            prompt = shared[: rng.choice((0, 16, 48, 64))] + [rng.randrange(4, 250) for _ in range(rng.choice((1, 7, 20, 90, 300)))]
            params = SamplingParams(temperature=rng.choice((0.0, 1.0)), max_tokens=rng.choice((0, 1, 2, 9, 40)), ignore_eos=True)
            options: dict = {"cache_salt": rng.choice((None, None, "a", "b"))}
            kind = rng.randrange(8)
            if kind == 0:
                params = replace(params, n=3, max_tokens=max(1, params.max_tokens or 0))
            elif kind == 1:
                params = replace(params, temperature=0.0, max_tokens=5, beam=BeamParams(2))
            elif kind == 2:
                params = replace(params, allowed_token_ids=tuple(range(4, 60)))
            elif kind == 3:
                options["speculative"] = SpeculativeParams(3, "ngram")
            elif kind == 4:
                prompt, params = prompt[:40], replace(params, max_tokens=120)
            engine.add(engine.prepare(prompt, params, f"r{added}", **options))
            added += 1
        if rng.random() < 0.02 and added:
            engine.abort(f"r{rng.randrange(added)}")
        engine.step()
        yield


SEEN = {"tight": Cause.PREEMPTED, "paced": Cause.PACED, "static": Cause.QUEUED_POLICY, "swapping": Cause.SWAPPED, "tiers": Cause.RESTORED}
SETTINGS: dict[str, dict] = {
    "prompts first": {"scheduling_policy": "prefill_first"},
    "tight": {"max_num_seqs": 12, "admission_lookahead": 1, "num_kv_blocks": 44},
    "paced": {"max_itl_ms": 30.0, "num_kv_blocks": 400},
    "static": {"scheduling_policy": "static", "max_num_seqs": 8, "num_kv_blocks": 400},
    "wide": {"num_kv_blocks": 400},
    "swapping": {
        "num_kv_blocks": 40, "max_num_seqs": 12, "admission_lookahead": 1, "preemption": "swap", "cache": {"swap_space": 128 << 10},
    },
    "tiers": {"num_kv_blocks": 40, "max_num_seqs": 12, "cache": {"kv_host_memory": 128 << 10}},
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_nothing_is_left_unexplained_on_a_virtual_clock(setting: str) -> None:
    run = TimedRun(Law(), **SETTINGS[setting])
    for _ in mixed_load(run.engine, 150, seed=5):
        run.clock.advance(0.0003)
    records = run.engine.timeline.records()
    assert len(records) == 150
    assert all(record.ended_s is not None and record.snapshot == [] for record in records)
    assert max(map(unexplained, records)) < 1e-6
    assert all(min(record.seconds) > -1e-9 for record in records)
    assert setting not in SEEN or sum(record.seconds[SEEN[setting]] for record in records) > 0.0


def test_nothing_is_left_unexplained_of_a_thousand_requests_on_the_wall_clock() -> None:
    engine = bigram_engine(num_kv_blocks=120, max_num_seqs=24)
    for _ in mixed_load(engine, 1000, seed=11):
        pass
    records = engine.timeline.records()
    assert len(records) == 1000
    assert max(map(unexplained, records)) <= 0.01
    assert all(min(record.seconds) > -1e-6 for record in records)


OWN = (Cause.PREFILL, Cause.DECODE, Cause.DRAFTS)
DEVICE = (*OWN, Cause.CACHE_MISS, Cause.RECOMPUTED, Cause.OTHERS_PREFILL, Cause.OTHERS_DECODE)


def test_the_own_part_is_what_a_request_s_steps_would_have_taken_with_it_alone() -> None:
    """Against the law itself, request by request and step by step: recomputation, drafts, choices and beams included."""
    run = TimedRun(Law(), num_kv_blocks=44, max_num_seqs=12, admission_lookahead=1)
    timeline, device, law = with_known_price(run), run.device, run.device.law
    own, whole = dict[str, float](), dict[str, float]()

    def note(plan: StepPlan) -> None:
        shapes = dict[str, StepShape]()
        for piece, seq in zip(plan.slices, run.engine.scheduler.in_flight_sequences, strict=True):
            shape = shapes.setdefault(seq.request.request_id, StepShape())
            shape.add(piece.start, len(piece.token_ids), 1 + piece.num_drafts if piece.num_samples else 0)
        for name, shape in shapes.items():
            own[name] = own.get(name, 0.0) + law.seconds(shape)
            whole[name] = whole.get(name, 0.0) + law.seconds(StepShape.of(plan))

    device.before_step = note
    for i in range(6):  # together they outgrow the pool
        run.engine.add(run.engine.prepare([50 + i] * 40, SamplingParams(max_tokens=200, ignore_eos=True), f"long{i}"))
    for _ in mixed_load(run.engine, 120, seed=3):
        pass
    records = {record.request_id: record for record in timeline.records()}
    assert len(own) > 100
    for name, expected_s in own.items():
        found = records[name].seconds
        own_s = sum(found[cause] for cause in OWN) + records[name].own_missed_s + records[name].own_recomputed_s
        assert own_s == pytest.approx(expected_s, rel=1e-9), name
        in_others = sum(found[cause] for cause in DEVICE) - whole[name]  # beside its steps: that of the step it arrived in
        assert -1e-9 < in_others < 1.0
    seen = {cause for record in records.values() for cause in Cause if record.seconds[cause] > 0}
    assert {*DEVICE, Cause.QUEUED_KV, Cause.PREEMPTED, Cause.SCHEDULING} <= seen
    assert sum(record.num_recomputed for record in records.values()) > 0
    assert sum(record.num_accepted for record in records.values()) > 0


def test_one_request_alone() -> None:
    law = Law()
    run = TimedRun(law)
    with_known_price(run)
    run.add("one", 40, 10)
    run.clock.advance(0.25)
    run.run_until("one", 10)
    found = seconds(run, "one")
    prefill, decode = StepShape(), [StepShape() for _ in range(9)]
    prefill.add(0, 40, 1)
    for i, shape in enumerate(decode):
        shape.add(40 + i, 1, 1)
    assert found[Cause.PREFILL] == pytest.approx(law.seconds(prefill))
    assert found[Cause.DECODE] == pytest.approx(sum(map(law.seconds, decode)))
    assert found[Cause.SCHEDULING] == pytest.approx(10 * HOST_S)
    assert found[Cause.BETWEEN_STEPS] == pytest.approx(0.25)  # before its first step: nobody took it in
    assert sum(found) == pytest.approx(run.clock.now())
    record = run.engine.timeline.find("one")
    assert record is not None and record.first_token_s is not None and record.ttft_seconds is not None
    assert sum(record.ttft_seconds) == pytest.approx(record.first_token_s)
    assert record.ttft_seconds[Cause.DECODE] == 0.0
    assert [chunk.num_tokens for chunk in record.chunks] == [40]


def test_chunks_of_a_prompt_are_told_one_by_one() -> None:
    run = TimedRun(Law(), max_num_seqs=4, max_num_batched_tokens=64)
    with_known_price(run)
    run.add("long", 150, 2)
    run.run_until("long", 2)
    record = run.engine.timeline.find("long")
    assert record is not None
    assert [chunk.num_tokens for chunk in record.chunks] == [64, 64, 22]
    assert sum(chunk.seconds for chunk in record.chunks) == pytest.approx(record.seconds[Cause.PREFILL])


def test_who_comes_into_a_running_step_waits_for_what_it_computes() -> None:
    law = Law()
    run = TimedRun(law)
    with_known_price(run)
    run.add("first", 200, 3)
    arrived = [False]

    def arrive(plan: StepPlan) -> None:
        if not arrived[0]:
            arrived[0] = True
            late.append(run.engine.prepare([9, 8, 7], SamplingParams(max_tokens=2, temperature=0.0), "late"))

    late: list = []
    run.device.before_step = arrive
    run.engine.step()
    run.engine.add(late[0])
    run.arrival_s["late"], run.times_s["late"] = 0.0, []
    run.run_until("late", 2)
    found, step = seconds(run, "late"), StepShape()
    step.add(0, 200, 1)
    share = law.seconds(step) / (law.seconds(step) + HOST_S)
    prompt_share = 1 - law.step / law.seconds(step)
    in_step_s = law.seconds(step) + HOST_S
    assert found[Cause.OTHERS_PREFILL] == pytest.approx(in_step_s * share * prompt_share, rel=1e-6)
    record = run.engine.timeline.find("late")
    assert record is not None and unexplained(record) < 1e-9


@pytest.mark.parametrize(
    ("cause", "options", "blocks"),
    [
        (Cause.QUEUED_BATCH, {"max_num_seqs": 2}, 400),
        (Cause.QUEUED_KV, {}, 30),
        (Cause.QUEUED_TOKENS, {"max_num_batched_tokens": 64, "max_num_seqs": 16}, 400),
        (Cause.QUEUED_PROMPT, {"max_num_batched_tokens": 64}, 400),
        (Cause.QUEUED_POLICY, {"scheduling_policy": "static"}, 400),
    ],
)
def test_why_it_was_queued(cause: Cause, options: dict, blocks: int) -> None:
    run = TimedRun(Law(), num_kv_blocks=blocks, **{"max_num_seqs": 8, **options})
    with_known_price(run)
    num_prompt, names = (40, "abcdefgh") if cause is Cause.QUEUED_TOKENS else (180, "ab")
    for name in names:
        run.add(name, num_prompt, 40)
    if cause is Cause.QUEUED_POLICY:
        run.step()
    run.add("last", 180, 2)
    run.run_until("last", 2)
    found = seconds(run, "last")
    queued = {other: found[other] for other in Cause if other.name.startswith("QUEUED") and found[other] > 0}
    assert set(queued) == {cause}
    record = run.engine.timeline.find("last")
    assert record is not None
    ahead = (0, 2) if cause is Cause.QUEUED_POLICY else (len(names), len(names) * num_prompt)
    assert (record.num_ahead, record.num_tokens_ahead) == ahead


@pytest.mark.parametrize(("salt", "warm_salt", "missed"), [("mine", None, 96), (None, "theirs", 96), (None, None, 0)])
def test_what_another_salt_would_have_saved_is_a_cache_miss(salt: str | None, warm_salt: str | None, missed: int) -> None:
    law = Law()
    run = TimedRun(law)
    with_known_price(run)
    prompt = [4 + i % 200 for i in range(100)]
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    for name, own_salt in (("warm", warm_salt), ("it", salt)):
        run.engine.add(run.engine.prepare(prompt, params, name, cache_salt=own_salt))
        while run.engine.has_work:
            run.engine.step()
    found, record, shape = seconds(run, "it"), run.engine.timeline.find("it"), StepShape()
    shape.add(0, 100, 1)
    assert record is not None and record.match is not None and record.match.missed_end == missed
    assert found[Cause.CACHE_MISS] == pytest.approx(law.seconds(shape) * missed / 100)


def test_what_was_evicted_is_a_cache_miss() -> None:
    run = TimedRun(Law(), num_kv_blocks=20)
    with_known_price(run)
    prompt = [4 + i % 200 for i in range(100)]
    for name, tokens in (("warm", prompt), ("other", [7] * 290), ("it", prompt)):
        run.add(name, tokens, 2)
        run.run_until(name, 2)
    record = run.engine.timeline.find("it")
    assert record is not None and record.match is not None
    assert record.match.end is MatchEnd.EVICTED and record.match.missed_end == 96
    assert record.seconds[Cause.CACHE_MISS] > 0.5 * record.seconds[Cause.PREFILL]


def test_memory_is_bounded() -> None:
    run = TimedRun(Law())
    timeline = with_known_price(run, capacity=5)
    for i in range(12):
        run.add(f"r{i}", 600, 3)
        run.run_until(f"r{i}", 3)
    assert [record.request_id for record in timeline.records()] == [f"r{i}" for i in range(7, 12)]
    assert all(len(record.chunks) <= 8 for record in timeline.records())
    assert timeline.find("r0") is None
    with pytest.raises(ValueError, match="capacity: 0 is not allowed"):
        with_known_price(run, capacity=0)


def test_a_failed_step_ends_records_too() -> None:
    run = TimedRun(Law())
    timeline = with_known_price(run)

    def fail(plan: StepPlan) -> None:
        run.clock.advance(0.5)
        raise RuntimeError("no device")

    run.device.before_step = fail
    run.engine.add(run.engine.prepare([5, 6, 7], SamplingParams(max_tokens=2), "it"))
    assert run.engine.step()[0].error
    record = timeline.find("it")
    assert record is not None and record.finish_reason is FinishReason.ERROR
    assert record.seconds[Cause.FAILED_STEP] == pytest.approx(0.5) and unexplained(record) < 1e-9


def test_reading_while_it_runs_changes_nothing_and_adds_up() -> None:
    run = TimedRun(Law(), num_kv_blocks=60, max_num_seqs=6)
    timeline = with_known_price(run)
    for _ in mixed_load(run.engine, 60, seed=9):
        end_s = run.clock.now()
        for record in timeline.records():
            if record.ended_s is None and record.state is not RecordState.NEW:
                assert sum(timeline.seconds_of(record, end_s)) == pytest.approx(end_s - record.arrival_s, abs=1e-9)
    assert max(map(unexplained, timeline.records())) < 1e-6


# --- requests that another engine goes on with -----------------------------------------------------------------------------------------


def test_a_request_that_is_held_back_and_given_away_ends_here() -> None:
    run = TimedRun(Law())
    run.add("goes", 40, 10)
    run.add("stays", 30, 20)
    run.run_until("goes", 1)
    run.engine.loop.offer("goes")
    offered_s = run.clock.now()
    for _ in range(3):
        run.step()
    held_s = run.clock.now() - offered_s
    assert seconds(run, "goes")[Cause.HAND_OFF] == pytest.approx(held_s)
    run.engine.release("goes")
    run.clock.advance(1.0)
    record = run.engine.timeline.find("goes")
    assert record is not None and record.state is RecordState.ENDED and record.finish_reason is None
    assert record.seconds[Cause.HAND_OFF] == pytest.approx(held_s) and unexplained(record) < 1e-9
    run.run_until("stays", 20)
    assert unexplained(run.engine.timeline.find("stays")) < 1e-9  # type: ignore[arg-type]
    assert not run.engine.timeline._live and not run.engine.metrics._progress


@pytest.mark.parametrize("has_place", [True, False])
def test_a_request_that_nobody_took_goes_on_here(has_place: bool) -> None:
    run = TimedRun(Law(), max_num_seqs=2)
    run.add("held", 40, 6)
    run.add("other", 30, 60 if has_place else 4)
    run.run_until("held", 1)
    request = run.engine.scheduler.running_sequences[0].request
    assert request.request_id == "held"
    made = run.engine.loop.offer("held")
    if not has_place:
        run.add("late", 30, 60)
        run.run_until("late", 1)
        run.add("later", 30, 60)
        run.run_until("later", 1)
    begin_s = run.clock.now()
    run.clock.advance(0.5)
    run.engine.loop.resume(request, made)
    run.run_until("held", 6)
    record = run.engine.timeline.find("held")
    assert record is not None and record.finish_reason is FinishReason.LENGTH and unexplained(record) < 1e-9
    assert record.seconds[Cause.HAND_OFF] >= 0.5
    assert (record.seconds[Cause.PREEMPTED] > 0.0) == (not has_place), (begin_s, record.seconds)
