"""Messages: what is sent is what arrives, to the last bit; fields may be added; what is none of them is refused."""

from __future__ import annotations

import contextlib
import math
from dataclasses import fields, replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.config import CacheConfig, ConfigError, EngineConfig
from octavo.core.request import BeamParams, FinishReason, ParameterError, Request, SamplingParams
from octavo.core.speculative_params import SpeculativeParams
from octavo.core.step import TokenLogprobs
from octavo.distributed import messages
from octavo.distributed.messages import Event, FromWorker, MessageError, ToWorker, WireRequest
from octavo.engine.outputs import CacheMatch, OutputEvent

TOKENS = st.integers(0, 2**31 - 1)
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
TEXTS = st.text(max_size=8)
PARAMS = st.builds(
    SamplingParams,
    n=st.integers(1, 64),
    temperature=FLOATS,
    top_k=st.integers(-1, 2**31),
    top_p=FLOATS,
    min_p=FLOATS,
    repetition_penalty=FLOATS,
    presence_penalty=FLOATS,
    frequency_penalty=FLOATS,
    logit_bias=st.dictionaries(TOKENS, FLOATS, max_size=3),
    allowed_token_ids=st.none() | st.lists(TOKENS, max_size=3),
    bad_words_token_ids=st.lists(st.lists(TOKENS, max_size=3).map(tuple), max_size=2),
    seed=st.none() | st.integers(-(2**63), 2**64 - 1),
    stop=st.lists(TEXTS, max_size=3),
    stop_token_ids=st.lists(TOKENS, max_size=3),
    min_tokens=st.integers(0, 2**31),
    max_tokens=st.none() | st.integers(0, 2**31),
    ignore_eos=st.booleans(),
    logprobs=st.none() | st.integers(0, 20),
    prompt_logprobs=st.none() | st.integers(0, 20),
    include_stop_str_in_output=st.booleans(),
    skip_special_tokens=st.booleans(),
    beam=st.none() | st.builds(BeamParams, st.integers(1, 10), FLOATS, st.booleans() | st.just("never")),
)
REQUESTS = st.builds(
    Request,
    request_id=TEXTS,
    prompt_token_ids=st.lists(TOKENS, max_size=8),
    params=PARAMS,
    seed=st.integers(0, 2**64 - 1),
    eos_token_ids=st.frozensets(TOKENS, max_size=3),
    arrival_s=st.just(5.0),
    cache_salt=st.none() | TEXTS,
    priority=st.integers(-(2**63), 2**63 - 1),
    user=st.none() | TEXTS,
    speculative=st.none() | st.builds(SpeculativeParams, st.just("auto") | st.integers(0, 16), st.just("ngram")),
)
LOGPROBS = st.builds(TokenLogprobs, TOKENS, FLOATS, st.integers(1, 10), st.lists(TOKENS, max_size=3), st.lists(FLOATS, max_size=3))
OUTPUTS = st.builds(
    OutputEvent,
    request_id=st.just("r"),
    choice=st.integers(0, 63),
    text=TEXTS,
    token_ids=st.lists(TOKENS, max_size=4),
    logprobs=st.none() | st.lists(LOGPROBS, max_size=2),
    prompt_logprobs=st.none() | st.lists(LOGPROBS, max_size=2),
    finish_reason=st.none() | st.sampled_from(FinishReason),
    stop_reason=st.none() | TOKENS | TEXTS,
    num_cached_tokens=st.integers(0, 10**6),
    error=st.none() | TEXTS,
    error_code=st.none() | TEXTS,
    cache_match=st.none() | st.builds(CacheMatch, TEXTS, st.integers(0, 99), st.none() | TOKENS),
    cumulative_logprob=st.none() | FLOATS,
)


@given(REQUESTS, st.lists(TOKENS, max_size=4), st.booleans())
def test_a_request_arrives_as_it_was(request: Request, output: list[int], has_ticket: bool) -> None:
    ticket = messages.Ticket(layerwise=True) if has_ticket else None
    sent = messages.Submit(2**62, WireRequest.of(request, 1.5), output, ticket)
    got = messages.to_worker(messages.encode(sent))
    assert got == sent and isinstance(got, messages.Submit)
    assert got.request.age_s == 1.5
    assert got.request.request("here", 9.0) == replace(request, request_id="here", arrival_s=9.0, came_s=7.5)
    assert WireRequest.of(request).request("here", 9.0) == replace(request, request_id="here", arrival_s=9.0)


@given(OUTPUTS)
def test_an_event_arrives_as_it_was(event: OutputEvent) -> None:
    got = messages.from_worker(messages.encode(messages.Events([Event.of(7, event)])))
    assert isinstance(got, messages.Events)
    assert got.events[0].key == 7 and got.events[0].output("r") == event


