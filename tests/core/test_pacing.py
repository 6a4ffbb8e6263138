"""Sharing the room of a step between prompts: the most that fits, half for the shortest, the rest for the oldest, and always something."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.core.cost import StepShape
from octavo.core.pacing import Prompt, StepRoom
from tests.core.harness import Harness, make_request


@dataclass
class Price:
    """Seconds of a step, each field's price; integers, so that sums are exact."""

    row: int = 1000
    pair: int = 0
    position: int = 0
    sequence: int = 0
    logit_row: int = 0
    max_trusted_rows: int = 1 << 30

    def begin(self, now: float) -> None: ...

    def gap_seconds(self, shape: StepShape) -> float:
        linear = self.row * shape.num_rows + self.sequence * shape.num_sequences + self.logit_row * shape.num_logit_rows
        return linear + self.pair * shape.num_pairs + self.position * shape.num_context


def shares(
    prompts: list[tuple[int, int]], limit: float | None, price: Price | None = None, tokens: int = 512, odd: bool = False, streams: int = 2
) -> list[int]:
    """Tokens for prompts of (start, gap) beside two streams, with blocks of 4."""
    shape = StepShape()
    for _ in range(streams):
        shape.add(10, 1, 1)
    made = [Prompt(start, gap) for start, gap in prompts]
    StepRoom(price or Price(), shape, limit, tokens, block_size=4).share(made, odd)
    return [prompt.num_tokens for prompt in made]


def test_one_prompt_gets_all_that_fits() -> None:
    assert shares([(0, 1000)], 52_000) == [50]
    assert shares([(0, 1000)], 52_999) == [50]
    assert shares([(0, 30)], 52_000) == [30]
    assert shares([(0, 1000)], 52_000, tokens=20) == [20]
    assert shares([(0, 1000)], 52_000, Price(max_trusted_rows=32)) == [30]
    assert shares([(0, 1000)], None) == [512]


def test_the_last_row_of_a_prompt_counts_its_logits() -> None:
    assert shares([(0, 50)], 52_000, Price(logit_row=1)) == [49]
    assert shares([(0, 50)], 52_003, Price(logit_row=1)) == [50]


def test_at_least_a_block_when_nothing_fits() -> None:
    assert shares([(0, 1000)], 1_000) == [4]
    assert shares([(0, 1000)], 4_000) == [4]
    assert shares([(0, 3)], 1_000) == [3]
    assert shares([(0, 1000)], 1_000, tokens=2) == [2]


def test_the_shortest_gets_half_and_the_oldest_the_rest() -> None:
    assert shares([(0, 1000), (0, 900)], 52_000) == [25, 25]
    assert shares([(0, 1000), (0, 10)], 52_000) == [40, 10]
    assert shares([(0, 1000), (0, 950), (0, 900)], 52_000) == [25, 0, 25]
    assert shares([(0, 12), (0, 950), (0, 10)], 52_000) == [12, 28, 10]
    assert shares([(0, 1000), (0, 900)], None, tokens=100) == [50, 50]


def test_equal_prompts_come_one_after_the_other() -> None:
    assert shares([(0, 900), (0, 900)], 52_000) == [50, 0]
    assert shares([(880, 20), (0, 900)], 52_000) == [20, 30]


def test_two_prompts_take_turns_when_half_the_room_is_too_little() -> None:
    assert [shares([(0, 1000), (0, 900)], 7_000, odd=odd) for odd in (False, True)] == [[5, 0], [0, 5]]
    assert [shares([(0, 1000), (0, 900)], 1_000, odd=odd) for odd in (False, True)] == [[4, 0], [0, 4]]


def test_rows_whose_log_probabilities_are_wanted_cost_their_logits() -> None:
    """Beside one stream 5.4 ms are left: five rows of a millisecond, or four with 0.1 ms of logits each."""
    for prompt_logprobs, num_tokens in ((None, 5), (1, 4)):
        harness = Harness(num_blocks=32, max_itl_ms=6.5)
        harness.add(make_request("stream", [1, 2], max_tokens=20, ignore_eos=True))
        harness.step()
        harness.add(make_request("long", [0, 1, 2] * 10, max_tokens=2, prompt_logprobs=prompt_logprobs))
        plan = harness.step()
        assert plan is not None and [piece.num_tokens for piece in plan.slices] == [1, num_tokens]
        harness.run()
        harness.check_texts()


prices = st.builds(Price, st.integers(1, 2000), st.integers(0, 9), st.integers(0, 30), st.integers(0, 4000), st.integers(0, 3000))


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    prompts=st.lists(st.tuples(st.integers(0, 3000), st.integers(2, 3000)), min_size=1, max_size=5),
    limit=st.one_of(st.none(), st.integers(1, 400_000)),
    price=prices,
    tokens=st.integers(1, 512),
    odd=st.booleans(),
    streams=st.integers(0, 16),
)
def test_shares_are_maximal_and_keep_the_bound(
    prompts: list[tuple[int, int]], limit: int | None, price: Price, tokens: int, odd: bool, streams: int
) -> None:
    given_tokens = shares(prompts, limit, price, tokens, odd, streams)
    step = StepShape()
    for _ in range(streams):
        step.add(10, 1, 1)
    for (start, gap), num in zip(prompts, given_tokens, strict=True):
        assert 0 <= num <= gap
        if num:
            step.add(start, num, int(num == gap))
    assert 0 < sum(given_tokens) <= tokens
    served = [num for num in given_tokens if num]
    over = limit is not None and price.gap_seconds(step) > limit
    if over:  # only the least piece of one prompt may break the bound
        assert len(served) == 1 and served[0] <= 4
    full = sum(given_tokens) == tokens or given_tokens == [gap for _, gap in prompts]
    if not full and not over:
        # A prompt that was left out, or not served to its end, could not have had a block more.
        assert limit is not None
        (start, gap), num = next((p, n) for p, n in zip(prompts, given_tokens, strict=True) if n < p[1])
        more = min(num + 4, gap, num + tokens - sum(given_tokens))
        grown = StepShape(step.num_rows, step.num_sequences, step.num_logit_rows, step.num_context, step.num_pairs)
        if num:
            grown.num_rows += more - num
            grown.num_context += more - num
            grown.num_pairs += sum(start + i + 1 for i in range(num, more))
            grown.num_logit_rows += int(more == gap)
        else:
            grown.add(start, more, int(more == gap))
        assert price.gap_seconds(grown) > limit or (more < num + 4 and more < gap)
