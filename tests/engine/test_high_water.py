"""The high-water mark of the KV pool with n choices and with beams is blocks(prompt) + the sum of blocks(own tokens), exactly.

On the prompts and lengths of `octavo bench sharing`. The pool is looked at after every plan, when it holds a place for every token whose
KV the step computes; the last token of a choice is drawn and never computed. What counts as what, in blocks of B tokens:

- *blocks(prompt)*: the p // B full blocks, once, whatever n is.
- *blocks(own tokens)*: of each choice ceil((p + t) / B) - p // B for its t own tokens. A part-filled last block of the prompt is copied by
  the first write (the last owner keeps it), so each choice has one of its own, which begins with prompt tokens.
- Of beams, tokens that hypotheses have in common are own tokens once. With the prefix cache on the same holds for full blocks of choices
  that happen to say the same: once computed they are one block.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo.bench.sharing import BEAMS, DATASETS, SAMPLES, draw_jobs, own_text
from octavo.bench.steps import steps_to_end
from octavo.core.request import BeamParams, SamplingParams
from octavo.core.step import StepPlan, StepResult
from octavo.engine.engine import Engine
from octavo.engine.llm import make_config
from tests.models.tiny import write_tiny_gguf

BLOCK = 16
ROOM = {"num_kv_blocks": 4096, "max_num_seqs": 128, "max_num_batched_tokens": 8192, "threads": 1}
Jobs = list[tuple[list[int], int]]  # prompt, output tokens


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("models") / "tiny.gguf", context=2048)


def num_blocks(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK)


def closed_form(jobs: Jobs, n: int) -> int:
    """The mark of all jobs started in one step, from their lengths alone. Plan t computes own token t of every choice that has one more."""
    marks = [sum(num_blocks(len(prompt)) for prompt, _ in jobs)]
    for t in range(1, max(num_output for _, num_output in jobs)):
        alive = [len(prompt) for prompt, num_output in jobs if t < num_output]
        marks.append(sum(p // BLOCK + n * (num_blocks(p + t) - p // BLOCK) for p in alive))
    return max(marks)


def by_content(engine: Engine) -> int:
    """Blocks for the plan that was just made: full ones once for each text that they end, those being written once for each sequence."""
    places: set[object] = set()
    for seq in engine.scheduler.running_sequences:
        num_full = seq.num_computed // BLOCK
        places.update(tuple(seq.token_ids[: (j + 1) * BLOCK]) for j in range(num_full))
        places.update((seq.seq_id, j) for j in range(num_full, num_blocks(seq.num_computed + seq.num_scheduled)))
    return len(places)


def marks(engine: Engine, jobs: Jobs, method: str, width: int) -> Iterator[tuple[int, int]]:
    """(blocks in use, blocks by content) after every plan, until all jobs have ended."""
    seen: list[tuple[int, int]] = []
    execute = engine.backend.execute

    def executing(plan: StepPlan) -> StepResult:
        seen.append((engine.scheduler.num_used_blocks, by_content(engine)))
        return execute(plan)

    beam = BeamParams(width) if method == BEAMS else None
    for i, (prompt, num_output) in enumerate(jobs):
        engine.add(engine.prepare(prompt, SamplingParams(n=width, seed=i, max_tokens=num_output, beam=beam, ignore_eos=True)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.backend, "execute", executing)
        for step, _ in enumerate(steps_to_end(engine)):
            if step % 16 == 0:
                engine.scheduler.check_invariants()
            yield from seen
            seen.clear()
    assert engine.scheduler.num_used_blocks == 0 and engine.scheduler.stats.num_preemptions == 0


def bench_jobs(engine: Engine, dataset: str, num: int) -> Jobs:
    token_ids = engine.model.tokenizer.encode(own_text(), add_special_tokens=False)
    return list(draw_jobs(token_ids, DATASETS[dataset], num, 0, engine.max_model_len))


def check(path: Path, shares: list[tuple[str, int]], width: int, **options: Any) -> None:
    """``shares``: (data set, requests)."""
    for caching in (False, True):
        engine = Engine.load(make_config(str(path), **ROOM, enable_prefix_caching=caching, **options))
        for dataset, num in shares:
            jobs = bench_jobs(engine, dataset, num)
            samples = list(marks(engine, jobs, SAMPLES, width))
            if caching:
                assert all(used == wanted for used, wanted in samples)
                assert max(used for used, _ in samples) <= closed_form(jobs, width)
            else:
                assert max(used for used, _ in samples) == closed_form(jobs, width)
                for job in jobs[:: max(1, len(jobs) // 4)]:  # each alone
                    assert max(used for used, _ in marks(engine, [job], SAMPLES, width)) == closed_form([job], width)
            beams = list(marks(engine, jobs, BEAMS, width))
            assert all(used == wanted for used, wanted in beams)
            assert max(used for used, _ in beams) < closed_form(jobs, width)
        engine.close()


@pytest.mark.parametrize("width", [2, 4, 6])
def test_on_a_tiny_model(tiny: Path, width: int) -> None:
    check(tiny, [("alpaca", 8), ("sharegpt", 2)] if width == 2 else [("alpaca", 8)], width)


@pytest.mark.soak
@pytest.mark.model
@pytest.mark.parametrize("width", [2, 4, 6])
def test_on_a_real_model(smollm2_path: Path, width: int) -> None:
    check(smollm2_path, [("alpaca", 12), ("sharegpt", 2)], width)
