"""GET /metrics: the engine's counters and gauges in Prometheus' text format.

Everything is read from the engine at the moment of the scrape, so that no gauge can outlive what it measures.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from octavo.core.kv_tiers import TierStats
from octavo.core.request import FinishReason
from octavo.engine.causes import NAMES
from octavo.engine.explain import hide_misses, summarise
from octavo.engine.kv_disk_io import DiskTraffic
from octavo.engine.kv_flush import FlushStats
from octavo.engine.metrics import Histogram

if TYPE_CHECKING:
    from octavo.engine.engine import Engine
    from octavo.engine.kv_tiering import KVTiering


_SUMMARY_S = 60.0


def exposition(engine: Engine, shows_misses: bool = False) -> tuple[bytes, bytes]:
    """(body, content type). ``shows_misses``: as --explain-cache; else time of misses counts as that of prompts."""
    from prometheus_client import CollectorRegistry
    from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(engine, shows_misses))
    return generate_latest(registry), CONTENT_TYPE_LATEST.encode()


class _Collector:
    def __init__(self, engine: Engine, shows_misses: bool) -> None:
        self._engine = engine
        self._shows_misses = shows_misses

    def collect(self) -> Iterator[Any]:
        yield from _gauges(self._engine)
        yield from _counters(self._engine)
        yield from _tiers(self._engine.tiering)
        yield from _speculation(self._engine)
        yield from _causes(self._engine, self._shows_misses)
        metrics = self._engine.metrics
        yield _histogram("octavo_time_to_first_token_seconds", "From arrival to a request's first token.", metrics.time_to_first_token_s)
        yield _histogram("octavo_inter_token_seconds", "Between steps that gave a choice tokens.", metrics.inter_token_s)
        excess = "Gaps between steps that gave a choice tokens, over max_itl_ms: by how much."
        yield _histogram("octavo_inter_token_excess_seconds", excess, metrics.itl_excess_s)
        yield _histogram("octavo_request_seconds", "From arrival to a request's last token.", metrics.request_s)
        yield _histogram("octavo_step_seconds", "Time of a step, planning and text included.", metrics.step_s)
        yield _histogram("octavo_step_tokens", "Tokens computed in a step.", metrics.step_tokens)


def _gauges(engine: Engine) -> Iterator[Any]:
    from prometheus_client.core import GaugeMetricFamily

    scheduler = engine.scheduler
    yield GaugeMetricFamily("octavo_num_requests_running", "Sequences that hold KV blocks.", value=scheduler.num_running)
    waiting = "Sequences in the queue, preempted ones included."
    yield GaugeMetricFamily("octavo_num_requests_waiting", waiting, value=scheduler.num_waiting)
    blocks = GaugeMetricFamily(
        "octavo_kv_blocks", "KV blocks: used by sequences, cached for reuse and evictable, or free.", labels=["state"]
    )
    blocks.add_metric(["used"], scheduler.num_used_blocks)
    blocks.add_metric(["cached"], scheduler.num_cached_blocks)
    blocks.add_metric(["free"], scheduler.num_free_blocks)
    yield blocks
    swapped = "Preempted sequences whose KV blocks are in host memory."
    yield GaugeMetricFamily("octavo_num_requests_swapped", swapped, value=scheduler.num_swapped)
    in_host = "KV blocks in host memory (swap_space): used by sequences, or free."
    host = GaugeMetricFamily("octavo_host_kv_blocks", in_host, labels=["state"])
    host.add_metric(["used"], scheduler.num_used_host_blocks)
    host.add_metric(["free"], scheduler.num_host_blocks - scheduler.num_used_host_blocks)
    yield host
    usage = scheduler.num_used_blocks / scheduler.num_blocks
    yield GaugeMetricFamily("octavo_kv_cache_usage_ratio", "Share of KV blocks that sequences use; cached ones do not count.", value=usage)
    fill = "Share of the token slots in used KV blocks that hold a token's keys and values; NaN while none are used."
    yield GaugeMetricFamily("octavo_kv_slots_filled_ratio", fill, value=scheduler.kv_occupancy().fill_ratio)
    error, pace = engine.step_cost.median_error, engine.step_cost.pace
    median = "Median relative error of the predicted seconds of the last 64 steps that the cost model was told; NaN before any."
    yield GaugeMetricFamily("octavo_step_cost_error_ratio", median, value=math.nan if error is None else error)
    slower = "Seconds of these steps over those of the calibration, median: 1 while the machine is as it was; NaN without one."
    yield GaugeMetricFamily("octavo_step_cost_pace_ratio", slower, value=math.nan if pace is None else pace)


def _tiers(tiering: KVTiering | None) -> Iterator[Any]:
    """All zero without --kv-host-memory and --kv-disk-path. What the moves are: core/kv_tiers."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    stats = TierStats() if tiering is None else tiering.tiers.stats
    disk = None if tiering is None else tiering.disk
    read, written = (disk.read_traffic, disk.write_traffic) if disk is not None else (DiskTraffic(), DiskTraffic())
    found = "Prompt tokens found in the prefix cache that came from a lower tier."
    hits = CounterMetricFamily("octavo_kv_tier_hits", found, labels=["tier"])
    hits.add_metric(["host"], stats.host_hit_tokens)
    hits.add_metric(["disk"], stats.disk_hit_tokens)
    yield hits
    blocks = CounterMetricFamily("octavo_kv_tier_blocks", "KV blocks moved between tiers.", labels=["move"])
    sizes = CounterMetricFamily("octavo_kv_tier_bytes", "Bytes of these blocks.", labels=["move"])
    for move, count in (
        ("save", stats.num_saved_blocks), ("load", stats.num_loaded_blocks), ("read", read.num_blocks), ("write", written.num_blocks),
    ):  # fmt: skip
        blocks.add_metric([move], count)
        sizes.add_metric([move], count * (0 if tiering is None else tiering.block_bytes))
    yield blocks
    yield sizes
    beside = "Time of these moves; to and from the disk beside the steps."
    seconds = CounterMetricFamily("octavo_kv_tier_seconds", beside, labels=["between"])
    seconds.add_metric(["pool_host"], stats.move_s)
    seconds.add_metric(["host_disk"], read.seconds + written.seconds)
    yield seconds
    lost = "KV blocks that were evicted and not kept: no room in host memory, in the queue to the disk or on it."
    yield CounterMetricFamily("octavo_kv_tier_lost_blocks", lost, value=stats.num_lost_blocks + (0 if disk is None else disk.num_lost))
    given_up = "Waits for the disk that failed or took too long."
    yield CounterMetricFamily("octavo_kv_tier_given_up", given_up, value=stats.num_given_up)
    damaged = "KV block files that were not what they should be, and were dropped."
    yield CounterMetricFamily("octavo_kv_tier_damaged_files", damaged, value=0 if disk is None else disk.store.num_damaged)
    flush = FlushStats() if tiering is None else tiering.flush_stats
    flushed = "KV blocks that were written to the disk while the engine was idle (kv_disk_flush_seconds)."
    yield CounterMetricFamily("octavo_kv_tier_flushed_blocks", flushed, value=0 if disk is None else disk.num_flushed)
    held_s = "Time that the thread of the steps took for it, while it had none to make."
    yield CounterMetricFamily("octavo_kv_tier_flush_seconds", held_s, value=flush.seconds)
    longest = "The longest of it at a time: what a request that comes meanwhile may wait."
    yield GaugeMetricFamily("octavo_kv_tier_flush_longest_seconds", longest, value=flush.longest_s)
    held = "Blocks of host memory (kv_host_memory) that hold KV."
    yield GaugeMetricFamily("octavo_kv_tier_host_blocks", held, value=0 if tiering is None else tiering.tiers.num_used_host_blocks)


