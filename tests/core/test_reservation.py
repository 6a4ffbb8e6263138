"""Reserved KV memory: what is reserved, who is refused and who waits, that nothing leaks, and that the tokens are those of paging."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize

from octavo.config import CacheConfig, ConfigError, EngineConfig, SchedulerConfig
from octavo.core.limits import LengthLimits
from octavo.core.request import ParameterError
from octavo.core.reservation import ReservedKV, ReservedLimits
from octavo.core.scheduler import Scheduler
from tests.core.harness import Harness, Oracle, make_request
from tests.core.test_scheduler_machine import SchedulerMachine

RESERVATIONS = ("max", "pow2", "oracle")


def reserved(reservation: str, **sizes: Any) -> Harness:
    return Harness(**({"num_blocks": 16, "max_model_len": 32, "caching": False, "reservation": reservation} | sizes))


def kv_of(harness: Harness) -> ReservedKV:
    kv = harness.scheduler._state.kv
    assert isinstance(kv, ReservedKV)
    return kv


class ReservedMachine(SchedulerMachine):
    """The random lives of the paged scheduler, in reserved memory: without a prefix cache, and without a preemption."""

    @initialize(
        num_blocks=st.integers(3, 20),
        block_size=st.sampled_from([1, 3, 4, 4]),
        max_model_len=st.integers(12, 40),
        max_num_seqs=st.integers(1, 6),
        budget=st.integers(6, 20),
        chunked=st.sampled_from([True, True, False]),
        max_itl_ms=st.sampled_from([None, 0.5, 6.5]),
        policy=st.sampled_from(["fcfs", "fcfs", "static"]),
        reservation=st.sampled_from(RESERVATIONS),
        guessing=st.sampled_from([None, None, (4, 1.0), (5, 0.8), (3, 0.3)]),
        seed=st.integers(0, 3),
    )
    def start(
        self, max_itl_ms: float | None, reservation: str, guessing: tuple[int, float] | None, seed: int, **sizes: Any
    ) -> None:
        largest = sizes["block_size"] << (sizes["num_blocks"].bit_length() - 1)
        if reservation == "max":
            sizes["max_model_len"] = min(sizes["max_model_len"], largest)
        self.harness = Harness(max_itl_ms=max_itl_ms if sizes["chunked"] else None, caching=False, reservation=reservation, **sizes)
        if guessing is not None:
            self.harness.guess = Oracle(self.harness, *guessing, seed)
        self.num_requests = 0

    def add_one(self, prompt: list[int], max_tokens: int | None, min_tokens: int, n: int = 1, **rest: Any) -> None:
        """Of a request whose choices have no room beside each other only one is asked for."""
        limits = self.harness.scheduler.limits
        assert isinstance(limits, ReservedLimits)
        request, size = make_request("asked", prompt, max_tokens=max_tokens, n=n), 1
        with contextlib.suppress(ParameterError):  # a prompt without room is the base's case
            LengthLimits.check_prompt(limits, request)
            while size < limits.reserved_blocks(request):
                size *= 2
        if n > 1 and size * n > limits.num_pool_blocks:
            with pytest.raises(ParameterError) as refused:
                self.harness.add(request)
            assert refused.value.param == "n"
            n = 1
        super().add_one(prompt, max_tokens, min_tokens, n=n, **rest)

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "harness"):
            assert self.harness.scheduler.stats.num_preemptions == 0
            assert kv_of(self.harness).buddy.num_free == self.harness.scheduler.num_blocks


ReservedMachine.TestCase.settings = settings(
    max_examples=150, stateful_step_count=30, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
TestReserved = ReservedMachine.TestCase


@pytest.mark.parametrize(
    ("reservation", "num_prompt", "max_tokens", "tokens"),
    [
        ("max", 100, 25, 2048),
        ("pow2", 100, 25, 132),  # 25 -> 32
        ("pow2", 100, 32, 132),
        ("pow2", 100, 33, 164),
        ("pow2", 100, 1, 101),
        ("pow2", 100, 0, 100),
        ("pow2", 1000, 1030, 2048),  # never more than the longest sequence
        ("oracle", 100, 25, 124),  # the last token needs no KV
        ("oracle", 100, 0, 100),
        ("oracle", 100, 5000, 2047),
    ],
)
def test_what_is_reserved(reservation: str, num_prompt: int, max_tokens: int, tokens: int) -> None:
    limits = ReservedLimits.of(reservation, 2048, 15_728 // 16, 16)
    request = make_request("r", [1] * num_prompt, max_tokens=max_tokens)
    assert limits.reserved_tokens(request) == tokens >= limits.final_tokens(request)
    assert limits.reserved_blocks(request) == -(-tokens // 16)


@pytest.mark.parametrize("reservation", RESERVATIONS)
def test_a_chunk_is_taken_at_admission_and_given_back_whole(reservation: str) -> None:
    harness = reserved(reservation, budget=4, max_num_seqs=2)
    harness.add(make_request("r", [1] * 6, max_tokens=5, ignore_eos=True))
    harness.begin()
    num_blocks = {"max": 8, "pow2": 4, "oracle": 4}[reservation]  # of 4 tokens: 32; 6 + 8; 6 + 4
    assert harness.scheduler.num_used_blocks == num_blocks, "the whole chunk counts as used after the first four tokens"
    (seq,) = harness.scheduler.in_flight_sequences
    assert len(seq.block_table) == 1
    harness.finish()
    tables = []
    while harness.step() is not None:
        tables += [list(seq.block_table) for seq in harness.scheduler._state.running]
    assert tables[-1] == list(range(tables[-1][0], tables[-1][0] + 3)), "contiguous"
    harness.check_texts()
    harness.check_idle()


def test_who_fits_is_decided_by_chunks_not_by_free_blocks() -> None:
    """Twelve blocks are free after the first request, but no eight of them in one chunk."""
    harness = reserved("oracle")
    for name, num_prompt in (("small", 14), ("large", 30)):
        harness.add(make_request(name, [1] * num_prompt, max_tokens=3, ignore_eos=True))
    harness.add(make_request("large too", [1] * 30, max_tokens=3, ignore_eos=True))
    harness.add(make_request("behind", [1] * 2, max_tokens=1))
    while harness.scheduler.num_running < 2:
        harness.step()
    assert harness.scheduler.num_free_blocks == 4, "4 and 8 of 16 blocks are taken"
    assert harness.scheduler.num_waiting == 2, "8 more are not to be had, and nobody overtakes"
    harness.run()
    harness.check_texts()
    harness.check_idle()


def test_each_choice_has_its_own_chunk_and_copy_of_the_prompt() -> None:
    harness = reserved("oracle", budget=20)
    harness.add(make_request("r", [1] * 10, n=3, max_tokens=4, ignore_eos=True))
    harness.step()
    assert harness.scheduler.num_used_blocks == 12, "13 tokens each: three chunks of four blocks"
    tables = [set(seq.block_table) for seq in harness.scheduler._state.running]
    assert [len(table) for table in tables] == [3, 3, 3] and len(set.union(*tables)) == 9
    plan = harness.begin()
    assert plan is not None and len(plan.block_copies) == 6, "of three blocks for two choices"
    harness.finish()
    harness.run()
    assert not any(made.block_copies for made in harness.plans[2:])
    harness.check_texts()
    harness.check_idle()


def test_a_copy_is_made_before_the_blocks_it_comes_from_are_another_s() -> None:
    """Choice 0 ends with its first token, and its chunk goes to the next request in the very plan that copies from it."""
    for seed in range(200):  # until choice 0 ends first; the draws depend on the seed alone
        harness = reserved("oracle", num_blocks=8, budget=20, max_num_seqs=3)
        harness.add(make_request("r", [1, 2, 1, 0, 2, 1, 0], seed=seed, n=2, max_tokens=6))
        harness.step()
        if [(seq.choice) for seq in harness.scheduler._state.running] == [1]:
            break
    else:
        raise AssertionError("no seed ends choice 0 at once")
    harness.add(make_request("next", [2] * 12, max_tokens=4, ignore_eos=True))
    plan = harness.begin()
    assert plan is not None and len(plan.slices) == 2
    assert {copy.src_block for copy in plan.block_copies} <= set(plan.slices[1].block_table)
    harness.finish()
    harness.run()
    harness.check_texts()
    harness.check_idle()


def test_an_abort_right_after_the_split_leaves_no_copy() -> None:
    harness = reserved("pow2", budget=20)
    harness.add(make_request("r", [1] * 10, n=3, max_tokens=4, ignore_eos=True))
    harness.step()
    harness.abort("r")
    harness.check_idle()
    harness.add(make_request("next", [2] * 10, max_tokens=4))
    harness.run()
    assert not any(plan.block_copies for plan in harness.plans)
    harness.check_texts()


def test_choices_that_never_fit_together_are_refused() -> None:
    harness = reserved("oracle", num_blocks=15, max_model_len=40)
    with pytest.raises(ParameterError) as refused:
        harness.add(make_request("r", [1] * 10, n=4, max_tokens=7))
    assert (refused.value.param, refused.value.value) == ("n", 4)
    assert refused.value.limit == "at most 3 with kv_reservation oracle: each choice reserves 4 of the 15 KV blocks"
    harness.add(make_request("r", [1] * 10, n=3, max_tokens=7))
    harness.run()
    harness.check_texts()


def test_a_sequence_is_bounded_by_the_largest_chunk() -> None:
    """15 blocks of 4, of which 8 make the largest chunk: 32 tokens and the last one, which needs no KV."""
    harness = reserved("pow2", num_blocks=15, max_model_len=64)
    assert harness.scheduler.limits.max_total_tokens == 33
    with pytest.raises(ParameterError, match="prompt"):
        harness.add(make_request("long", [1] * 33))
    request = make_request("r", [1] * 10, max_tokens=60, ignore_eos=True)
    assert harness.scheduler.clamped_max_tokens(request) == 23
    harness.run_all([request])


def test_configurations_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match=r"kv_reservation: 'most' is not allowed; one of paged, max, pow2, oracle"):
        EngineConfig(cache=CacheConfig(kv_reservation="most")).validate()
    with pytest.raises(ConfigError, match=r"kv_reservation: 'pow2' is not allowed; .* turn enable_prefix_caching off"):
        EngineConfig(cache=CacheConfig(kv_reservation="pow2")).validate()
    with pytest.raises(ConfigError, match="enable_prefix_caching off"):
        Scheduler(SchedulerConfig(), CacheConfig(kv_reservation="max"), 8, 32)
    with pytest.raises(ConfigError, match=r"'max' is not allowed; .* max_model_len \(33\) .* 32 tokens \(8 of 15 blocks of 4\)"):
        reserved("max", num_blocks=15, max_model_len=33)
    for reservation in RESERVATIONS:
        EngineConfig(cache=CacheConfig(kv_reservation=reservation, enable_prefix_caching=False)).validate()
    assert type(Harness().scheduler.limits) is LengthLimits, "paged is the default"
