"""Request-level batching: a batch is filled once and runs to its end. (Every plan of it is compared with the twin's in test_plan_twin.)"""

from __future__ import annotations

import pytest

from octavo.config import CacheConfig, ConfigError, EngineConfig, SchedulerConfig
from octavo.core.scheduler import Scheduler
from tests.core.harness import Harness, make_request


def running(harness: Harness) -> list[str]:
    return [seq.request.request_id for seq in harness.scheduler._state.running]


def add(harness: Harness, lengths: list[int], num_prompt: int = 3) -> None:
    """Requests a, b, c, ... of so many output tokens each."""
    for name, num_output in zip("abcdefgh", lengths, strict=False):
        harness.add(make_request(name, [1] * num_prompt, max_tokens=num_output, ignore_eos=True))


@pytest.mark.parametrize("chunked", [True, False])
@pytest.mark.parametrize("reservation", ["paged", "max", "oracle"])
def test_places_of_finished_sequences_stay_empty_until_all_of_a_batch_are(chunked: bool, reservation: str) -> None:
    harness = Harness(32, 4, 16, 3, budget=9, chunked=chunked, caching=False, policy="static", reservation=reservation)
    add(harness, [2, 6, 1, 3, 4])
    seen = []
    while harness.begin() is not None:
        seen.append("".join(running(harness)))
        harness.finish()
    assert seen == ["abc", "ab", "b", "b", "b", "b", "de", "de", "de", "e"]
    harness.check_texts()
    harness.check_idle()


def test_continuous_batching_refills_them() -> None:
    """The same load with the other policy: what the switch changes."""
    harness = Harness(32, 4, 16, 3, budget=9, caching=False)
    add(harness, [2, 6, 1, 3, 4])
    seen = []
    while harness.begin() is not None:
        seen.append("".join(running(harness)))
        harness.finish()
    assert seen == ["abc", "abd", "bde", "bde", "be", "be"]
    harness.check_texts()


def test_a_batch_is_chosen_at_once_even_when_its_prompts_take_many_steps() -> None:
    harness = Harness(32, 4, 32, 3, budget=4, policy="static", caching=False)
    add(harness, [1, 1, 1], num_prompt=10)
    harness.begin()
    assert running(harness) == ["a", "b", "c"]
    harness.finish()
    harness.add(make_request("late", [1, 2], max_tokens=1))
    while len(running(harness)) == 3:
        harness.step()
    assert running(harness) == ["b", "c"] and harness.scheduler.num_waiting == 1
    harness.run()
    harness.check_texts()


def test_a_batch_has_who_fits_in_order_of_arrival() -> None:
    harness = Harness(num_blocks=8, block_size=4, max_num_seqs=4, budget=20, policy="static", caching=False)
    for name, num_prompt in (("a", 12), ("b", 12), ("c", 2)):
        harness.add(make_request(name, [1] * num_prompt, max_tokens=2, ignore_eos=True))
    harness.begin()
    assert running(harness) == ["a", "b"], "c would leave no spare block for each of the others"
    harness.finish()
    harness.run()
    harness.check_texts()


def test_an_abort_opens_no_place_but_the_last_one_ends_the_batch() -> None:
    harness = Harness(32, 4, 16, 2, policy="static", caching=False)
    add(harness, [5, 5, 2])
    harness.step()
    harness.abort("a")
    harness.step()
    assert running(harness) == ["b"]
    harness.abort("b")
    harness.begin()
    assert running(harness) == ["c"]
    harness.finish()
    harness.run()
    harness.check_texts()
    harness.check_idle()


def test_who_is_preempted_comes_back_with_a_later_batch() -> None:
    harness = Harness(num_blocks=7, block_size=4, max_model_len=24, max_num_seqs=2, budget=12, policy="static", caching=False)
    add(harness, [14, 14, 2], num_prompt=4)
    seen: list[str] = []
    while harness.begin() is not None:
        if not seen or seen[-1] != "".join(running(harness)):
            seen.append("".join(running(harness)))
        harness.finish()
    assert harness.scheduler.stats.num_preemptions > 0
    assert seen[:3] == ["ab", "a", "bc"], "b gave its blocks to a, and waits for a's end"
    harness.check_texts()
    harness.check_idle()


def test_all_choices_of_a_request_are_of_the_batch() -> None:
    harness = Harness(32, 4, 16, 4, policy="static")
    for name, n, num_output in (("one", 3, 4), ("two", 1, 6), ("three", 1, 2)):
        harness.add(make_request(name, [1, 2], n=n, max_tokens=num_output, ignore_eos=True))
    seen = []
    while harness.step() is not None:
        seen.append(running(harness))
    assert seen[:6] == [["one"] * 3 + ["two"]] * 3 + [["two"]] * 2 + [[]], "two takes the last of four places, and keeps it alone"
    harness.check_texts()
    harness.check_idle()


def test_policies_that_are_none() -> None:
    with pytest.raises(ConfigError, match=r"scheduling_policy: 'batch' is not allowed; one of .*static"):
        EngineConfig(scheduler=SchedulerConfig(scheduling_policy="batch")).validate()
    with pytest.raises(ValueError, match=r"scheduling_policy: 'batch' is not allowed; one of .*static"):
        Scheduler(SchedulerConfig(scheduling_policy="batch"), CacheConfig(), 8, 32)
