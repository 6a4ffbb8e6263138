"""One call to a generating route, from its prompts to its answer: whole or streamed.

Owns the state of the call: the outputs so far, usage, and which choice of the answer an event belongs to. How a choice looks is left to
a ``ChoiceFormat`` (``completions`` and ``chat`` have one each).
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

from octavo.core.request import SamplingParams
from octavo.engine.event_stream import EngineUnavailable, StreamOverflow
from octavo.engine.outputs import CacheMatch, CompletionOutput, GenerationError, OutputEvent, RequestOutput
from octavo.engine.params import PreparedRequest, RequestOptions
from octavo.engine.serving import ServingEngine
from octavo.server.asgi import Header, Scope, Send, drop_connection, send_json
from octavo.server.choices import best_choices
from octavo.server.errors import as_api_error
from octavo.server.explain import Explainer
from octavo.server.prompts import Prompt, run_aside
from octavo.server.streaming import DONE, EVENT_STREAM_HEADERS, Frames, error_event

logger = logging.getLogger("octavo.server")

_LARGE_BYTES = 64 << 10  # which asyncio's transports take before they have a writer wait
PROMPT_COST = 400  # token ids whose checks take as long as all else that is done to queue a prompt


@dataclass(frozen=True, slots=True)
class CallIdentity:
    """How an answer names itself."""

    id_prefix: str
    model: str
    fingerprint: str


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a call asks for besides its prompts. ``default_max_tokens`` holds where ``params`` has none, within the context. ``num_shown``:
    choices of the answer; ``params.n`` may be more (best_of)."""

    params: SamplingParams
    num_shown: int
    default_max_tokens: int | None
    request_id: str | None  # the client's name for the answer; None: a new one
    warnings: list[str]
    options: RequestOptions
    explain_cache: bool = False  # usage says why prompts were found no further in the prefix cache
    explains: bool = False  # the answer says where its time went