def _speculation(engine: Engine) -> Iterator[Any]:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    stats = engine.speculator.stats
    yield CounterMetricFamily("octavo_spec_decode_num_draft_tokens", "Drafts that were verified.", value=stats.num_proposed)
    yield CounterMetricFamily("octavo_spec_decode_num_accepted_tokens", "Drafts that were accepted.", value=stats.num_accepted)
    per_position = (
        ("octavo_spec_decode_num_tested_tokens_per_pos", "Drafts behind accepted ones, by their place in the draft.", stats.tested),
        ("octavo_spec_decode_num_accepted_tokens_per_pos", "Accepted drafts by their place in the draft.", stats.accepted),
    )
    for name, description, counts in per_position:
        family = CounterMetricFamily(name, description, labels=["position"])
        for position, count in enumerate(counts):
            family.add_metric([str(position)], count)
        yield family
    saved = "Time that drafts have saved, against an estimate of plain decoding from measured steps; less the time of drafting."
    yield GaugeMetricFamily("octavo_spec_decode_saved_seconds", saved, value=stats.saved_s)


def _causes(engine: Engine, shows_misses: bool) -> Iterator[Any]:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    seconds = CounterMetricFamily("octavo_request_cause_seconds", "Time of ended requests by what it went to.", labels=["cause"])
    totals = engine.timeline.ended_records.totals[:]
    if not shows_misses:
        hide_misses(totals, engine.timeline.ended_records.own_missed_s)
    for name, total in zip(NAMES, totals, strict=True):
        seconds.add_metric([name], max(0.0, total))
    yield seconds
    summary = summarise(engine.timeline, _SUMMARY_S, engine.clock.now())
    share = "Share of the time behind a percentile, over the last minute, by what is short; see /v1/explain/summary."
    held = GaugeMetricFamily("octavo_bottleneck_ratio", share, labels=["of", "quantile", "bottleneck"])
    for of, quantiles in (("ttft", summary.ttft), ("itl", summary.itl)):
        for quantile, found in quantiles.items():
            for bottleneck, ratio in found.shares:
                held.add_metric([of, quantile, bottleneck.value], ratio)
    yield held


def _counters(engine: Engine) -> Iterator[Any]:
    from prometheus_client.core import CounterMetricFamily

    stats, metrics = engine.scheduler.stats, engine.metrics
    finished = CounterMetricFamily("octavo_requests_finished", "Requests by how they ended.", labels=["reason"])
    for reason in FinishReason:
        finished.add_metric([reason.value], metrics.num_finished[reason])
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
        yield CounterMetricFamily(name, description, value=value)


def _histogram(name: str, description: str, histogram: Histogram) -> Any:
    from prometheus_client.core import HistogramMetricFamily

    buckets = []
    count = 0
    for bound, n in zip((*histogram.bounds, float("inf")), histogram.counts, strict=True):
        count += n
        buckets.append((str(bound) if bound != float("inf") else "+Inf", count))
    return HistogramMetricFamily(name, description, buckets=buckets, sum_value=histogram.total)
