"""`octavo bench sharing`: blocks in use and blocks held against closed forms; prompts and lengths."""

from __future__ import annotations

from collections import Counter

import pytest

from octavo.bench.sharing import BEAMS, DATASETS, SAMPLES, draw_jobs, measure, own_text
from octavo.core.request import SamplingParams
from octavo.engine.engine import Engine
from octavo.engine.llm import make_config
from tests.models.tiny import IM_END_ID, write_tiny_gguf


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    path = write_tiny_gguf(tmp_path_factory.mktemp("models") / "tiny.gguf")
    return Engine.load(make_config(str(path), num_kv_blocks=512, threads=1))


def blocks(num_tokens: int) -> int:
    return -(-num_tokens // 16)


@pytest.mark.parametrize("num_prompt", [1, 15, 16, 17, 40])
@pytest.mark.parametrize("n", [2, 4])
def test_samples_save_the_full_blocks_of_the_prompt(engine: Engine, num_prompt: int, n: int) -> None:
    num_output = 30
    got = measure(engine, [([7] * num_prompt, num_output)], SAMPLES, n)
    # After the prompt's step all share all of its blocks; after each later one but the last, which ends all, each has its own.
    held = [n * blocks(num_prompt + i) for i in range(num_output - 1)]
    used = [blocks(num_prompt)] + [num_prompt // 16 + n * (blocks(num_prompt + i) - num_prompt // 16) for i in range(1, num_output - 1)]
    assert got.saved_by_step == round(1 - sum(used) / sum(held), 4)
    assert (got.peak_used, got.peak_held) == (max(used), max(held))
    assert got.num_preemptions == 0 and 0 <= got.saved <= 1


def test_beams_save_more_than_samples_and_hold_the_same(engine: Engine) -> None:
    jobs = [([5 + i] * (20 + 9 * i), 40) for i in range(3)]
    samples, beams = (measure(engine, jobs, method, 4) for method in (SAMPLES, BEAMS))
    assert beams.saved_by_step > samples.saved_by_step > 0
    assert beams.peak_held == samples.peak_held and beams.peak_used <= samples.peak_used


def test_the_high_water_mark_is_prompts_once_and_own_blocks(engine: Engine) -> None:
    """Choices of different lengths, several requests: at every step blocks(full prompt) + the sum of blocks(own tokens), exactly."""
    params = SamplingParams(temperature=1, max_tokens=60, logit_bias={IM_END_ID: 3.0})
    shapes = {}
    for i, (num_prompt, n) in enumerate(((1, 3), (16, 4), (35, 2), (47, 5))):
        fields = SamplingParams(n=n, seed=i, temperature=1, max_tokens=params.max_tokens, logit_bias=params.logit_bias)
        prepared = engine.prepare([9 + i] * num_prompt, fields)
        engine.add(prepared)
        shapes[prepared.request.request_id] = (num_prompt, n)
    made: Counter[tuple[str, int]] = Counter()
    running = {(name, choice) for name, (_, n) in shapes.items() for choice in range(n)}
    peak = want_peak = 0
    while engine.has_work:
        for event in engine.step():
            made[event.request_id, event.choice] += len(event.token_ids)
            if event.finish_reason is not None:
                running.discard((event.request_id, event.choice))
        if all(made[key] >= 2 for key in running):  # every choice has written a token of its own
            alive = {name for name, _ in running}
            want = sum(shapes[name][0] // 16 for name in alive)
            want += sum(blocks(shapes[name][0] + made[name, c] - 1) - shapes[name][0] // 16 for name, c in running)
            assert engine.scheduler.num_used_blocks == want
            peak, want_peak = max(peak, engine.scheduler.num_used_blocks), max(want_peak, want)
    assert peak == want_peak > 0 and len({count for count in made.values()}) > 3


def test_prompts_begin_at_different_places() -> None:
    token_ids = list(range(1000))
    jobs = list(draw_jobs(token_ids, DATASETS["alpaca"], 50, 3, 256))
    assert jobs == list(draw_jobs(token_ids, DATASETS["alpaca"], 50, 3, 256)) != list(draw_jobs(token_ids, DATASETS["alpaca"], 50, 4, 256))
    middle = [num_output > 39 for _, num_output in jobs]  # 39: the median
    assert sum(middle[:25]) == pytest.approx(12.5, abs=1) == sum(middle[25:])  # long outputs come with short prompts as with long ones
    assert len({prompt[0] for prompt, _ in jobs}) == 50
    assert all(len(prompt) >= 1 and num_output >= 1 and len(prompt) + num_output <= 256 for prompt, num_output in jobs)
    with pytest.raises(ValueError, match="--requests: 1001 prompts cannot begin at different places of a text of 1000 tokens"):
        list(draw_jobs(token_ids, DATASETS["alpaca"], 1001, 0, 256))


@pytest.mark.parametrize(("name", "prompt", "output"), [("alpaca", 19.31, 58.45), ("sharegpt", 161.31, 337.99)])
@pytest.mark.parametrize("num", [32, 1000])
def test_lengths_have_the_published_means(name: str, prompt: float, output: float, num: int) -> None:
    """But for what the upper limits and the last quantile cut off."""
    jobs = list(draw_jobs(list(range(5000)), DATASETS[name], num, 0, 8192))
    means = [sum(len(p) for p, _ in jobs) / num, sum(n for _, n in jobs) / num]
    assert means == pytest.approx([prompt, output], rel=0.1)


def test_the_own_text_is_text() -> None:
    assert len(own_text().split()) > 900 and own_text().isascii()
