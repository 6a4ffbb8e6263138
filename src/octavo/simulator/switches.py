"""The switches of an engine, each as what a simulation of it looks like with that one changed. Plain lists; runs nothing."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace

from octavo.config import CacheConfig, SchedulerConfig
from octavo.core.cluster_window import ClusterWindow
from octavo.core.recorded_window import RecordedWindow, WindowEngine
from octavo.core.recording import layout_of
from octavo.costs.coefficients import Coefficients
from octavo.simulator.engine_spec import EngineSpec, Speculation
from octavo.simulator.window_load import WindowLoad, load_of

KV_BYTES = {"f32": 4.0, "bf16": 2.0, "f16": 2.0, "int8": 1.0625}  # of a number; int8 has a scale of 4 bytes for each 64
_MOST_BATCHED_TOKENS = 8192
_MOST_SEQS = 1024
_TWO = "--workers 2"
ONE_SALT = "one cache_salt for requests that may share"
_BOUNDS = (2, 4)  # on gaps, in usual steps
_KNOWN_LENGTHS = 0.9  # of max_tokens that answers make where their lengths can be told beforehand


@dataclass(frozen=True, slots=True)
class Switch:
    """``kind``: of switches of which one would be thrown; ``change``: which way, a flag where it is one; ``why``: what it acts on."""

    kind: str
    change: str
    why: str
    specs: tuple[EngineSpec, ...]
    by_prefix: bool = False  # requests that begin alike go to one engine
    load: WindowLoad | None = None  # None: the window's


def spec_of(engine: WindowEngine, load: WindowLoad, cost: Coefficients) -> EngineSpec:
    """The recorded engine, unchanged."""
    spec = EngineSpec(
        cost,
        engine.num_blocks,
        engine.max_model_len,
        SchedulerConfig(**{**engine.scheduler, "record": None}),
        CacheConfig(**engine.cache),
        kv_bytes_per_token=engine.kv_bytes_per_token,
        num_host_blocks=engine.num_host_blocks,
        move_s=engine.move_s,
        text=load.text,
        layout=layout_of(engine.layout),
    )
    drafts = engine.acceptance is not None and engine.spec not in ("off", 0)
    return replace(spec, speculation=Speculation(engine.spec, engine.acceptance or 0.0)) if drafts else spec


def switches_of(window: RecordedWindow, load: WindowLoad, spec: EngineSpec, cost: Coefficients) -> list[Switch]:
    """All that can be tried, the ones that help most often first."""
    return [*_workers(load, spec), *own_switches(window, spec), *_disaggregation(spec), *_salt(window, spec, cost)]


def own_switches(window: RecordedWindow | ClusterWindow, spec: EngineSpec) -> list[Switch]:
    """Those of the engine itself, whatever else there is. Which there are follows from the window and the settings alone."""
    return [
        *_pool(window.engine, spec),
        *_places(spec),
        *_prefix_cache(spec),
        *_chunks(spec),
        *_bounds(window, spec),
        *_policies(window, spec),
        *_speculation(window.engine, spec),
    ]


def _pool(engine: WindowEngine, spec: EngineSpec) -> list[Switch]:
    doubled = replace(spec, num_blocks=2 * spec.num_blocks)
    found = [Switch("pool", f"--num-kv-blocks {doubled.num_blocks}", "twice the room for KV", (doubled,))]
    bytes_now = KV_BYTES[engine.kv_dtype]
    smaller = {"f32": "bf16"}.get(engine.kv_dtype, "int8")
    if KV_BYTES[smaller] < bytes_now:
        num_blocks = int(spec.num_blocks * bytes_now / KV_BYTES[smaller])
        kv_bytes = round(spec.kv_bytes_per_token * KV_BYTES[smaller] / bytes_now)
        packed = replace(spec, num_blocks=num_blocks, kv_bytes_per_token=kv_bytes)
        why = f"{num_blocks / spec.num_blocks:.2f} times the KV in the same memory; steps are taken to cost what they do now"
        found.append(Switch("kv_dtype", f"--kv-cache-dtype {smaller}", why, (packed,)))
    return found


def _places(spec: EngineSpec) -> list[Switch]:
    now, found = spec.scheduler, []
    for factor in (2, 4):
        num_seqs = now.max_num_seqs * factor
        if num_seqs <= min(_MOST_SEQS, now.max_num_batched_tokens):
            wider = replace(spec, scheduler=replace(now, max_num_seqs=num_seqs))
            found.append(Switch("places", f"--max-num-seqs {num_seqs}", "more sequences in one step", (wider,)))
    return found


def _prefix_cache(spec: EngineSpec) -> list[Switch]:
    cache = spec.cache
    if cache.enable_prefix_caching:
        off = replace(cache, enable_prefix_caching=False, prefix_granularity="block")
        why = "every prompt is computed from its first token"
        return [Switch("prefix_cache", "--no-enable-prefix-caching", why, (replace(spec, cache=off),))]
    if cache.kv_reservation != "paged":
        return []
    on, shown = replace(spec, cache=replace(cache, enable_prefix_caching=True)), "prefix caching (leave out --no-enable-prefix-caching)"
    return [Switch("prefix_cache", shown, "equal beginnings are computed once", (on,))]


def _chunks(spec: EngineSpec) -> list[Switch]:
    now, found = spec.scheduler, []
    for num, den in ((1, 4), (1, 2), (2, 1), (4, 1)):
        budget = now.max_num_batched_tokens * num // den
        if now.max_num_seqs <= budget <= _MOST_BATCHED_TOKENS:
            sized = replace(spec, scheduler=replace(now, max_num_batched_tokens=budget))
            found.append(Switch("chunk", f"--max-num-batched-tokens {budget}", "how much of prompts a step computes", (sized,)))
    return found


def _bounds(window: RecordedWindow | ClusterWindow, spec: EngineSpec) -> list[Switch]:
    """Bounds on the gaps of running streams, in steps that only decode; none where there is one."""
    now, found = spec.scheduler, []
    if now.max_itl_ms is not None:
        free = replace(spec, scheduler=replace(now, max_itl_ms=None))
        return [Switch("bound", "no bound on gaps (leave out --max-itl-ms)", "prompts need not wait for the bound", (free,))]
    decoding = [step[-1] for step in window.steps if step[0] == step[1] and step[-1] > 0.0]
    if not decoding or not now.enable_chunked_prefill or now.scheduling_policy == "prefill_first":
        return []
    for times in _BOUNDS:
        bound_ms = float(f"{1000 * times * statistics.median(decoding):.2g}")
        bounded = replace(spec, scheduler=replace(now, max_itl_ms=bound_ms))
        why = f"pieces of prompts that keep the gaps of streams beside them at {times} usual steps"
        found.append(Switch("bound", f"--max-itl-ms {bound_ms:g}", why, (bounded,)))
    return found


def _policies(window: RecordedWindow | ClusterWindow, spec: EngineSpec) -> list[Switch]:
    """Shortest first needs lengths that are known beforehand: then, and only then, is max_tokens what a request will make."""
    now, found = spec.scheduler, []
    made = sum(request.num_output for request in window.requests)
    asked = sum(request.max_tokens for request in window.requests)
    names = {"fcfs": "who came first goes first", "srf": "who has least left goes first"}
    for name, why in names.items():
        if name != now.scheduling_policy and (name == "fcfs" or made >= _KNOWN_LENGTHS * asked):
            other = replace(spec, scheduler=replace(now, scheduling_policy=name))
            found.append(Switch("policy", f"--scheduling-policy {name}", why, (other,)))
    return found


def _speculation(engine: WindowEngine, spec: EngineSpec) -> list[Switch]:
    if spec.speculation is not None:
        return [Switch("speculation", "--spec off", "no drafts", (replace(spec, speculation=None),))]
    if engine.acceptance is not None:
        chance, why = engine.acceptance, f"of the drafts seen {100 * engine.acceptance:.0f} % came true"
    elif engine.foreseen is not None:
        chance, why = engine.foreseen, f"{100 * engine.foreseen:.0f} % of the answers' tokens could have been foretold (a guess)"
    else:
        return []
    return [Switch("speculation", "--spec auto", why, (replace(spec, speculation=Speculation("auto", chance)),))]


def _workers(load: WindowLoad, spec: EngineSpec) -> list[Switch]:
    why, both = "requests go to the one of two machines like this one that has less to do", (spec, replace(spec, name="second"))
    found = [Switch("workers", f"a second worker ({_TWO})", why, both)]
    if load.shares_prefixes:
        why = "of two machines like this one, requests that begin alike go to the same"
        found.append(Switch("workers", f"a second worker ({_TWO} --router prefix-affinity)", why, both, True))
    return found


def can_hand_over(spec: EngineSpec) -> bool:
    """KV that goes to host memory is not handed over."""
    return spec.kv_bytes_per_token >= 1 and not spec.num_host_blocks


def _disaggregation(spec: EngineSpec) -> list[Switch]:
    if not can_hand_over(spec):
        return []
    roles = (replace(spec, name="prefill", role="prefill"), replace(spec, name="decode", role="decode"))
    why = "prompts on one machine like this one, tokens on another, 25 GB/s between them"
    return [Switch("disaggregation", "prefill and decode apart (--workers prefill=1,decode=1)", why, roles)]


def unsalted(window: RecordedWindow | ClusterWindow, spec: EngineSpec, cost: Coefficients) -> WindowLoad | None:
    """The window as if all requests had the same salt; None: they have, or nothing is cached."""
    if not spec.cache.enable_prefix_caching or len({request.salt for request in window.requests}) < 2:
        return None
    return load_of(replace(window, requests=tuple(replace(request, salt=0) for request in window.requests)), cost)


def _salt(window: RecordedWindow, spec: EngineSpec, cost: Coefficients) -> list[Switch]:
    shared = unsalted(window, spec, cost)
    if shared is None:
        return []
    return [Switch("salt", ONE_SALT, "equal beginnings of all are computed once", (replace(spec, text=shared.text),), load=shared)]
