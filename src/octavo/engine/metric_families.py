"""An engine's counters and gauges as plain families of samples, read at the moment of asking, so that no gauge outlives what it measures.

Names and meanings are here alone; how they are written down is the server's business.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from octavo.core.kv_tiers import TierStats
from octavo.core.request import FinishReason
from octavo.engine.causes import NAMES
from octavo.engine.explain import hide_misses, summarise
from octavo.engine.kv_disk_io import DiskTraffic
from octavo.engine.kv_flush import FlushStats
from octavo.engine.metrics import Histogram
from octavo.engine.serving import MetricFamily

if TYPE_CHECKING:
    from octavo.engine.engine import Engine
    from octavo.engine.kv_tiering import KVTiering


_SUMMARY_S = 60.0


def metric_families(engine: Engine, shows_misses: bool = False) -> list[MetricFamily]:
    """``shows_misses``: as --explain-cache; else time of misses counts as that of prompts."""
    return list(_families(engine, shows_misses))


def _families(engine: Engine, shows_misses: bool) -> Iterator[MetricFamily]:
    yield from _gauges(engine)
    yield from _counters(engine)
    yield from _tiers(engine.tiering)
    yield from _speculation(engine)
    yield from _causes(engine, shows_misses)
    metrics = engine.metrics
    yield _histogram("octavo_time_to_first_token_seconds", "From arrival to a request's first token.", metrics.time_to_first_token_s)
    yield _histogram("octavo_inter_token_seconds", "Between steps that gave a choice tokens.", metrics.inter_token_s)
    excess = "Gaps between steps that gave a choice tokens, over max_itl_ms: by how much."
    yield _histogram("octavo_inter_token_excess_seconds", excess, metrics.itl_excess_s)
    yield _histogram("octavo_request_seconds", "From arrival to a request's last token.", metrics.request_s)
    yield _histogram("octavo_step_seconds", "Time of a step, planning and text included.", metrics.step_s)
    yield _histogram("octavo_step_tokens", "Tokens computed in a step.", metrics.step_tokens)


def _gauge(name: str, description: str, value: float) -> MetricFamily:
    return MetricFamily(name, "gauge", description, [({}, value)])


def _counter(name: str, description: str, value: float) -> MetricFamily:
    return MetricFamily(name, "counter", description, [({}, value)])


def _histogram(name: str, description: str, histogram: Histogram) -> MetricFamily:
    return MetricFamily(name, "histogram", description, [({}, [*histogram.counts, histogram.total])], histogram.bounds)


def _gauges(engine: Engine) -> Iterator[MetricFamily]:
    scheduler = engine.scheduler
    yield _gauge("octavo_num_requests_running", "Sequences that hold KV blocks.", scheduler.num_running)
    waiting = "Sequences in the queue, preempted ones included."
    yield _gauge("octavo_num_requests_waiting", waiting, scheduler.num_waiting)
    blocks = MetricFamily("octavo_kv_blocks", "gauge", "KV blocks: used by sequences, cached for reuse and evictable, or free.")
    blocks.samples.append(({"state": "used"}, scheduler.num_used_blocks))
    blocks.samples.append(({"state": "cached"}, scheduler.num_cached_blocks))
    blocks.samples.append(({"state": "free"}, scheduler.num_free_blocks))
    yield blocks
    swapped = "Preempted sequences whose KV blocks are in host memory."
    yield _gauge("octavo_num_requests_swapped", swapped, scheduler.num_swapped)
    in_host = "KV blocks in host memory (swap_space): used by sequences, or free."
    host = MetricFamily("octavo_host_kv_blocks", "gauge", in_host)
    host.samples.append(({"state": "used"}, scheduler.num_used_host_blocks))
    host.samples.append(({"state": "free"}, scheduler.num_host_blocks - scheduler.num_used_host_blocks))
    yield host
    usage = scheduler.num_used_blocks / scheduler.num_blocks
    yield _gauge("octavo_kv_cache_usage_ratio", "Share of KV blocks that sequences use; cached ones do not count.", usage)
    fill = "Share of the token slots in used KV blocks that hold a token's keys and values; NaN while none are used."
    yield _gauge("octavo_kv_slots_filled_ratio", fill, scheduler.kv_occupancy().fill_ratio)
    error, pace = engine.step_cost.median_error, engine.step_cost.pace
    median = "Median relative error of the predicted seconds of the last 64 steps that the cost model was told; NaN before any."
    yield _gauge("octavo_step_cost_error_ratio", median, math.nan if error is None else error)
    slower = "Seconds of these steps over those of the calibration, median: 1 while the machine is as it was; NaN without one."
    yield _gauge("octavo_step_cost_pace_ratio", slower, math.nan if pace is None else pace)


def _tiers(tiering: KVTiering | None) -> Iterator[MetricFamily]:
    """All zero without --kv-host-memory and --kv-disk-path. What the moves are: core/kv_tiers."""
    stats = TierStats() if tiering is None else tiering.tiers.stats
    disk = None if tiering is None else tiering.disk
    read, written = (disk.read_traffic, disk.write_traffic) if disk is not None else (DiskTraffic(), DiskTraffic())
    found = "Prompt tokens found in the prefix cache that came from a lower tier."
    hits = MetricFamily("octavo_kv_tier_hits", "counter", found)
    hits.samples.append(({"tier": "host"}, stats.host_hit_tokens))
    hits.samples.append(({"tier": "disk"}, stats.disk_hit_tokens))
    yield hits
    blocks = MetricFamily("octavo_kv_tier_blocks", "counter", "KV blocks moved between tiers.")
    sizes = MetricFamily("octavo_kv_tier_bytes", "counter", "Bytes of these blocks.")
    for move, count in (
        ("save", stats.num_saved_blocks), ("load", stats.num_loaded_blocks), ("read", read.num_blocks), ("write", written.num_blocks),
    ):  # fmt: skip
        blocks.samples.append(({"move": move}, count))
        sizes.samples.append(({"move": move}, count * (0 if tiering is None else tiering.block_bytes)))
    yield blocks
    yield sizes
    beside = "Time of these moves; to and from the disk beside the steps."
    seconds = MetricFamily("octavo_kv_tier_seconds", "counter", beside)
    seconds.samples.append(({"between": "pool_host"}, stats.move_s))
    seconds.samples.append(({"between": "host_disk"}, read.seconds + written.seconds))
    yield seconds
    lost = "KV blocks that were evicted and not kept: no room in host memory, in the queue to the disk or on it."
    yield _counter("octavo_kv_tier_lost_blocks", lost, stats.num_lost_blocks + (0 if disk is None else disk.num_lost))
    given_up = "Waits for the disk that failed or took too long."
    yield _counter("octavo_kv_tier_given_up", given_up, stats.num_given_up)
    damaged = "KV block files that were not what they should be, and were dropped."
    yield _counter("octavo_kv_tier_damaged_files", damaged, 0 if disk is None else disk.store.num_damaged)
    flush = FlushStats() if tiering is None else tiering.flush_stats
    flushed = "KV blocks that were written to the disk while the engine was idle (kv_disk_flush_seconds)."
    yield _counter("octavo_kv_tier_flushed_blocks", flushed, 0 if disk is None else disk.num_flushed)
    held_s = "Time that the thread of the steps took for it, while it had none to make."
    yield _counter("octavo_kv_tier_flush_seconds", held_s, flush.seconds)
    longest = "The longest of it at a time: what a request that comes meanwhile may wait."
    yield _gauge("octavo_kv_tier_flush_longest_seconds", longest, flush.longest_s)
    held = "Blocks of host memory (kv_host_memory) that hold KV."
    yield _gauge("octavo_kv_tier_host_blocks", held, 0 if tiering is None else tiering.tiers.num_used_host_blocks)


def _speculation(engine: Engine) -> Iterator[MetricFamily]:
    stats = engine.speculator.stats
    yield _counter("octavo_spec_decode_num_draft_tokens", "Drafts that were verified.", stats.num_proposed)
    yield _counter("octavo_spec_decode_num_accepted_tokens", "Drafts that were accepted.", stats.num_accepted)
    per_position = (
        ("octavo_spec_decode_num_tested_tokens_per_pos", "Drafts behind accepted ones, by their place in the draft.", stats.tested),
        ("octavo_spec_decode_num_accepted_tokens_per_pos", "Accepted drafts by their place in the draft.", stats.accepted),
    )
    for name, description, counts in per_position:
        family = MetricFamily(name, "counter", description)
        for position, count in enumerate(counts):
            family.samples.append(({"position": str(position)}, count))
        yield family
    saved = "Time that drafts have saved, against an estimate of plain decoding from measured steps; less the time of drafting."
    yield _gauge("octavo_spec_decode_saved_seconds", saved, stats.saved_s)


def _causes(engine: Engine, shows_misses: bool) -> Iterator[MetricFamily]:
    seconds = MetricFamily("octavo_request_cause_seconds", "counter", "Time of ended requests by what it went to.")
    totals = engine.timeline.ended_records.totals[:]
    if not shows_misses:
        hide_misses(totals, engine.timeline.ended_records.own_missed_s)
    for name, total in zip(NAMES, totals, strict=True):
        seconds.samples.append(({"cause": name}, max(0.0, total)))
    yield seconds
    summary = summarise(engine.timeline, _SUMMARY_S, engine.clock.now())
    share = "Share of the time behind a percentile, over the last minute, by what is short; see /v1/explain/summary."
    held = MetricFamily("octavo_bottleneck_ratio", "gauge", share)
    for of, quantiles in (("ttft", summary.ttft), ("itl", summary.itl)):
        for quantile, found in quantiles.items():
            for bottleneck, ratio in found.shares:
                held.samples.append(({"of": of, "quantile": quantile, "bottleneck": bottleneck.value}, ratio))
    yield held


def _counters(engine: Engine) -> Iterator[MetricFamily]:
    stats, metrics = engine.scheduler.stats, engine.metrics
    finished = MetricFamily("octavo_requests_finished", "counter", "Requests by how they ended.")
    for reason in FinishReason:
        finished.samples.append(({"reason": reason.value}, metrics.num_finished[reason]))
    yield finished
    for name, description, value in (
        ("octavo_requests", "Requests taken.", stats.num_requests),
        ("octavo_prompt_tokens", "Prompt tokens of requests taken.", metrics.num_prompt_tokens),
        ("octavo_generation_tokens", "Output tokens kept.", stats.num_output_tokens),
        ("octavo_computed_tokens", "Tokens that went through the model, recomputation included.", stats.num_computed_tokens),
        ("octavo_prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", stats.prefix_query_tokens),
        ("octavo_prefix_cache_hits", "Prompt tokens found there.", stats.prefix_hit_tokens),
        ("octavo_prefix_cache_partial_hits", "Of these, in blocks that matched in part and were copied.", stats.prefix_tail_tokens),
        ("octavo_prefix_cache_copies", "Blocks copied because they matched a prompt in part.", stats.num_tail_copies),
        ("octavo_preemptions", "Sequences that gave their blocks back to others.", stats.num_preemptions),
        ("octavo_preemptions_by_swap", "Of these, sequences whose blocks went to host memory.", stats.num_swap_preemptions),
        ("octavo_swapped_out_blocks", "KV blocks copied to host memory.", stats.num_blocks_saved),
        ("octavo_swapped_in_blocks", "KV blocks copied from host memory.", stats.num_blocks_loaded),
        ("octavo_swap_seconds", "Time of these copies.", stats.move_s),
        ("octavo_steps", "Steps done.", stats.num_steps),
        ("octavo_inter_token_bound_broken", "Gaps between tokens of a choice that were over max_itl_ms.", metrics.itl_excess_s.count),
        ("octavo_failed_steps", "Steps that could not be computed.", metrics.num_failed_steps),
        ("octavo_queue_seconds", "Time that started requests waited, in all.", stats.queue_s),
    ):
        yield _counter(name, description, value)
