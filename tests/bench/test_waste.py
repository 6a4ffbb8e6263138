"""The waste bench: its lengths have the paper's means, its roofline is the stated one, its figures those of a count by hand."""

from __future__ import annotations

import json
import math
import random
import re
import statistics

import pytest
from click.testing import CliRunner

from octavo.bench import waste
from octavo.bench.waste import (
    CV_OUTPUT,
    CV_PROMPT,
    MEAN_OUTPUT,
    MEAN_PROMPT,
    Roofline,
    WasteCase,
    fitted,
    limited_mean,
    run_waste,
    simulate,
    workload,
)
from octavo.cli.main import cli
from octavo.config import KV_RESERVATIONS
from octavo.core.scheduler import Scheduler
from octavo.core.step import SequenceSlice, StepPlan
from octavo.workload.arrivals import OpenLoop
from octavo.workload.lengths import Fixed
from octavo.workload.requests import Independent, Workload

SHORT = WasteCase(duration_s=8.0)


@pytest.mark.parametrize(("mean", "cv"), [(MEAN_PROMPT, CV_PROMPT), (MEAN_OUTPUT, CV_OUTPUT)])
def test_lengths_have_the_means_they_are_fitted_to(mean: float, cv: float) -> None:
    lengths = fitted(mean, cv)
    assert limited_mean(lengths.mean, lengths.sigma) == pytest.approx(mean, rel=1e-9)
    rng = random.Random(3)
    drawn = [lengths.draw(rng) for _ in range(40_000)]
    assert min(drawn) >= 4 and max(drawn) == 1024
    error = statistics.stdev(drawn) / math.sqrt(len(drawn))
    assert abs(statistics.fmean(drawn) - mean) < 5 * error
    assert statistics.stdev(drawn) / mean == pytest.approx(cv, rel=0.15), "the limits cut the tail a little"


def test_seconds_of_a_step() -> None:
    """16.7 ms for the weights; 800 KiB of KV per token of context; many rows are bound by arithmetic."""
    decode = StepPlan(0, [SequenceSlice(i, 999, [1], [], num_samples=1) for i in range(10)])
    assert Roofline().seconds(decode) == pytest.approx(26e9 / 1555e9 + 10 * 1000 * 800 * 1024 / 1555e9, rel=1e-12)
    prompt = StepPlan(0, [SequenceSlice(0, 0, [1] * 1000, [], num_samples=1)])
    assert Roofline().seconds(prompt) == pytest.approx(1000 * 26e9 / 312e12 + 1000 * 800 * 1024 / 1555e9, rel=1e-12)


