"""The form of a recording: every input of a scheduler as one line of JSON, in the order in which they were given. Plain data, no files.

A scheduler reads nothing but what it is told, so the same lines told again make the same plans. The first line says what the scheduler
is; each other one is a list that begins with its kind and the number of plans made before:

    ["add", 0, {request}]                          ["abort", 3, id]                         ["fail", 3, message]
    ["add", 2, {request}, output tokens]           of a request that goes on after tokens made elsewhere
    ["plan", 3, now, digest, drafts, costs]        ["result", 3, seconds, move_seconds, slices, text_stops]

and of sequences that go to or come from another engine (``transfers``):

    ["offer", 4, now, id]                          ["release", 5, now, id]                  ["resume", 5, now, id]
    ["reserve", 4, now, {request}, num_tokens, has_room]
    ["begin", 6, now, id, output tokens, exact]    ["cancel", 6, now, id]

``digest`` names the plan that was made of it (null: none), so that a replay can tell at once where it leaves the recorded run. ``costs``
is the state of what prices gaps and preemptions, where the scheduler has these: it learns from the clock.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping
from dataclasses import asdict, fields
from hashlib import blake2b
from types import MappingProxyType
from typing import Any

from octavo.config import CacheConfig, SchedulerConfig
from octavo.core.kv_pages import PageLayout
from octavo.core.request import BeamParams, Request, SamplingParams
from octavo.core.result_checks import TextStops
from octavo.core.speculative_params import SpeculativeParams
from octavo.core.step import SliceResult, StepPlan, StepResult, TokenLogprobs

FORMAT, VERSION = "octavo-recording", 2
READ_VERSIONS = (1, 2)  # 1 tells nothing of sequences that go to or come from another engine
NO_TEXT_STOPS: TextStops = MappingProxyType({})


class RecordingError(ValueError):
    """A recording cannot be read or replayed; the message names the line and why."""


def header(
    scheduler: SchedulerConfig,
    cache: CacheConfig,
    num_blocks: int,
    max_model_len: int,
    fingerprint: str,
    num_host_blocks: int,
    prices_preemption: bool,
    layout: PageLayout | None = None,
    about: str = "",
    step_cost: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """The first line, from what a scheduler is made of. ``step_cost``: what was known of the seconds of steps beforehand, as its file says
    it; the states of the costs in the lines that follow are corrections of it."""
    settings = {name: value for name, value in asdict(scheduler).items() if name != "record"}
    sizes = {"num_blocks": num_blocks, "max_model_len": max_model_len, "num_host_blocks": num_host_blocks}
    pages = None if layout is None else layout_fields(layout)
    other = {"fingerprint": fingerprint, "prices_preemption": prices_preemption, "layout": pages, "about": about, "step_cost": step_cost}
    return {"format": FORMAT, "version": VERSION, "scheduler": settings, "cache": asdict(cache), **sizes, **other}


def layout_fields(layout: PageLayout) -> dict[str, Any]:
    """A page layout as plain data, as JSON has it."""
    return {**asdict(layout), "layers": [list(place) for place in layout.layers]}


def layout_of(data: Mapping[str, Any] | None) -> PageLayout | None:
    """The page layout that ``layout_fields`` wrote down."""
    return None if data is None else PageLayout(**{**data, "layers": tuple((column, offset) for column, offset in data["layers"])})


def dump(line: object) -> str:
    return json.dumps(line, separators=(",", ":")) + "\n"


# --- requests ---------------------------------------------------------------------------------------------------------------------------


def request_fields(request: Request) -> dict[str, Any]:
    """A request as plain data: what differs from the defaults."""
    data = _differing(request)
    data["params"] = _differing(request.params)
    if request.params.beam is not None:
        data["params"]["beam"] = asdict(request.params.beam)
    if request.params.logit_bias:
        data["params"]["logit_bias"] = list(request.params.logit_bias.items())  # JSON has no integer keys
    data["eos_token_ids"] = sorted(request.eos_token_ids)
    if request.speculative is not None:
        data["speculative"] = asdict(request.speculative)
    return data


def _differing(record: Any) -> dict[str, Any]:
    """Fields of a dataclass whose values are not the defaults."""
    neutral = {"params": None, "eos_token_ids": None}
    out = {}
    for f in fields(record):
        value = getattr(record, f.name)
        if f.name not in neutral and value != f.default and not (isinstance(value, Mapping) and not value):
            out[f.name] = value
    return out


def request_of(data: Mapping[str, Any]) -> Request:
    """The request that ``request_fields`` made ``data`` of."""
    params = dict(data["params"])
    if "beam" in params:
        params["beam"] = BeamParams(**params["beam"])
    if "logit_bias" in params:
        params["logit_bias"] = {token: bias for token, bias in params["logit_bias"]}
    if "bad_words_token_ids" in params:
        params["bad_words_token_ids"] = tuple(map(tuple, params["bad_words_token_ids"]))
    rest = {name: value for name, value in data.items() if name not in ("params", "eos_token_ids", "speculative")}
    speculative = SpeculativeParams(**data["speculative"]) if "speculative" in data else None
    return Request(params=SamplingParams(**params), eos_token_ids=frozenset(data["eos_token_ids"]), speculative=speculative, **rest)


# --- results ----------------------------------------------------------------------------------------------------------------------------


def result_fields(result: StepResult, text_stops: TextStops) -> list[Any]:
    """What follows kind and step of a "result" line. A slice is its tokens, or a list of all its fields when it has more."""
    stops = [[request_id, choice, num_kept, text] for (request_id, choice), (num_kept, text) in text_stops.items()]
    return [result.seconds, result.move_seconds, [_slice_fields(piece) for piece in result.slices], stops]


def _slice_fields(piece: SliceResult) -> Any:
    if piece.logprobs is None and piece.prompt_logprobs is None and piece.error is None:
        return piece.token_ids
    lists = [None if some is None else [list(asdict(one).values()) for one in some] for some in (piece.logprobs, piece.prompt_logprobs)]
    return {"fields": [piece.token_ids, *lists, piece.error, piece.error_code]}


def result_of(step_index: int, data: list[Any]) -> tuple[StepResult, dict[tuple[str, int], tuple[int, str]]]:
    """The result, and the text stops, that ``result_fields`` made ``data`` of."""
    seconds, move_seconds, slices, stops = data
    result = StepResult(step_index, [_slice_of(piece) for piece in slices], seconds, move_seconds)
    return result, {(request_id, choice): (num_kept, text) for request_id, choice, num_kept, text in stops}


def _slice_of(piece: Any) -> SliceResult:
    if isinstance(piece, list):
        return SliceResult(piece)
    token_ids, *lists, error, code = piece["fields"]
    logprobs, prompt_logprobs = (None if some is None else [TokenLogprobs(*one) for one in some] for some in lists)
    return SliceResult(token_ids, logprobs, prompt_logprobs, error, code)


# --- plans ------------------------------------------------------------------------------------------------------------------------------


def plan_digest(plan: StepPlan, block_size: int) -> str:
    """A name for what a backend sees of a plan, in 16 hexadecimal digits: token masks, which the scheduler does not make, left out, and
    the pages of blocks, which follow from which blocks were taken when."""
    digest = blake2b(digest_size=8)
    numbers = array("q", (plan.step_index, len(plan.slices), len(plan.block_copies), len(plan.slot_opens), len(plan.slot_forks)))
    for piece in plan.slices:
        num_blocks = -(-(piece.start + piece.num_tokens) // block_size)
        k = -1 if piece.logprobs is None else piece.logprobs
        prompt_k = -1 if piece.prompt_logprobs is None else piece.prompt_logprobs
        numbers.extend((piece.seq_id, piece.start, piece.num_tokens, piece.num_samples, piece.num_drafts, k, prompt_k, num_blocks))
        for some in (piece.token_ids, piece.block_table[:num_blocks].tolist(), piece.sample_slots, piece.next_token_ids):
            numbers.extend(some)
    for copy in plan.block_copies:
        numbers.extend((copy.src_block, copy.dst_block))
    for entry in plan.slot_opens:
        numbers.extend((entry.slot, entry.seed - (1 << 63), len(entry.prompt_token_ids), len(entry.output_token_ids)))
    for source, slot, seed in plan.slot_forks:
        numbers.extend((source, slot, seed - (1 << 63)))
    numbers.extend(plan.slot_closes)
    for moves in (plan.block_saves, plan.block_loads):
        numbers.append(len(moves))
        for move in moves:
            numbers.extend((move.pool_block, move.host_block, move.after_copies))
    digest.update(numbers.tobytes())
    return digest.hexdigest()
