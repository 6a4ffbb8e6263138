"""Turns that begin with all that was said before."""

from __future__ import annotations

from itertools import islice, pairwise, takewhile

import pytest

from octavo.workload.arrivals import OpenLoop
from octavo.workload.conversations import Conversations
from octavo.workload.lengths import Fixed, Uniform
from octavo.workload.requests import WorkloadRequest


def made(**options: object) -> Conversations:
    return Conversations(OpenLoop(2.0), Uniform(5, 20), Uniform(1, 10), **options)  # type: ignore[arg-type]


def sessions(conversations: Conversations, num_requests: int = 300) -> dict[str, list[WorkloadRequest]]:
    found = dict[str, list[WorkloadRequest]]()
    for request in islice(conversations.requests(), num_requests):
        assert request.session is not None
        found.setdefault(request.session, []).append(request)
    return found


def test_each_turn_begins_with_the_last_and_its_answer() -> None:
    found = sessions(made(num_system=7, num_groups=2, answer_token=5))
    assert sum(len(turns) > 2 for turns in found.values()) > 10
    for turns in found.values():
        for before, after in pairwise(turns):
            said = before.prompt_token_ids + [5] * before.num_output
            assert after.prompt_token_ids[: len(said)] == said and 5 <= len(after.prompt_token_ids) - len(said) <= 20
            assert after.arrival_s >= before.arrival_s + 2.0
    assert len({tuple(turns[0].prompt_token_ids[:7]) for turns in found.values()}) == 2


def test_they_come_by_arrival_and_the_seed_alone_decides() -> None:
    requests = list(islice(made(seed=3).requests(), 200))
    assert all(a.arrival_s <= b.arrival_s for a, b in pairwise(requests))
    assert requests == list(islice(made(seed=3).requests(), 200)) != list(islice(made(seed=4).requests(), 200))


def test_turns_are_as_many_as_they_should_be() -> None:
    whole = Conversations(OpenLoop(50.0), Fixed(3), Fixed(2), mean_turns=4.0, most_turns=1000, pause_s=0.1, least_pause_s=0.0)
    found = dict[str, int]()
    for request in takewhile(lambda request: request.arrival_s < 60.0, whole.requests()):
        found[str(request.session)] = found.get(str(request.session), 0) + 1
    mean = sum(found.values()) / len(found)
    assert len(found) > 2500 and abs(mean - 4.0) < 5 * (12**0.5 / len(found) ** 0.5) + 0.05  # the last ones are cut off
    assert {len(turns) for turns in sessions(made(mean_turns=1.0), 50).values()} == {1}


def test_a_session_ends_before_it_is_too_long() -> None:
    for turns in sessions(made(mean_turns=1000.0, most_turns=500, most_tokens=100)).values():
        assert all(len(turn.prompt_token_ids) + turn.num_output <= 100 for turn in turns)
    assert max(len(turns) for turns in sessions(made(mean_turns=1000.0, most_turns=3)).values()) == 3


def test_limits_are_checked() -> None:
    for options, message in (
        ({"mean_turns": 0.5}, "mean_turns: 0.5"), ({"most_turns": 0}, "most_turns: 0"), ({"num_system": -1}, "num_system: -1"),
        ({"num_groups": 0}, "num_groups: 0"), ({"pause_s": -1.0}, "pause_s: -1.0"), ({"least_pause_s": float("inf")}, "least_pause_s: inf"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            made(**options)