class ChoiceFormat(Protocol):
    """How one API shows a choice."""

    whole_object: str
    chunk_object: str

    def whole(self, index: int, output: RequestOutput, completion: CompletionOutput) -> dict[str, Any]:
        """The choice of a plain answer."""
        ...

    def chunks(self, index: int, output: RequestOutput, event: OutputEvent, first: bool) -> list[bytes]:
        """The choices (JSON) that show one event of a stream; ``first``: it is the choice's first event."""
        ...

    def whole_fields(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """More top-level fields of a plain answer."""
        ...

    def first_chunk_fields(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """More top-level fields of a stream's first chunk."""
        ...


@dataclass(slots=True)
class Call:
    """``outputs`` are by prompt, with all choices that are made; of these the best ``n`` are shown. Choice c of prompt p has index
    p * n + c in the answer."""

    response_id: str
    model: str
    fingerprint: str
    prepared: list[PreparedRequest]
    outputs: list[RequestOutput]
    warnings: list[str]
    n: int
    explain_cache: bool = False
    explains: bool = False
    num_output_tokens: int = 0
    created: int = field(default_factory=lambda: int(time.time()))

    def shared_fields(self, object_name: str) -> dict[str, Any]:
        return {
            "id": self.response_id,
            "object": object_name,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }

    def usage(self) -> dict[str, Any]:
        num_prompt = sum(len(o.prompt_token_ids) for o in self.outputs)
        details: dict[str, Any] = {"cached_tokens": sum(o.num_cached_tokens for o in self.outputs)}
        if self.explain_cache:
            details["cache_matches"] = [_shown_match(o.cache_match) for o in self.outputs]
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": self.num_output_tokens,
            "total_tokens": num_prompt + self.num_output_tokens,
            "prompt_tokens_details": details,
        }


def _shown_match(match: CacheMatch | None) -> dict[str, Any] | None:
    """A match as usage shows it, without the fields that say nothing."""
    return None if match is None else {name: value for name, value in asdict(match).items() if value is not None}


async def open_call(engine: ServingEngine, identity: CallIdentity, prompts: Sequence[Prompt], wanted: Wanted) -> Call:
    """Check all prompts of a call before any of them is queued. Raises ParameterError, EngineUnavailable."""
    params = wanted.params
    size = sum(len(prompt.token_ids) + PROMPT_COST for prompt in prompts) + sum(map(len, params.bad_words))
    size += len(params.logit_bias) + len(params.allowed_token_ids or ()) + len(params.stop_token_ids)
    return await run_aside(size, _checked_call, engine, identity, prompts, wanted)


def _checked_call(engine: ServingEngine, identity: CallIdentity, prompts: Sequence[Prompt], wanted: Wanted) -> Call:
    unique = uuid.uuid4().hex  # clients may use one name twice, the engine may not
    response_id = f"{identity.id_prefix}-{wanted.request_id or unique}"
    prepared = []
    checked = engine.check_params(wanted.params)
    for i, prompt in enumerate(prompts):
        params = checked
        if params.max_tokens is None and wanted.default_max_tokens is not None:
            room = engine.room(len(prompt.token_ids))
            default = max(wanted.default_max_tokens, params.min_tokens)
            params = replace(params, max_tokens=max(1, min(default, room)))
        prepared.append(engine.prepare_checked(prompt.token_ids, params, f"{unique}-{i}", **wanted.options))
    outputs = [RequestOutput.start(one.request, prompt.text, one.warnings) for one, prompt in zip(prepared, prompts, strict=True)]
    warnings = list(dict.fromkeys([*wanted.warnings, *(w for one in prepared for w in one.warnings)]))
    shown = (wanted.num_shown, wanted.explain_cache, wanted.explains)
    return Call(response_id, identity.model, identity.fingerprint, prepared, outputs, warnings, *shown)


class Answer:
    """Runs one call and sends its answer; aborts what is left of it when sending ends early."""

    def __init__(
        self, engine: ServingEngine, call: Call, choice_format: ChoiceFormat, scope: Scope, send: Send, explainer: Explainer
    ) -> None:
        self._engine = engine
        self._call = call
        self._format = choice_format
        self._scope = scope
        self._delivery = explainer.delivery([one.request for one in call.prepared], send)
        self._send = self._delivery.send
        self._explainer = explainer
        self._prompt_index = {one.request.request_id: i for i, one in enumerate(call.prepared)}
        self._seen: set[int] = set()  # choices that have had an event
        self._started = False

    async def whole(self, headers: tuple[Header, ...]) -> None:
        """One JSON answer when every choice has ended. Raises GenerationError."""
        call = self._call
        stream = self._engine.submit(call.prepared)
        try:
            while not stream.finished:
                for event in await stream.read():
                    if event.error is not None:
                        raise self._error_of(event)
                    self._count(event).apply(event)
        finally:
            self._engine.abort(stream)
        content = call.shared_fields(self._format.whole_object)
        shown = [(output, choice) for output in call.outputs for choice in best_choices(output.outputs, call.n)]
        content["choices"] = [self._format.whole(index, output, choice) for index, (output, choice) in enumerate(shown)]
        content["usage"] = call.usage()
        content |= self._format.whole_fields(call.outputs)
        content |= await self._explanation()
        if call.warnings:
            content["warnings"] = call.warnings
        await send_json(self._send, content, headers=headers, until_taken=True)
        self._delivery.done()

    async def streamed(self, headers: tuple[Header, ...], include_usage: bool) -> None:
        """Chunks as events come. An error before the first chunk is raised; a later one becomes an error event."""
        call = self._call
        frames = Frames(call.shared_fields(self._format.chunk_object), include_usage)
        first_fields = self._format.first_chunk_fields(call.outputs) | ({"warnings": call.warnings} if call.warnings else {})
        if first_fields:
            frames.add_to_first(first_fields)
        stream = self._engine.submit(call.prepared)
        stream.on_overflow = lambda: drop_connection(self._scope)
        data, error = b"", None
        try:
            while error is None and not stream.finished:
                if data:
                    await self._send_chunks(data, headers)
                events = await stream.read()
                explanation: dict[str, Any] = await self._explanation() if stream.finished and not include_usage else {}
                data, error = self._chunks(events, frames, explanation)
            if error is not None:
                if not (data or self._started):
                    raise error
                data += error_event(as_api_error(error).content())
            elif include_usage:
                data += frames.usage(call.usage(), await self._explanation())
            if len(data) > _LARGE_BYTES:  # so much may lie unsent in the server, and what follows is not written before
                await self._write(data, headers)
                data = b""
            await self._send_chunks(data + DONE, headers, more=False)
        except StreamOverflow as overflow:
            logger.warning("%s: its client was cut off: %s", call.response_id, overflow)
        finally:
            self._engine.abort(stream)

    async def _send_chunks(self, data: bytes, headers: tuple[Header, ...], more: bool = True) -> None:
        await self._write(data, headers, more)
        self._delivery.sent()

    async def _write(self, data: bytes, headers: tuple[Header, ...], more: bool = True) -> None:
        if not self._started:
            self._started = True
            await self._send({"type": "http.response.start", "status": 200, "headers": [*EVENT_STREAM_HEADERS, *headers]})
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

    async def _explanation(self) -> dict[str, Any]:
        """More top-level fields of an answer whose requests have ended: where the time went, if that was asked for."""
        return {"explain": await self._explainer.of_call(self._call.response_id)} if self._call.explains else {}

    def _chunks(self, events: list[OutputEvent], frames: Frames, last_fields: dict[str, Any]) -> tuple[bytes, Exception | None]:
        """The chunks of some events, in one piece, and the error that ended them. Keeps no output: a stream's memory does not grow.

        ``last_fields``: more top-level fields of the last chunk.
        """
        data = b""
        for event in events:
            if event.error is not None:
                return data, self._error_of(event)
            output = self._count(event)
            output.apply_to_prompt(event)
            index = self._prompt_index[event.request_id] * self._call.n + event.choice
            first = index not in self._seen
            self._seen.add(index)
            self._delivery.made(event)
            *choices, last = self._format.chunks(index, output, event, first)
            for choice in choices:
                data += frames.chunk(choice)
            data += frames.chunk(last, last_fields if event is events[-1] else None)
        return data, None

    def _count(self, event: OutputEvent) -> RequestOutput:
        """Count an event's tokens; the output it belongs to."""
        self._call.num_output_tokens += len(event.token_ids)
        return self._call.outputs[self._prompt_index[event.request_id]]

    def _error_of(self, event: OutputEvent) -> Exception:
        message = str(event.error)
        if self._engine.draining and event.error_code is None:
            return EngineUnavailable(message)
        return GenerationError(message, event.error_code)
