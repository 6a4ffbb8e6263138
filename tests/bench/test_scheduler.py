"""The scheduler's bench drives the real scheduler: every sequence is in every step that is counted."""

from __future__ import annotations

import json

from octavo.bench import scheduler
from octavo.bench.scheduler import run_scheduler, time_scheduler
from octavo.core.scheduler import Scheduler


def test_every_counted_step_decodes_all_sequences(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    shapes: list[list[int]] = []
    plan = Scheduler.plan

    def watched(self: Scheduler, *args, **kwargs):  # type: ignore[no-untyped-def]
        made = plan(self, *args, **kwargs)
        shapes.append([piece.num_tokens for piece in made.slices])
        return made

    monkeypatch.setattr(Scheduler, "plan", watched)
    seconds = time_scheduler(num_seqs=5, num_prompt=37, steps=20)
    assert len(seconds) == 20 and all(planned > 0 and applied > 0 and recorded > 0 for planned, applied, recorded in seconds)
    assert shapes == [[37] * 5] + [[1] * 5] * (20 + scheduler._WARM_UP - 1)


def test_the_record() -> None:
    printed: list[str] = []
    run_scheduler(3, 20, 9, printed.append, False)
    record = json.loads(printed[1])
    assert (record["bench"], record["num_seqs"], record["num_prompt"], record["steps"]) == ("scheduler", 3, 20, 9)
    assert record["plan_us"] > 0 and record["apply_us"] > 0 and record["plan_apply_us"] > 0 and record["timeline_us"] > 0
    assert printed[0].startswith("3 sequences decoding: plan ") and f"together {record['plan_apply_us']:.1f} us" in printed[0]