def test_one_request_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """40 prompt and 30 output tokens alone, again and again: 40, 41, .. 69 tokens are held in the steps of each."""
    lengths = Independent(Fixed(40), Fixed(30))
    monkeypatch.setattr(waste, "workload", lambda case: Workload(OpenLoop(case.rate, 0.0), lengths, seed=case.seed))
    case = WasteCase(rate=1.0, duration_s=3.5)  # a request takes about 0.52 s
    tokens = sum(range(40, 70)) / 30
    paged = sum(-(-n // 16) * 16 for n in range(40, 70)) / 30
    fill = sum(n / (-(-n // 16) * 16) for n in range(40, 70)) / 30
    slots = {"paged": (paged, None), "max": (2048, 2048), "pow2": (72, 128), "oracle": (69, 128)}
    for reservation in KV_RESERVATIONS:
        run = simulate(reservation, case)
        found = run.every_step.record()
        assert found is not None and run.with_queue.record() is None
        assert (run.num_finished, found["steps"], found["batched"], found["waiting"]) == (3, 90, 1.0, 0.0)
        held, chunk = slots[reservation]
        assert found["token_states_pct"] == round(100 * tokens / 15_728, 2)
        assert found["external_pct"] == round(100 * (15_728 - held) / 15_728, 2)
        assert found["filled_pct"] == round(100 * (tokens / chunk if chunk else fill), 2)
        if chunk:
            assert found["reservation_pct"] == round(100 * (69 - tokens) / 15_728, 2)
            assert found["internal_pct"] == round(100 * (held - 69) / 15_728, 2)


def test_the_parts_make_up_the_pool_and_books_balance(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Scheduler.kv_occupancy

    def checked(self: Scheduler):  # type: ignore[no-untyped-def]
        found = counted(self)
        assert found.num_slots == 15_728 == found.num_allocated + found.num_free
        self.check_invariants()
        return found

    monkeypatch.setattr(Scheduler, "kv_occupancy", checked)
    for reservation in KV_RESERVATIONS:
        found = simulate(reservation, WasteCase(rate=8.0, duration_s=3.0)).every_step.record()
        assert found is not None
        parts = [found[f"{name}_pct"] for name in ("token_states", "reservation", "internal", "external")]
        assert sum(parts) == pytest.approx(100, abs=0.03) and min(parts) >= 0
        assert found["filled_pct"] >= found["token_states_pct"]


def test_seven_sequences_when_each_reserves_the_longest() -> None:
    """15,728 slots hold seven chunks of 2,048, and 8.85 % are left over: the one figure of the paper that follows by arithmetic."""
    found = simulate("max", WasteCase(rate=20.0, duration_s=6.0)).with_queue.record()
    assert found is not None and found["batched"] == 7.0 and found["external_pct"] == 8.85


def test_the_same_requests_for_all_and_with_the_same_seed() -> None:
    def first(case: WasteCase) -> list[tuple[float, int, int]]:
        made = workload(case).requests()
        return [(r.arrival_s, len(r.prompt_token_ids), r.num_output) for r, _ in zip(made, range(50), strict=False)]

    assert first(SHORT) == first(WasteCase(duration_s=99.0)) != first(WasteCase(seed=1))
    assert [pair[1:] for pair in first(SHORT)] == [pair[1:] for pair in first(WasteCase(rate=9.0))]


def test_other_means_and_slower_steps() -> None:
    case = WasteCase(rate=4.0, duration_s=3.0, mean_prompt=19.31, mean_output=58.45)
    made = [r for r, _ in zip(workload(case).requests(), range(20_000), strict=False)]
    for lengths, mean in (([len(r.prompt_token_ids) for r in made], 19.31), ([r.num_output for r in made], 58.45)):
        assert abs(statistics.fmean(lengths) - mean) < 5 * statistics.stdev(lengths) / math.sqrt(len(lengths))
    plan = StepPlan(0, [SequenceSlice(0, 0, [1] * 100, [], num_samples=1)])
    assert Roofline(slowness=2.5).seconds(plan) == 2.5 * Roofline().seconds(plan)
    batched = [found["batched"] for slowness in (1.0, 2.0) if (found := simulate("paged", case, slowness).every_step.record())]
    assert len(batched) == 2 and batched[1] > 1.4 * batched[0], "who stays longer is there with more others"


def test_admission_looks_no_further_than_told() -> None:
    case = WasteCase(rate=40.0, duration_s=8.0)
    near, far = (simulate("paged", case, lookahead=tokens).with_queue.record() for tokens in (1, 64))
    assert near is not None and far is not None and near["token_states_pct"] > far["token_states_pct"] + 3
    assert simulate("paged", case).with_queue.record() == near


def test_the_record_and_the_tables() -> None:
    printed: list[str] = []
    run_waste(SHORT, printed.append, False)
    record = json.loads(printed[-1])
    assert (record["bench"], record["kind"], record["rate"], record["num_slots"]) == ("waste", "simulated", 2.0, 15_728)
    assert list(record["arms"]) == list(KV_RESERVATIONS)
    shown = "\n".join(printed[:-1])
    idle = re.search("No request ever waited with ([a-z0-9, ]+):", printed[-2])
    assert idle is not None
    for name, arm in record["arms"].items():
        row = next(line for line in shown.splitlines() if line.startswith(name))
        assert f"{arm['every_step']['token_states_pct']:.1f} ({arm['paper']['parts_pct'][0]:g})" in row
        assert f"{arm['every_step']['batched']:.2f} ({arm['paper']['batched']:g})" in row
        assert (arm["with_queue"] is None) == (name in idle.group(1).split(", "))
    ended = CliRunner().invoke(cli, ["bench", "waste", "--duration", "8", "--json"])
    assert ended.exit_code == 0 and json.loads(ended.output)["arms"] == record["arms"]
    for bad in (["--rate", "0"], ["--duration", "nan"], ["--rate", "inf"]):
        refused = CliRunner().invoke(cli, ["bench", "waste", *bad])
        assert refused.exit_code == 2 and "is not allowed; a finite number above 0" in " ".join(refused.output.split())
