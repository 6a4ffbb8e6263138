"""What scheduling costs: microseconds of plan, apply and timeline per step while sequences decode. No model, no backend."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable

from octavo.config import CacheConfig, SchedulerConfig
from octavo.core.clock import WallClock
from octavo.core.request import Request, SamplingParams
from octavo.core.scheduler import Scheduler
from octavo.core.step import SliceResult, StepResult
from octavo.engine.causes import Cause
from octavo.engine.outputs import OutputEvent
from octavo.engine.step_split import BY_ROWS, KnownPrice
from octavo.engine.timeline import Timeline

_BLOCK_SIZE = 16
_WARM_UP = 50  # steps that are not counted


def time_scheduler(num_seqs: int, num_prompt: int, steps: int) -> list[tuple[float, float, float]]:
    """Seconds of (plan, apply, timeline) of each of ``steps`` steps in which all ``num_seqs`` sequences decode behind their prompts."""
    num_tokens = num_prompt + steps + _WARM_UP + 1
    blocks = num_seqs * (-(-num_tokens // _BLOCK_SIZE) + 1)
    limits = SchedulerConfig(max_num_seqs=num_seqs, max_num_batched_tokens=num_seqs * num_prompt)  # the prompts take one step
    scheduler = Scheduler(limits, CacheConfig(block_size=_BLOCK_SIZE), num_blocks=blocks, max_model_len=num_tokens)
    timeline = Timeline(scheduler, WallClock(), KnownPrice(BY_ROWS))
    for i in range(num_seqs):
        params = SamplingParams(ignore_eos=True, stop_token_ids=(1 << 30,), max_tokens=num_tokens - num_prompt)
        request = Request(str(i), list(range(i, num_prompt + i)), params, seed=i)
        scheduler.add(request)
        timeline.added(request)
    seconds = []
    for step in range(steps + _WARM_UP):
        started = time.perf_counter()
        plan = scheduler.plan()
        planned = time.perf_counter()
        if plan is None or len(plan.slices) != num_seqs:
            raise RuntimeError("not every sequence is in the step")
        result = StepResult(plan.step_index, [SliceResult([step]) if piece.num_samples else SliceResult() for piece in plan.slices])
        recording = time.perf_counter()
        timeline.begin_step(step * 1e-3)
        timeline.mark(Cause.SCHEDULING)
        timeline.planned(plan)
        recorded = time.perf_counter() - recording
        applying = time.perf_counter()
        events = scheduler.apply(result)
        applied = time.perf_counter() - applying
        outputs = [OutputEvent.of(event, "") for event in events]
        recording = time.perf_counter()
        timeline.executed()
        timeline.mark(Cause.DETOKENISE)
        timeline.end_step(plan, result, outputs, (step + 1) * 1e-3)
        seconds.append((planned - started, applied, recorded + time.perf_counter() - recording))
    return seconds[_WARM_UP:]


def run_scheduler(num_seqs: int, num_prompt: int, steps: int, echo: Callable[[str], None], as_json: bool) -> None:
    """`octavo bench scheduler`: the last line given to ``echo`` is the JSON record."""
    seconds = time_scheduler(num_seqs, num_prompt, steps)
    planned, applied, recorded = zip(*seconds, strict=True)
    together = [plan_s + apply_s for plan_s, apply_s, _ in seconds]
    plan_us, apply_us, step_us, timeline_us = (round(1e6 * statistics.median(v), 2) for v in (planned, applied, together, recorded))
    if not as_json:
        parts = f"plan {plan_us:.1f} us, apply {apply_us:.1f} us, together {step_us:.1f} us; timeline {timeline_us:.1f} us"
        echo(f"{num_seqs} sequences decoding: {parts} (medians of {steps} steps)")
    figures = {"plan_us": plan_us, "apply_us": apply_us, "plan_apply_us": step_us, "timeline_us": timeline_us}
    case = {"bench": "scheduler", "num_seqs": num_seqs, "num_prompt": num_prompt, "steps": steps}
    echo(json.dumps(case | figures | {"date": time.strftime("%Y-%m-%d")}))
