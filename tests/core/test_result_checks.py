"""A malformed result is refused before anything of it is applied: fail_all then gives every block back."""

from __future__ import annotations

import pytest

from octavo.config import CacheConfig, SchedulerConfig
from octavo.core.request import ParameterError, Request, SamplingParams
from octavo.core.scheduler import Scheduler
from octavo.core.step import SliceResult, StepResult, TokenLogprobs


def one(token: int) -> TokenLogprobs:
    return TokenLogprobs(token, -1.0, 1, [], [])


@pytest.mark.parametrize(
    "outcome",
    [
        SliceResult([1], logprobs=[]),
        SliceResult([1], logprobs=None, prompt_logprobs=[one(2), one(3)]),
        SliceResult([1], logprobs=[one(1)], prompt_logprobs=[one(2)]),
        SliceResult([1], logprobs=[one(1)]),
        SliceResult([1, 2], logprobs=[one(1), one(2)], prompt_logprobs=[one(2), one(3)]),
    ],
)
def test_result_of_another_shape_leaks_nothing(outcome: SliceResult) -> None:
    scheduler = Scheduler(SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16), CacheConfig(block_size=4), 8, 32)
    params = SamplingParams(max_tokens=4, logprobs=1, prompt_logprobs=1)
    scheduler.add(Request("a", [1, 2, 3], params, seed=1))
    plan = scheduler.plan()
    assert plan is not None
    with pytest.raises(RuntimeError, match="step 0"):
        scheduler.apply(StepResult(plan.step_index, [outcome]))
    scheduler.fail_all("broken")
    scheduler.check_invariants()
    assert scheduler.num_used_blocks == 0 and not scheduler.num_running


@pytest.mark.parametrize(
    ("params", "name"),
    [
        (SamplingParams(repetition_penalty=1e-40), "repetition_penalty"),
        (SamplingParams(bad_words_token_ids=((10**6,),)), "bad_words_token_ids"),
        (SamplingParams(bad_words_token_ids=((),)), "bad_words_token_ids"),
    ],
)
def test_what_a_sampler_would_refuse_is_refused_before_it_is_queued(params: SamplingParams, name: str) -> None:
    with pytest.raises(ParameterError, match=name):
        params.validate(100)
