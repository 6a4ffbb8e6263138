"""Every edge of the hand-off, failures included, and no others."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.distributed.handoff import Action, Handoff, HandoffError, HandoffLimits, HandoffState, Link

LIMITS = HandoffLimits(reserve_s=1.0, copy_s=2.0)
MOVES: dict[str, Callable[[Handoff], list[Action]]] = {
    "reserved": lambda handoff: handoff.reserved(7, 10.0),
    "copied": lambda handoff: handoff.copied(11.0),
    "released": lambda handoff: handoff.released(),
    "fail": lambda handoff: handoff.fail("gone"),
}
EDGES = {
    ("offered", "reserved"): ("reserved", [Action.COPY]),
    ("reserved", "copied"): ("copied", [Action.BEGIN, Action.RELEASE]),
    ("copied", "released"): ("released", []),
    ("offered", "fail"): ("failed", [Action.RESUME]),
    ("reserved", "fail"): ("failed", [Action.CANCEL, Action.RESUME]),
}
WAYS = {
    "offered": [],
    "reserved": ["reserved"],
    "copied": ["reserved", "copied"],
    "released": ["reserved", "copied", "released"],
    "failed": ["fail"],
}


def handoff_in(state: str) -> Handoff:
    handoff = Handoff("r", 0, 1000, 9.0, LIMITS)
    for move in WAYS[state]:
        MOVES[move](handoff)
    assert handoff.state.value == state
    return handoff


@pytest.mark.parametrize(("state", "move"), list(product(WAYS, MOVES)))
def test_moves(state: str, move: str) -> None:
    handoff = handoff_in(state)
    if (state, move) not in EDGES:
        with pytest.raises(HandoffError, match=f"'r': it is {state}"):
            MOVES[move](handoff)
        assert handoff.state.value == state
        return
    after, actions = EDGES[state, move]
    assert MOVES[move](handoff) == actions
    assert handoff.state.value == after
    assert handoff.is_over == (after in ("released", "failed"))


@pytest.mark.parametrize(
    ("state", "deadline_s", "after", "actions", "failure"),
    [
        ("offered", 10.0, "failed", [Action.RESUME], "a receiver with room took longer than 1 s"),
        ("reserved", 12.0, "failed", [Action.CANCEL, Action.RESUME], "the copy took longer than 2 s"),
        ("copied", math.inf, "copied", [], None),
        ("released", math.inf, "released", [], None),
        ("failed", math.inf, "failed", [], "gone"),
    ],
)
def test_time_outs(state: str, deadline_s: float, after: str, actions: list[Action], failure: str | None) -> None:
    handoff = handoff_in(state)
    assert handoff.deadline_s == deadline_s
    if math.isfinite(deadline_s):
        assert handoff.expire(math.nextafter(deadline_s, 0.0)) == [] and handoff.state.value == state
    assert handoff.expire(deadline_s) == actions
    assert (handoff.state, handoff.failure) == (HandoffState(after), failure)


def early(state: str) -> Handoff:
    """Offered when its prompt began."""
    handoff = Handoff("r", 0, 1000, 9.0, LIMITS, drawn=False)
    if state != "offered":
        handoff.reserved(7, 10.0)
    if state == "arrived":
        assert handoff.copied(11.0) == [] and handoff.state is HandoffState.RESERVED
    return handoff


def test_it_is_copied_when_all_kv_is_there_and_the_first_token_is_drawn() -> None:
    both = [Action.BEGIN, Action.RELEASE]
    assert early("arrived").drew(12.0) == both
    handoff = early("reserved")
    assert handoff.drew(12.0) == [] and handoff.copied(13.0) == both and handoff.deadline_s == math.inf
    for done in (handoff, early("arrived")):
        with pytest.raises(HandoffError):
            done.copied(14.0)
    with pytest.raises(HandoffError, match="its first token was not waited for"):
        handoff_in("offered").drew(10.0)


@pytest.mark.parametrize("state", ["offered", "reserved", "arrived"])
def test_before_the_first_token_only_that_is_timed(state: str) -> None:
    handoff = early(state)
    assert handoff.deadline_s == 9.0 + LIMITS.prompt_s and handoff.expire(600.0) == []
    actions = handoff.expire(9.0 + LIMITS.prompt_s)
    assert actions == ([Action.RESUME] if state == "offered" else [Action.CANCEL, Action.RESUME])
    assert handoff.failure == "the first token took longer than 600 s"


def test_after_it_the_receiver_and_the_copy_are() -> None:
    for state, deadline_s in (("offered", 13.0), ("reserved", 14.0)):
        handoff = early(state)
        assert handoff.drew(12.0) == [] and handoff.deadline_s == deadline_s


def test_at_any_time_one_side_can_go_on() -> None:
    """Whatever happens, either the sender resumes or the receiver begins, never both and never neither."""
    for moves in product([*MOVES, "expire"], repeat=4):
        handoff, actions = handoff_in("offered"), list[Action]()
        for move in moves:
            if not handoff.is_over:
                try:
                    actions += handoff.expire(handoff.deadline_s) if move == "expire" else MOVES[move](handoff)
                except HandoffError:
                    continue
        goes_on = [action for action in actions if action in (Action.RESUME, Action.BEGIN)]
        assert len(goes_on) == (handoff.is_over or handoff.state is HandoffState.COPIED)
        if Action.CANCEL in actions:
            assert Action.COPY in actions and Action.BEGIN not in actions


def test_a_link_moves_one_after_the_other() -> None:
    link = Link(bytes_per_s=100.0, latency_s=0.5)
    assert link.copy(200, 10.0) == 12.5
    assert link.copy(100, 11.0) == 13.5  # waits for the first, whose latency is no load of the link
    assert link.copy(0, 20.0) == 20.5


def test_layers_are_sent_beside_computing() -> None:
    assert Link(100.0, num_layers=4).copy(400, 0.0, overlap_s=1.5) == 2.5
    assert Link(100.0, num_layers=4).copy(400, 0.0, overlap_s=60.0) == 1.0  # the last layer is there at the end alone
    assert Link(100.0).copy(400, 0.0, overlap_s=60.0) == 4.0


def test_prompts_of_one_step_share_the_link_that_they_are_sent_over_beside_it() -> None:
    link = Link(100.0, num_layers=4)
    assert [link.copy(400, 10.0, overlap_s=10.0) for _ in range(4)] == [11.0, 12.0, 13.0, 16.0]  # 16 s of bytes, from 0 s on
    assert link.copy(400, 20.0, overlap_s=5.0) == 21.0  # 16 s: nothing is left over, and the last layer takes a second
    assert link.copy(400, 20.0, overlap_s=5.0) == 24.0


@given(st.lists(st.tuples(st.integers(1, 400), st.floats(0.0, 3.0), st.floats(0.0, 5.0)), min_size=1, max_size=30))
def test_no_link_carries_more_than_it_can(copies: list[tuple[int, float, float]]) -> None:
    """Whatever was hidden: of any number of copies, all bytes take their time from the first moment on at which one of them was there."""
    link, now, done = Link(100.0, num_layers=4), 10.0, list[tuple[float, int, float]]()
    for num_bytes, gap_s, overlap_s in copies:
        now += gap_s
        done.append((now - overlap_s, num_bytes, link.copy(num_bytes, now, overlap_s)))
    for first in range(len(done)):
        began_s, num_bytes = min(one[0] for one in done[first:]), sum(one[1] for one in done[first:])
        assert done[-1][2] >= began_s + num_bytes / 100.0 - 1e-9


def test_bad_limits_and_links_are_refused() -> None:
    with pytest.raises(ValueError, match="copy_s: 0 is not allowed"):
        HandoffLimits(copy_s=0)
    with pytest.raises(ValueError, match="bytes_per_s: nan"):
        Link(math.nan)
    with pytest.raises(ValueError, match="latency_s: -1"):
        Link(1.0, -1)
