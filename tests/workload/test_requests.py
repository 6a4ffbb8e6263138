"""Requests of a workload: the same for a seed for good, each source drawn apart from the others, prefixes by group."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections import Counter
from dataclasses import replace

import pytest

from octavo.workload.arrivals import ClosedLoop, OpenLoop
from octavo.workload.lengths import Fixed, Uniform
from octavo.workload.requests import Independent, SharedPrefix, TokenRange, Workload, WorkloadRequest

BASE = Workload(OpenLoop(5.0), Independent(Uniform(1, 9), Uniform(1, 9)), 200, None, TokenRange(10, 500), seed=3)


def made(workload: Workload) -> list[WorkloadRequest]:
    return list(workload.requests())


def test_a_seed_is_a_workload_for_good() -> None:
    """Values written down once: a change of Python, machine or this package must not change a published load."""
    requests = made(BASE)
    times = [r.arrival_s for r in requests[:2]]
    assert times == pytest.approx([0.13545664710348107, 0.2494506348806839], rel=1e-12)  # the last bit is the C library's
    assert (requests[0].prompt_token_ids, requests[0].num_output) == ([25, 377, 118, 156, 15, 29, 176, 472, 446], 2)
    content = repr([(r.prompt_token_ids, r.num_output) for r in requests])
    assert hashlib.sha256(content.encode()).hexdigest()[:16] == "fdb3e7fc19db32e4"


def test_each_call_gives_the_same_and_another_seed_something_else() -> None:
    assert made(BASE) == made(BASE)
    other = made(replace(BASE, seed=4))
    assert [r.arrival_s for r in other] != [r.arrival_s for r in made(BASE)]
    assert not {tuple(r.prompt_token_ids) for r in other if len(r.prompt_token_ids) > 4} & {tuple(r.prompt_token_ids) for r in made(BASE)}


def test_a_change_of_one_source_leaves_the_others() -> None:
    base = made(BASE)
    faster = made(replace(BASE, arrivals=OpenLoop(10.0)))
    assert [r.prompt_token_ids for r in faster] == [r.prompt_token_ids for r in base]
    assert [r.arrival_s for r in faster] == pytest.approx([r.arrival_s / 2 for r in base])
    longer = made(replace(BASE, lengths=Independent(Fixed(3), Fixed(4))))
    assert [r.arrival_s for r in longer] == [r.arrival_s for r in base]
    grouped = made(replace(BASE, prefix=SharedPrefix(5, 2)))
    assert [r.prompt_token_ids[5:] for r in grouped] == [r.prompt_token_ids for r in base]


def test_prefixes_are_shared_by_group_and_differ_between_groups() -> None:
    requests = made(replace(BASE, prefix=SharedPrefix(16, 4), num_requests=2000))
    by_session: dict[str | None, set[tuple[int, ...]]] = {r.session: set() for r in requests}
    for r in requests:
        by_session[r.session].add(tuple(r.prompt_token_ids[:16]))
    assert set(by_session) == {f"prefix-{g}" for g in range(4)}
    assert all(len(prefixes) == 1 for prefixes in by_session.values())
    assert len(set().union(*by_session.values())) == 4
    counts = Counter(r.session for r in requests)
    assert all(abs(count - 500) < 5 * math.sqrt(2000 * 0.25 * 0.75) for count in counts.values())


def test_tokens_are_even_over_their_range() -> None:
    workload = Workload(ClosedLoop(1), Independent(Fixed(1000), Fixed(1)), 20, None, TokenRange(7, 17))
    counts = Counter(token for r in workload.requests() for token in r.prompt_token_ids)
    assert set(counts) == set(range(7, 17))
    assert all(abs(count - 2000) < 5 * math.sqrt(20_000 * 0.1 * 0.9) for count in counts.values())


def test_without_a_number_of_requests_there_is_no_end() -> None:
    endless = replace(BASE, num_requests=None, arrivals=ClosedLoop(2)).requests()
    assert sum(1 for _ in itertools.islice(endless, 5000)) == 5000


@pytest.mark.parametrize("limits", [(0, 1), (1, 0)])
def test_prefixes_have_limits(limits: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="^shared_prefix: "):
        SharedPrefix(*limits)


@pytest.mark.parametrize("limits", [(5, 5), (-1, 5), (0, 1 << 40)])
def test_token_ids_have_limits(limits: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="^token_ids: "):
        TokenRange(*limits)


def test_prefixes_and_token_ranges_as_they_are_written() -> None:
    assert SharedPrefix.parse("512") == SharedPrefix(512) and SharedPrefix.parse("64:3") == SharedPrefix(64, 3)
    assert TokenRange.parse("5:9") == TokenRange(5, 9)
    for text in ("", "a", "1:2:3", "-1", "1:", "١"):
        with pytest.raises(ValueError, match=r"shared_prefix: .* is not of the form TOKENS\[:GROUPS\]"):
            SharedPrefix.parse(text)
    for text, why in (("5", "is not of the form LOW:HIGH"), ("9:5", "0 <= LOW < HIGH"), ("0:0x9", "is not of the form")):
        with pytest.raises(ValueError, match=f"token_ids: .*{why}"):
            TokenRange.parse(text)
