"""Which splits are tried for the best one: every one where a worse one says nothing of its neighbours, few where it does."""

from __future__ import annotations

import pytest

from octavo.simulator.split_search import SplitSearch

MOST = 39  # prompt machines of 40


def search(holds: list[float], num_given: int, num_splits: int) -> tuple[SplitSearch, list[int]]:
    """Of 40 machines, a split of which holds at ``holds`` of its number of prompt machines."""
    asked = list[int]()

    def rates(num_prompt: int, best: float) -> tuple[float, float]:
        asked.append(num_prompt)
        return (holds[num_prompt], holds[num_prompt] + 1) if holds[num_prompt] > best else (best, best + 1)

    found = SplitSearch(lambda num_prompt: 40 - num_prompt, rates)
    found.run(num_given, num_splits)
    return found, asked


@pytest.mark.parametrize("peak", [1, 2, 17, 20, 38, 39])
@pytest.mark.parametrize("num_given", [0, 7, 200])
def test_one_peak_is_found_by_few_tries(peak: int, num_given: int) -> None:
    found, asked = search([100.0 - abs(n - peak) for n in range(40)], num_given, 5)
    assert (found.best, found.holds_at) == (peak, 100.0)
    assert len(asked) == len(set(asked)) <= 16 and list(found.tried) == asked and set(asked) <= set(range(1, MOST + 1))


def test_of_equals_the_first_that_was_found_is_the_best() -> None:
    found, asked = search([8.0] * 40, 12, 5)
    assert asked[0] == found.best == 12 and found.holds_at == 8.0 and set(found.tried.values()) == {9.0}


def test_as_many_splits_as_there_are_leave_none_out() -> None:
    found, _ = search([float(n * 7 % 40) for n in range(40)], 1, MOST)
    assert sorted(found.tried) == list(range(1, MOST + 1)) and found.holds_at == max(n * 7 % 40 for n in range(1, 40))


def test_none_is_the_best_where_there_can_be_none() -> None:
    found = SplitSearch(lambda num_prompt: 0, lambda num_prompt, best: pytest.fail("asked"))
    found.run(3, 5)
    assert found.best == 0 and not found.tried