def test_no_field_of_a_request_or_an_event_is_left_behind() -> None:
    front_ends = {"arrival_s", "received_s", "came_s", "session"}  # clocks, and what routers alone go by
    assert {f.name for f in fields(Request)} == ({*WireRequest.__struct_fields__} - {"age_s"}) | front_ends
    assert {f.name for f in fields(OutputEvent)} == ({*Event.__struct_fields__} - {"key", "account"}) | {"request_id"}


def test_smallest_and_largest_numbers_survive() -> None:
    tiny = TokenLogprobs(0, -5e-324, 1, [1], [-math.inf])
    event = OutputEvent("r", 0, "", [], logprobs=[tiny])
    assert Event.of(1, event).output("r").logprobs == [tiny]
    got = messages.from_worker(messages.encode(messages.Events([Event.of(1, event)])))
    assert isinstance(got, messages.Events) and got.events[0].logprobs == [tiny]


def all_messages(union: object) -> list[type[messages.Message]]:
    return list(union.__args__)  # type: ignore[attr-defined]


def test_every_message_has_a_tag_of_its_own_and_one_direction() -> None:
    both = [*all_messages(FromWorker), *all_messages(ToWorker)]
    tags = [kind.__struct_config__.tag for kind in both]
    assert len(set(tags)) == len(tags)
    assert set(messages.Message.__subclasses__()) == set(both)


def test_a_message_of_the_other_direction_is_refused() -> None:
    with pytest.raises(MessageError, match="worker"):
        messages.from_worker(messages.encode(messages.Beat()))
    with pytest.raises(MessageError, match="front end"):
        messages.to_worker(messages.encode(messages.Copied(1)))


def test_fields_that_a_reader_does_not_know_are_skipped() -> None:
    data = msgspec.msgpack.encode({"t": "load", "num_running": 3, "invented_later": [1, 2]})
    assert messages.from_worker(data) == messages.Load(num_running=3)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode({"t": "nonsense"}),
        msgspec.msgpack.encode({"num_running": 3}),
        msgspec.msgpack.encode({"t": "load", "num_running": "three"}),
        msgspec.msgpack.encode({"t": "events", "events": [{"key": 1, "token_ids": [1.5]}]}),
        msgspec.msgpack.encode({"t": "copied"}),
        b"\x91" * 100_000,
    ],
)
def test_what_is_no_message_is_refused(data: bytes) -> None:
    with pytest.raises(MessageError):
        messages.from_worker(data)


@given(st.binary(max_size=64))
def test_random_bytes_are_refused_or_read_but_never_fail_otherwise(data: bytes) -> None:
    for read in (messages.from_worker, messages.to_worker):
        with contextlib.suppress(MessageError):
            read(data)


@given(st.data())
def test_a_message_with_bytes_changed_is_refused_or_read_but_never_fails_otherwise(data: st.DataObject) -> None:
    params = SamplingParams(max_tokens=3, stop=("a",), logit_bias={3: 1.0}, beam=BeamParams(2))
    sent = messages.Submit(1, WireRequest("r", [1, 2], params, 3, [2], user="u", speculative=SpeculativeParams(3)), [5])
    raw = bytearray(messages.encode(sent))
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(MessageError):
        messages.to_worker(bytes(raw))


def test_text_that_is_no_unicode_is_an_error_of_its_message() -> None:
    with pytest.raises(MessageError, match="Events"):
        messages.encode(messages.Events([Event(1, text="\ud800")]))


def wire(**changes: object) -> WireRequest:
    return msgspec.structs.replace(WireRequest("r", [1, 2], SamplingParams(max_tokens=3), 4, [2]), **changes)


def test_a_request_of_a_right_front_end_passes() -> None:
    wire().check(vocab_size=3)


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"prompt_token_ids": [1, 3]}, "prompt"),
        ({"prompt_token_ids": [-1, 2]}, "prompt"),
        ({"eos_token_ids": [3]}, "eos_token_ids"),
        ({"seed": -1}, "seed"),
        ({"seed": 1 << 64}, "seed"),
        ({"params": SamplingParams()}, "max_tokens"),
        ({"params": SamplingParams(max_tokens=3, top_p=math.nan)}, "top_p"),
    ],
)
def test_a_request_that_the_scheduler_could_not_trust_is_refused(changes: dict[str, object], param: str) -> None:
    with pytest.raises(ParameterError) as caught:
        wire(**changes).check(vocab_size=3)
    assert caught.value.param == param


def test_a_configuration_travels_whole_and_is_validated() -> None:
    config = EngineConfig(cache=CacheConfig(num_kv_blocks=5, kv_disk_path="/x"))
    assert messages.config_of(messages.config_bytes(config)) == config
    with pytest.raises(MessageError):
        messages.config_of(b'{"cache": 3}')
    with pytest.raises(ConfigError, match="block_size"):
        messages.config_of(messages.config_bytes(EngineConfig(cache=CacheConfig(block_size=0))))
