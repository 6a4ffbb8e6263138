"""The engine's recent past as a ``RecordedWindow``: taken from the timeline's records, the configuration and the pool.

Copies numbers; changes nothing. May run beside the thread that steps: records of ended requests do not change any more but for what their
delivery took, and those of running ones are read once.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from octavo.config import KV_DTYPES
from octavo.core.recorded_window import RecordedWindow, WindowEngine, WindowRequest, salt_key
from octavo.core.recording import layout_fields
from octavo.core.request import FinishReason
from octavo.engine.request_record import RequestRecord

if TYPE_CHECKING:
    from octavo.engine.engine import Engine

MAX_REQUESTS = 500
_INCOMPLETE = (FinishReason.ABORT, FinishReason.ERROR, None)  # None: it runs on, here or on another engine


def snapshot(engine: Engine, seconds: float, max_requests: int = MAX_REQUESTS) -> RecordedWindow:
    """Requests that came in the last ``seconds``, the last ``max_requests`` of them."""
    timeline, since_s = engine.timeline, engine.clock.now() - seconds
    with timeline.lock:
        records, steps = timeline.records(), timeline.samples.all()
    records.sort(key=lambda record: record.arrival_s)
    recent = [record for record in records if record.arrival_s >= since_s][-max_requests:]
    begin_s = recent[0].arrival_s if recent else 0.0
    before = records[: len(records) - len(recent)] if recent else []
    starts_idle = all(record.ended_s is not None and record.ended_s <= begin_s for record in before)
    starts_idle = starts_idle and timeline.ended_records.forgotten_s <= begin_s
    requests = tuple(_request(record, begin_s) for record in recent if record.ended_s is None or record.num_output_tokens)
    return RecordedWindow(engine_of(engine), requests, tuple(map(tuple, steps)), starts_idle)


def num_output_of(record: RequestRecord) -> int:
    """Tokens of each of its choices so far."""
    return max(1, -(-record.num_output_tokens // max(1, record.num_choices)))


def measured_of(record: RequestRecord) -> tuple[float, float, float | None] | None:
    """(seconds to its last token, to its first, mean between tokens) of a request that was answered as a whole; None: it was not. The mean
    only of one choice with several tokens."""
    ended_s, first_s = record.ended_s, record.first_token_s
    if ended_s is None or first_s is None or record.finish_reason in _INCOMPLETE:
        return None
    num = record.num_output_tokens
    itl_s = (record.token_s - first_s) / (num - 1) if record.num_choices <= 1 and num > 1 else None
    return ended_s - record.arrival_s, first_s - record.arrival_s, itl_s


def _request(record: RequestRecord, begin_s: float) -> WindowRequest:
    wall_s, ttft_s, itl_s = measured_of(record) or (None, None, None)
    return WindowRequest(
        record.arrival_s - begin_s, record.num_prompt_tokens, num_output_of(record), record.max_tokens, max(1, record.num_choices),
        record.num_cached, tuple(record.keys),
        salt_key(record.cache_salt), wall_s, ttft_s, itl_s, record.priority,
    )  # fmt: skip


def engine_of(engine: Engine) -> WindowEngine:
    """Its settings and sizes, and what has been seen of drafts."""
    config, capacity, base = engine.config, engine.backend.kv_capacity(0), engine.step_cost.base
    speculator = engine.speculator
    kv_dtype = config.cache.kv_cache_dtype
    if kv_dtype == "auto":  # of 16 bits with all backends but the reference's
        kv_dtype = "f32" if config.backend.backend == "reference" else "bf16"
    assert kv_dtype in KV_DTYPES
    return WindowEngine(
        scheduler=asdict(config.scheduler),
        cache=asdict(config.cache),
        kv_dtype=kv_dtype,
        num_blocks=engine.num_kv_blocks,
        max_model_len=engine.max_model_len,
        kv_bytes_per_token=capacity.bytes_per_block // config.cache.block_size,
        num_host_blocks=engine.scheduler.num_host_blocks,
        move_s=0.0 if engine.preemption_model is None else engine.preemption_model.seconds_per_block,
        spec=config.speculative.spec,
        acceptance=speculator.stats.alpha,
        foreseen=engine.timeline.foresight.share,
        has_tiers=config.cache.has_kv_tiers,
        layout=None if capacity.layout is None or capacity.layout.window is None else layout_fields(capacity.layout),
        step_cost=None if base is None else base.to_dict(),
        num_kv_layers=0 if capacity.layout is None else len(capacity.layout.layers),
    )
